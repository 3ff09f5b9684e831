// The page: reads its data, makes a part for each rank, and keeps the chosen step the same in all that shows one.

const ROWS = 100; // of the table of steps at once
const FEW = 12; // groups that are shown before all are asked for

// What Python wrote, with columns as typed arrays and times in microseconds since the run began.
function decode(part) {
  const labels = part.labels.map(([name, kind, group]) => ({ name, kind, group }));
  let end = 0;
  const rows = part.rows.map((row) => ({
    ...row,
    tracks: row.tracks.map((track) => {
      const start = new Float64Array(track.s.length), ends = new Float64Array(track.s.length);
      let tenths = 0;
      track.s.forEach((delta, index) => {
        tenths += delta;
        start[index] = tenths / 10;
        ends[index] = (tenths + track.d[index]) / 10;
        if (ends[index] > end) end = ends[index];
      });
      return { start, end: ends, label: Int32Array.from(track.l) };
    }),
  }));
  const steps = part.steps.map((step, index) => ({ ...step, index }));
  const begins = steps.map((step) => step.start * 1e6);
  const stepAt = (time) => {
    const step = steps[firstFrom(begins, time + 1e-3) - 1];
    return step && time < step.end * 1e6 ? step : null;
  };
  return { ...part, labels, rows, steps, end, stepAt };
}

// Which step is shown: one, or none for the whole run.
class Chosen {
  constructor(model, view) {
    Object.assign(this, { model, view, step: null, watchers: [] });
  }

  choose(step) {
    this.step = step;
    const around = (step.end - step.start) * 0.015e6;
    this.view.show(step.start * 1e6 - around, step.end * 1e6 + around);
    this.watchers.forEach((watcher) => watcher());
  }

  whole() {
    this.step = null;
    this.view.show(0, this.view.end);
    this.watchers.forEach((watcher) => watcher());
  }

  by(count) {
    const { steps } = this.model;
    if (!steps.length) return;
    const next = this.step === null ? (count > 0 ? 0 : steps.length - 1) : this.step.index + count;
    if (steps[next]) this.choose(steps[next]);
  }

  // Draw everything once more.
  again() {
    this.view.zoom(1);
    this.watchers.forEach((watcher) => watcher());
  }

  get from() { return this.step === null ? 0 : this.step.start * 1e6; }

  get to() { return this.step === null ? this.model.end : this.step.end * 1e6; }

  get name() { return this.step === null ? "the whole run" : "step " + this.step.n; }
}

function tile(of, figure, why) {
  return make("div", "tile", make("div", "of", of), make("div", "figure", figure), make("div", "why", why));
}

function largest(table) {
  return Object.entries(table).sort((a, b) => b[1] - a[1]);
}

function tilesOf(model) {
  const { mean, occupancy, budgets } = model, tiles = make("div", "tiles");
  if (mean !== null) {
    const steady = model.steps.length > 1 ? "median of the steps after the first" : "the only whole step";
    tiles.append(tile("A step takes", seconds(mean.settled_s), steady));
    const bound = mean.share === null
      ? tile("Bound, of a step’s time", "not known", "no bound was recorded")
      : tile("Bound, of a step’s time", percent(mean.share), `${mean.binding} binds ${mean.binding_steps} of ${mean.bound_steps} steps`);
    tiles.append(bound);
    const waits = largest(mean.stalls), waited = waits.reduce((all, [, time]) => all + time, 0);
    tiles.append(tile("Waited in a step", seconds(waited), waits.length && waits[0][1] > 0 ? `most for: ${waits[0][0]}, ${seconds(waits[0][1])}` : "nothing waited"));
  }
  for (const tier of ["device", "host", "nvme"]) {
    const peak = occupancy[tier].reduce((most, now) => Math.max(most, now), 0);
    if (!peak) continue;
    const budget = budgets[tier], where = { device: "on the device", host: "in RAM", nvme: "on drives" }[tier];
    tiles.append(tile(`At most ${where}`, bytes(peak), budget && budget < 1e18 ? `of a budget of ${bytes(budget)}` : tier === "nvme" ? "size of the swap files" : "model states and buffers"));
  }
  return tiles;
}

function card(title, lead, ...children) {
  return make("section", "card", make("h2", "", title), lead ? make("p", "lead", lead) : null, ...children);
}

function stepChooser(model, chosen) {
  const button = (text, label, act) => {
    const made = make("button", "", text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.title = label;
    made.addEventListener("click", act);
    return made;
  };
  const back = button("◀", "the step before", () => chosen.by(-1)), on = button("▶", "the next step", () => chosen.by(1));
  const whole = button("whole run", "the whole run", () => chosen.whole());
  const input = make("input");
  input.type = "number";
  input.id = `step-${model.place}`;
  input.placeholder = "all";
  const label = make("label", "", "step");
  label.htmlFor = input.id;
  input.addEventListener("change", () => {
    const step = model.steps.find((one) => one.n === Number(input.value));
    if (step && input.value !== "") chosen.choose(step); else show();
  });
  const told = make("span", "of");
  const show = () => {
    input.value = chosen.step === null ? "" : chosen.step.n;
    whole.setAttribute("aria-pressed", chosen.step === null);
    const last = model.steps[model.steps.length - 1];
    told.textContent = model.steps.length ? `of ${model.steps[0].n} to ${last.n}` : "none is whole";
    [back.disabled, on.disabled] = [!model.steps.length || chosen.step?.index === 0, !model.steps.length || chosen.step === last];
  };
  chosen.watchers.push(show);
  show();
  const zoom = [
    button("+", "zoom in", () => chosen.view.zoom(0.6)), button("−", "zoom out", () => chosen.view.zoom(1 / 0.6)),
    button("←", "earlier", () => chosen.view.pan(-0.25)), button("→", "later", () => chosen.view.pan(0.25)),
  ];
  return make("div", "bar", label, back, input, on, told, whole, make("span", "gap"), ...zoom);
}

function legendOf(model, timeline) {
  const legend = make("div", "legend");
  const order = model.kinds.map((kind, index) => [kind, index]).sort((a, b) => rankOfKind(a[0]) - rankOfKind(b[0]));
  for (const [kind, index] of order) {
    const swatch = make("span", "swatch"), button = make("button", "", swatch, kind || "other");
    swatch.style.background = colourOfKind(kind);
    button.type = "button";
    button.title = "show or hide";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const hide = !timeline.hidden.has(index);
      if (hide) timeline.hidden.add(index); else timeline.hidden.delete(index);
      button.setAttribute("aria-pressed", !hide);
      timeline.surface.ask();
    });
    legend.append(button);
  }
  return legend;
}

const rankOfKind = (kind) => (KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length);

// Seconds of each kind, and of each group by kind, between two times. busy: while at least one of the kind was on.
function spent(model, from, to) {
  const kinds = model.kinds.map((kind) => ({ kind, events: 0, sum: 0, spans: [] }));
  const groups = new Map();
  const loop = model.rows.find((row) => row.loop)?.tracks[0];
  const groupAt = (time) => {
    const index = loop ? firstFrom(loop.start, time + 1e-3) - 1 : -1;
    return index >= 0 && time <= loop.end[index] ? model.labels[loop.label[index]].group : -1;
  };
  const add = (label, start, end) => {
    const inside = Math.min(end, to) - Math.max(start, from), kind = kinds[label.kind];
    if (inside < 0 || (inside < 0.05 && end - start > 0.05)) return; // it only touches; times are tenths
    kind.events += 1;
    kind.sum += inside;
    kind.spans.push([Math.max(start, from), Math.min(end, to)]);
    const group = kind.kind === "stall" ? groupAt(start) : label.group;
    if (group < 0) return;
    if (!groups.has(group)) groups.set(group, { group, sum: 0, kinds: new Float64Array(kinds.length) });
    groups.get(group).sum += inside;
    groups.get(group).kinds[label.kind] += inside;
  };
  for (const row of model.rows) {
    for (const { start, end, label } of row.tracks) {
      for (let index = Math.max(0, firstFrom(start, from) - 1); index < start.length && start[index] < to; index++) {
        if (end[index] >= from) add(model.labels[label[index]], start[index], end[index]);
      }
    }
  }
  for (const kind of kinds) {
    kind.spans.sort((a, b) => a[0] - b[0]);
    let busy = 0, until = -Infinity;
    for (const [start, end] of kind.spans) {
      busy += Math.max(0, end - Math.max(start, until));
      until = Math.max(until, end);
    }
    kind.busy = busy;
  }
  return { kinds: kinds.filter((kind) => kind.events), groups: [...groups.values()].sort((a, b) => b.sum - a.sum) };
}

function table(head, rows) {
  const cells = head.map(([text, style]) => { const cell = make("th", style, text); cell.scope = "col"; return cell; });
  return make("table", "", make("thead", "", make("tr", "", ...cells)), make("tbody", "", ...rows));
}

function named(text, kind) {
  const swatch = make("span", "swatch");
  swatch.style.background = colourOfKind(kind);
  return make("td", "name", swatch, text);
}

function kindTable(found, size) {
  const rows = found.kinds.sort((a, b) => b.busy - a.busy).map(({ kind, events, sum, busy }) => {
    const bar = make("i"), row = make("tr", "", named(kind || "other", kind), make("td", "", span(busy)),
      make("td", "", percent(size ? busy / size : 0), make("span", "share", bar)), make("td", "", span(sum)), make("td", "", count(events)));
    bar.style.width = Math.min(100, size ? (100 * busy) / size : 0) + "%";
    bar.style.background = colourOfKind(kind);
    row.dataset.kind = kind;
    row.dataset.busy = busy.toFixed(1);
    row.dataset.sum = sum.toFixed(1);
    return row;
  });
  return table([["kind", "left"], ["going on"], ["of the time"], ["added up"], ["events"]], rows);
}

function groupTable(model, found, all) {
  const most = found.groups.length ? found.groups[0].sum : 1;
  const rows = found.groups.slice(0, all ? undefined : FEW).map(({ group, sum, kinds }) => {
    const mix = make("div", "mix"), stalled = model.kinds.indexOf("stall");
    const order = [...kinds.keys()].filter((kind) => kinds[kind] > 0).sort((a, b) => rankOfKind(model.kinds[a]) - rankOfKind(model.kinds[b]));
    for (const kind of order) {
      const piece = make("i");
      piece.style.width = (100 * kinds[kind]) / sum + "%";
      piece.style.background = colourOfKind(model.kinds[kind]);
      piece.title = `${model.kinds[kind]}: ${span(kinds[kind])}`;
      mix.append(piece);
    }
    mix.style.width = Math.max(1, (100 * sum) / most) + "%";
    const waited = stalled < 0 ? 0 : kinds[stalled];
    const row = make("tr", "", make("td", "name", model.groups[group]), make("td", "left fill", mix), make("td", "", span(sum)),
      make("td", waited ? "" : "none", waited ? span(waited) : "–"));
    row.dataset.group = model.groups[group];
    row.dataset.sum = sum.toFixed(1);
    return row;
  });
  return table([["group", "left"], ["by kind", "left"], ["added up"], ["of it waits"]], rows);
}

function insideCard(model, chosen) {
  const title = make("h2"), kinds = make("div"), groups = make("div"), more = make("button", "", "all groups");
  more.type = "button";
  let all = false;
  more.addEventListener("click", () => { all = true; show(); });
  const show = () => {
    const found = spent(model, chosen.from, chosen.to);
    title.textContent = "Where the time goes in " + chosen.name;
    kinds.replaceChildren(make("h3", "", "By kind"), kindTable(found, chosen.to - chosen.from));
    groups.replaceChildren(make("h3", "", "By group of parameters"), groupTable(model, found, all));
    if (!all && found.groups.length > FEW) groups.append(make("div", "bar", more, make("span", "of", `${found.groups.length - FEW} more`)));
  };
  chosen.watchers.push(show);
  show();
  const lead = "“Going on” is the time in which at least one of the kind was under way; “added up” counts those at once each. What goes on beside the loop overlaps with it, so the rows come to more than the step. A wait counts for the group the loop was at.";
  return make("section", "card", title, make("p", "lead", lead), make("div", "two", kinds, groups));
}

// The table of steps: time and bound, the terms of the bound, and the waits by cause.
function stepsCard(model, chosen) {
  const { steps, mean } = model, known = mean !== null && mean.bound_s !== null;
  const lead = known
    ? "The bound is the time that the slowest single resource needs for what a step must do: compute, link, drives, the optimizer. No order of the same work is faster. At 100 % the step takes no longer than that; below, the rest is waiting and what did not overlap."
    : "Times are from the end of a step to the end of the next; waits are added up from the events of all threads.";
  const missing = known ? null : make("p", "empty", "No bound was recorded in this timeline, so the table has each step’s time and waits alone.");
  if (!steps.length) {
    return card("Step by step", null, make("p", "empty", "No step was over when this timeline ended: there is nothing to tabulate yet."));
  }
  const byMean = (tableOf) => {
    const names = new Set(Object.keys(mean[tableOf]));
    for (const step of steps) for (const name of Object.keys(step[tableOf])) names.add(name);
    return [...names].sort((a, b) => (mean[tableOf][b] || 0) - (mean[tableOf][a] || 0));
  };
  const terms = byMean("terms"), causes = byMean("stalls");
  const cells = (step, share, binding) => {
    const list = [make("td", "", seconds(step.seconds))];
    const none = () => make("td", "none", "–");
    if (known) {
      const bar = make("i"), part = make("span", "share", bar);
      bar.style.width = Math.min(100, 100 * (share || 0)) + "%";
      list.push(step.bound === null ? none() : make("td", "", seconds(step.bound)), share === null ? none() : make("td", "", percent(share), part),
        make("td", binding ? "left" : "left none", binding || "–"));
    }
    terms.forEach((name, index) => list.push(make("td", index ? "" : "edge", name in step.terms ? seconds(step.terms[name]) : "–")));
    causes.forEach((name, index) => list.push(make("td", (index ? "" : "edge") + (step.stalls[name] ? "" : " none"), step.stalls[name] ? seconds(step.stalls[name]) : "–")));
    return list;
  };
  const over = make("tr", "over", heads([["", 1, "left"], ["", known ? 4 : 1, ""], ["terms of the bound", terms.length, "left edge"], ["waits", causes.length, "left edge"]]));
  const names = [["step", "left"], ["time", ""], ...(known ? [["bound", ""], ["bound of time", ""], ["binding", "left"]] : [])];
  const columns = [...names, ...terms.map((name, index) => [name, index ? "" : "edge"]), ...causes.map((name, index) => [name, index ? "" : "edge"])];
  const head = make("thead", "", over, make("tr", "", ...columns.map(([text, style]) => make("th", style, text))));
  const times = known ? `${mean.binding} (${mean.binding_steps} of ${mean.bound_steps})` : "";
  const top = make("tr", "mean", make("td", "left", "mean"),
    ...cells({ seconds: mean.seconds, bound: mean.bound_s, terms: mean.terms, stalls: mean.stalls }, mean.share, times));
  top.dataset.step = "mean";
  const body = make("tbody"), bar = make("div", "bar");
  let page = 0;
  const show = () => {
    if (chosen.step !== null) page = Math.floor(chosen.step.index / ROWS);
    fill();
  };
  const fill = () => {
    const rows = steps.slice(page * ROWS, (page + 1) * ROWS).map((step) => {
      const share = step.bound === null || !step.seconds ? null : step.bound / step.seconds;
      const row = make("tr", step === chosen.step ? "pick chosen" : "pick", make("td", "left", String(step.n)), ...cells(step, share, step.binding));
      row.dataset.step = step.n;
      row.addEventListener("click", () => chosen.choose(step));
      return row;
    });
    body.replaceChildren(top, ...rows);
    bar.replaceChildren(...pages());
  };
  const pages = () => {
    const last = Math.ceil(steps.length / ROWS) - 1;
    if (!last) return [];
    const to = (text, next) => {
      const button = make("button", "", text);
      button.type = "button";
      button.disabled = next < 0 || next > last;
      button.addEventListener("click", () => { page = next; fill(); });
      return button;
    };
    return [to("earlier steps", page - 1), to("later steps", page + 1), make("span", "of", `${steps[page * ROWS].n} to ${steps[Math.min(steps.length, (page + 1) * ROWS) - 1].n}`)];
  };
  chosen.watchers.push(show);
  fill();
  return card("Step by step", lead, missing, make("div", "scroll", make("table", "", head, body)), bar);
}

function heads(list) {
  const fragment = document.createDocumentFragment();
  for (const [text, columns, style] of list) {
    if (!columns) continue;
    const cell = make("th", style, text);
    cell.colSpan = columns;
    fragment.append(cell);
  }
  return fragment;
}

function notesOf(model, most) {
  const notes = [];
  if (!model.ended) notes.push("The timeline was not closed: the run was going on, or was killed. What it had written until then is here; a step that was not over is not.");
  if (model.leftOut) notes.push(`The first ${count(most)} events are here; ${count(model.leftOut)} later ones are left out.`);
  return notes.map((note) => make("p", "note", note));
}

function makePart(part, place, most) {
  const model = decode(part);
  model.place = place;
  const view = new View(model.end), chosen = new Chosen(model, view), timeline = new Timeline(model, view, chosen);
  const facts = [`rank ${model.rank}`, span(model.end), `${model.steps.length} whole step${model.steps.length === 1 ? "" : "s"}`, `${count(model.events)} events`];
  const keys = make("p", "keys");
  for (const [key, does] of [["drag", "moves"], ["wheel", "zooms once you clicked in (before, with Ctrl)"], ["double click", "or"], ["Enter", "goes to an event"], ["arrows", "go through events"], ["W S A D", "zoom and move"], ["PageUp PageDown", "other steps"], ["0", "whole run"]]) {
    keys.append(make("kbd", "", key), ` ${does}  `);
  }
  const bytesHeld = model.occupancy.t.length
    ? new Occupancy(model, view).surface.box
    : make("p", "empty", "No bytes by tier were recorded in this timeline.");
  const strip = model.steps.length
    ? card("Steps", model.mean.bound_s === null ? "Seconds of each step. Click one to look inside." : "Seconds of each step: solid up to its bound, pale above. Click one to look inside.", make("div", "bar"), new Strip(model, chosen).surface.box)
    : null;
  const lead = "The first row is the training loop, each part of it up to the next. Below are threads at work, and what goes on beside the loop: transfers, a row for each that is under way at once.";
  const said = make("h3", "", "Bytes held by tier");
  said.style.marginTop = "18px";
  const section = make("div", "part", make("h1", "", model.file), make("p", "about", facts.join(" · ")), ...notesOf(model, most), tilesOf(model), strip,
    card("Timeline", lead, stepChooser(model, chosen), legendOf(model, timeline), timeline.surface.box, timeline.said, keys, said, bytesHeld),
    insideCard(model, chosen), stepsCard(model, chosen));
  return { section, model, chosen, timeline };
}

// The ranks beside each other: the slowest one holds up the others.
function ranksCard(parts, open) {
  const rows = parts.map((part, place) => {
    const { mean } = part, waits = mean === null ? [] : largest(mean.stalls), button = make("button", "", nameOf(parts, part));
    button.type = "button";
    button.addEventListener("click", () => open(place));
    const told = (text) => make("td", mean === null ? "none" : "", mean === null ? "–" : text());
    const share = () => (mean.share === null ? "not known" : `${percent(mean.share)}, ${mean.binding}`);
    const row = make("tr", "", make("td", "left", button), make("td", "name", part.file), make("td", "", String(part.steps.length)),
      told(() => seconds(mean.settled_s)), told(share), told(() => seconds(waits.reduce((all, [, time]) => all + time, 0))),
      make("td", waits.length ? "left" : "left none", waits.length ? waits[0][0] : "–"));
    row.dataset.part = place;
    return row;
  });
  const head = [["part", "left"], ["timeline", "left"], ["steps"], ["a step takes"], ["bound of time"], ["waits a step"], ["most for", "left"]];
  return card("Ranks", "What each rank’s own timeline says. Times in one are from its own start.", table(head, rows));
}

function nameOf(parts, part) {
  return parts.filter((other) => other.rank === part.rank).length > 1 ? part.file : `rank ${part.rank}`;
}

// What the address asks for: #part=1&step=12
function asked() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent), main = document.getElementById("parts");
  const tabs = document.getElementById("ranks"), made = new Map();
  const ranks = data.parts.length > 1 ? ranksCard(data.parts, (place) => open(place)) : null;
  const open = (place) => {
    if (!made.has(place)) made.set(place, makePart(data.parts[place], place, data.most));
    const part = made.get(place);
    main.replaceChildren(...(ranks ? [ranks] : []), part.section);
    [...tabs.children].forEach((tab, index) => tab.setAttribute("aria-selected", index === place));
    part.timeline.surface.draw();
    return part;
  };
  if (data.parts.length > 1) {
    data.parts.forEach((part, place) => {
      const tab = make("button", "", nameOf(data.parts, part));
      tab.type = "button";
      tab.setAttribute("role", "tab");
      tab.addEventListener("click", () => open(place));
      tabs.append(tab);
    });
  }
  const { part = "0", step = "" } = asked();
  const shown = open(Math.min(Math.max(0, Number(part) || 0), data.parts.length - 1));
  const first = shown.model.steps.find((one) => String(one.n) === step);
  if (first) shown.chosen.choose(first);
  shown.timeline.surface.draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => made.forEach((one) => one.chosen.again()));
  document.documentElement.dataset.ready = "true";
}

document.documentElement.dataset.errors = "0";
window.addEventListener("error", (event) => {
  document.documentElement.dataset.errors = Number(document.documentElement.dataset.errors) + 1;
  document.getElementById("parts").append(make("p", "note", `This page could not be drawn: ${event.message}`));
});
start();

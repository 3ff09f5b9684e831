// The drawn parts: the timeline, the tiers' bytes under it, and the strip of steps. What is not in sight is not drawn.
//
//   Surface   a canvas as wide as its place, sharp on every screen, drawn once a frame at most
//   View      the span of time in sight, shared by what is drawn beneath each other
//   Timeline, Occupancy, Strip

const GUTTER = window.innerWidth < 640 ? 80 : 132, AXIS = 26;

class Surface {
  constructor(paint, label, height) {
    Object.assign(this, { paint, height });
    this.canvas = make("canvas");
    this.canvas.style.height = height + "px";
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    this.box = make("div", "chart", this.canvas);
    this.width = 0;
    this.due = false;
    new ResizeObserver(() => this.ask()).observe(this.box);
  }

  // Draw in the next frame; or without one, where the page is not in sight.
  ask() {
    if (this.due) return;
    this.due = true;
    const draw = () => { if (this.due) this.draw(); };
    requestAnimationFrame(draw);
    setTimeout(draw, 150);
  }

  draw() {
    this.due = false;
    const width = this.box.clientWidth, height = this.height;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    this.width = width;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11.5px " + getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    this.paint(pen, width, height);
  }
}

class View {
  constructor(end) {
    this.end = Math.max(end, 1);
    this.from = 0;
    this.to = this.end;
    this.watchers = [];
  }

  // Show a span, within the run and no narrower than a microsecond.
  show(from, to) {
    const size = Math.min(Math.max(to - from, 1), this.end * 1.02);
    this.from = Math.max(-0.01 * this.end, Math.min(from, this.end * 1.01 - size));
    this.to = this.from + size;
    this.watchers.forEach((watcher) => watcher());
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  at(x, width) { return this.from + ((x - GUTTER) / (width - GUTTER)) * (this.to - this.from); }

  x(time, width) { return GUTTER + ((time - this.from) / (this.to - this.from)) * (width - GUTTER); }
}

function fitted(pen, text, room) {
  const width = pen.measureText(text).width;
  if (width <= room) return text;
  const letters = Math.floor((text.length * room) / width) - 1;
  return letters < 2 ? "" : text.slice(0, letters) + "…";
}

class Timeline {
  constructor(model, view, chosen) {
    Object.assign(this, { model, view, chosen, hidden: new Set(), drawn: 0 });
    this.lines = [];
    let top = AXIS + 4, before = null;
    for (const row of model.rows) {
      const joined = before !== null && row.lane && before.lane && before.name === row.name;
      if (before !== null && !joined) top += 9;
      const lanes = row.lane ? model.rows.filter((other) => other.lane && other.name === row.name).length : 1;
      const high = row.loop ? 26 : !row.lane ? 19 : lanes <= 6 ? 15 : lanes <= 14 ? 9 : 5;
      row.tracks.forEach((track, depth) => {
        this.lines.push({ row, track, top, high, head: depth === 0 && !joined, lanes });
        top += high + (high > 10 ? 2 : 1);
      });
      before = row;
    }
    this.surface = new Surface((pen, width) => this.paint(pen, width), "Timeline of events; arrow keys go through them", top + 8);
    this.canvas = this.surface.canvas;
    this.canvas.tabIndex = 0;
    this.canvas.className = "drag";
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.surface.box.append(this.tip);
    this.said = make("div", "said");
    this.said.setAttribute("aria-live", "polite");
    this.here = null; // {line, index}: what is pointed at
    this.listen();
    view.watchers.push(() => this.surface.ask());
    this.say();
  }

  paint(pen, width) {
    const { model } = this, begun = performance.now();
    this.drawn = 0;
    this.colours = model.kinds.map((kind) => colour(variableOfKind(kind)));
    const ink = { soft: colour("soft"), faint: colour("faint"), grid: colour("grid"), line: colour("line"), band: colour("band") };
    this.paintTime(pen, width, ink);
    for (const line of this.lines) {
      if (line.head) {
        pen.fillStyle = ink.soft;
        const lanes = line.lanes > 1 ? ` ×${line.lanes}` : "";
        const middle = line.row.lane ? line.top + Math.max(line.high / 2, 6) : line.top + line.high / 2;
        pen.fillText(fitted(pen, line.row.name, GUTTER - 16 - pen.measureText(lanes).width) + lanes, 0, middle);
      }
    }
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, width - GUTTER, this.surface.height);
    pen.clip();
    for (const line of this.lines) this.paintLine(pen, width, line);
    this.paintHere(pen, width);
    pen.restore();
    Object.assign(document.documentElement.dataset, { drawn: this.drawn, took: performance.now() - begun });
  }

  paintTime(pen, width, ink) {
    const { view, model } = this, high = this.surface.height;
    pen.fillStyle = ink.band;
    const places = model.steps.map((step) => [view.x(step.start * 1e6, width), view.x(step.end * 1e6, width), step]);
    const wide = places.filter(([from, to]) => to > GUTTER && from < width && to - from > 8);
    for (const [from, to, step] of wide) {
      if (step.index % 2) continue;
      const left = Math.max(from, GUTTER);
      pen.fillRect(left, AXIS - 4, Math.min(to, width) - left, high - AXIS + 4);
    }
    const step = nice(((view.to - view.from) * 96) / (width - GUTTER));
    for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
      const x = Math.round(view.x(time, width)) + 0.5;
      if (x < GUTTER) continue;
      pen.fillStyle = ink.grid;
      pen.fillRect(x, AXIS - 4, 1, high - AXIS);
      pen.fillStyle = ink.faint;
      const text = moment(Math.abs(time) < step / 1e6 ? 0 : time, step);
      if (x + 4 + pen.measureText(text).width < width) pen.fillText(text, x + 4, 9);
    }
    pen.fillStyle = ink.line;
    pen.fillRect(GUTTER, AXIS - 5, width - GUTTER, 1);
    pen.fillStyle = ink.faint;
    pen.fillText("time", 0, 9);
  }

  paintLine(pen, width, line) {
    const { view } = this, { start, end, label } = line.track, labels = this.model.labels;
    const scale = (width - GUTTER) / (view.to - view.from);
    const gathered = new Float64Array(this.model.kinds.length); // time of each kind in the pixel `at`
    let at = -1, any = false;
    const flush = () => {
      if (!any) return;
      let most = 0, all = 0;
      gathered.forEach((time, kind) => { all += time; if (time > gathered[most]) most = kind; });
      pen.globalAlpha = Math.min(1, 0.3 + 0.7 * all * scale);
      pen.fillStyle = this.colours[most];
      pen.fillRect(at, line.top, 1, line.high);
      pen.globalAlpha = 1;
      gathered.fill(0);
      any = false;
    };
    let index = Math.max(0, firstFrom(start, view.from) - 1);
    for (; index < start.length && start[index] <= view.to; index++) {
      if (end[index] < view.from) continue;
      const { kind, name } = labels[label[index]];
      if (this.hidden.has(kind)) continue;
      this.drawn += 1;
      const x = GUTTER + (start[index] - view.from) * scale, size = (end[index] - start[index]) * scale;
      if (size < 1.5) {
        const pixel = Math.floor(x);
        if (pixel !== at) flush();
        at = pixel;
        any = true;
        gathered[kind] += Math.max(end[index] - start[index], 1e-3);
        continue;
      }
      flush();
      this.paintEvent(pen, width, line, kind, name, x, size);
    }
    flush();
  }

  paintEvent(pen, width, line, kind, name, x, size) {
    const left = Math.max(x, GUTTER - 4), right = Math.min(x + size - (size > 4 ? 0.75 : 0), width + 4);
    pen.fillStyle = this.colours[kind];
    if (right - left > 7 && line.high > 8) {
      pen.beginPath();
      pen.roundRect(left, line.top, right - left, line.high, Math.min(3, line.high / 4));
      pen.fill();
    } else {
      pen.fillRect(left, line.top, right - left, line.high);
    }
    const seen = Math.max(left, GUTTER);
    if (right - seen < 34 || line.high < 14) return;
    pen.fillStyle = colour(PALE.has(this.model.kinds[kind]) ? "on-pale" : "on-kind");
    const text = fitted(pen, name, right - seen - 10);
    if (text) pen.fillText(text, seen + 5, line.top + line.high / 2 + 0.5);
  }

  paintHere(pen, width) {
    if (this.here === null) return;
    const { line, index } = this.here, from = this.view.x(line.track.start[index], width);
    const size = Math.max(this.view.x(line.track.end[index], width) - from, 2);
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.roundRect(from - 1, line.top - 1, size + 2, line.high + 2, 4);
    pen.stroke();
  }

  // The event at a point, or within three pixels of it.
  find(x, y) {
    if (x < GUTTER) return null;
    const line = this.lines.find((one) => y >= one.top - 1 && y <= one.top + one.high + 1);
    if (!line) return null;
    const { start, end, label } = line.track, time = this.view.at(x, this.surface.width);
    const near = this.view.at(x + 3, this.surface.width) - time;
    const seen = (index) => index >= 0 && index < start.length && !this.hidden.has(this.model.labels[label[index]].kind);
    const after = firstFrom(start, time);
    let best = null, least = near;
    for (const index of [after - 1, after]) {
      if (!seen(index)) continue;
      const away = Math.max(start[index] - time, time - end[index], 0);
      if (away <= least) { best = { line, index }; least = away - 1e-9; }
    }
    return best;
  }

  told({ line, index }) {
    const { start, end, label } = line.track, { name, kind, group } = this.model.labels[label[index]];
    const step = this.model.stepAt(start[index]);
    const facts = [["kind", this.model.kinds[kind]], ["start", moment(start[index], 1)], ["duration", span(end[index] - start[index])]];
    if (group >= 0) facts.push(["group", this.model.groups[group]]);
    if (step) facts.push(["step", String(step.n)]);
    return { name, kind: this.model.kinds[kind], facts };
  }

  point(here) {
    this.here = here;
    this.say();
    this.surface.ask();
  }

  say() {
    this.said.replaceChildren();
    if (this.here === null) {
      this.said.append("Point at an event, or go through them with the arrow keys.");
      return;
    }
    const { name, kind, facts } = this.told(this.here), swatch = make("span", "swatch");
    swatch.style.background = colourOfKind(kind);
    this.said.append(swatch, make("b", "", name), facts.map((fact) => fact.join(" ")).join(" · "));
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const here = this.find(x, y);
    if (here === null) { this.tip.hidden = true; return; }
    this.point(here);
    const { name, facts } = this.told(here);
    this.tip.replaceChildren(make("b", "", name), ...facts.map((fact) => make("div", "", fact.join(": "))));
    this.tip.hidden = false;
    const left = x + 18 + this.tip.offsetWidth > box.width ? x - this.tip.offsetWidth - 12 : x + 18;
    this.tip.style.left = Math.max(0, left) + "px";
    this.tip.style.top = y + 16 + "px";
  }

  listen() {
    const { canvas, view } = this;
    let held = null;
    const move = (event) => {
      const by = ((held.x - event.clientX) / (this.surface.width - GUTTER)) * (held.to - held.from);
      view.show(held.from + by, held.to + by);
    };
    const drop = () => {
      held = null;
      window.removeEventListener("pointermove", move);
      for (const name of ["pointerup", "pointercancel"]) window.removeEventListener(name, drop);
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || held !== null) return;
      held = { x: event.clientX, from: view.from, to: view.to };
      this.tip.hidden = true;
      window.addEventListener("pointermove", move);
      for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, drop);
    });
    canvas.addEventListener("pointermove", (event) => { if (held === null) this.hover(event); });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => this.enter());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // The wheel zooms where the timeline has the focus, or with Ctrl; else the page scrolls as ever.
  wheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    if (sideways) this.view.pan(event.deltaX / this.surface.width);
    else this.view.zoom(Math.exp(event.deltaY * 0.0018), this.view.at(Math.max(x, GUTTER), this.surface.width));
  }

  key(event) {
    const does = {
      "+": () => this.view.zoom(0.6), "=": () => this.view.zoom(0.6), w: () => this.view.zoom(0.6),
      "-": () => this.view.zoom(1 / 0.6), s: () => this.view.zoom(1 / 0.6),
      a: () => this.view.pan(-0.25), d: () => this.view.pan(0.25), 0: () => this.chosen.whole(),
      PageUp: () => this.chosen.by(-1), PageDown: () => this.chosen.by(1),
      ArrowLeft: () => this.go(-1), ArrowRight: () => this.go(1), ArrowUp: () => this.other(-1), ArrowDown: () => this.other(1),
      Enter: () => this.enter(), Escape: () => { this.tip.hidden = true; this.point(null); },
    }[event.key];
    if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    does();
  }

  enter() {
    if (this.here === null) return;
    const { line, index } = this.here, from = line.track.start[index], size = Math.max(line.track.end[index] - from, 1);
    this.view.show(from - 0.6 * size, from + 1.6 * size);
  }

  // To the event before or after on the same line; brings it in sight.
  go(by) {
    if (this.here === null) { this.other(0); return; }
    const { line, index } = this.here, next = index + by;
    if (next < 0 || next >= line.track.start.length) return;
    const from = line.track.start[next], size = this.view.to - this.view.from;
    if (from < this.view.from || from > this.view.to) this.view.show(from - size / 2, from + size / 2);
    this.point({ line, index: next });
  }

  // To the line above or below, at the same time.
  other(by) {
    const place = this.here === null ? 0 : this.lines.indexOf(this.here.line) + by;
    const line = this.lines[place];
    if (!line) return;
    const time = this.here === null ? this.view.from : this.here.line.track.start[this.here.index];
    const { start } = line.track, index = firstFrom(start, time);
    this.point({ line, index: Math.min(index, start.length - 1) });
  }
}

class Occupancy {
  constructor(model, view) {
    Object.assign(this, { model, view, tiers: ["device", "host", "nvme"] });
    this.peaks = this.tiers.map((tier) => model.occupancy[tier].reduce((most, now) => Math.max(most, now), 0));
    this.highs = this.peaks.map((peak) => (peak ? 62 : 18));
    const height = this.highs.reduce((all, high) => all + high + 12, 0);
    this.surface = new Surface((pen, width) => this.paint(pen, width), "Bytes held by each tier over time", height);
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.surface.box.append(this.tip);
    this.at = null;
    view.watchers.push(() => this.surface.ask());
    const canvas = this.surface.canvas;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.at = null; this.tip.hidden = true; this.surface.ask(); });
  }

  hover(event) {
    const box = this.surface.canvas.getBoundingClientRect(), x = event.clientX - box.left;
    if (x < GUTTER) return;
    this.at = this.view.at(x, this.surface.width);
    const index = firstFrom(this.model.occupancy.t, this.at + 1e-9) - 1;
    const rows = this.tiers.map((tier) => make("div", "", `${tier}: ${index < 0 ? "not told yet" : bytes(this.model.occupancy[tier][index])}`));
    this.tip.replaceChildren(make("b", "", "at " + moment(this.at, 1000)), ...rows);
    this.tip.hidden = false;
    this.tip.style.left = Math.max(0, x + 18 + this.tip.offsetWidth > box.width ? x - this.tip.offsetWidth - 12 : x + 18) + "px";
    this.tip.style.top = event.clientY - box.top + 14 + "px";
    this.surface.ask();
  }

  paint(pen, width) {
    let top = 2;
    this.tiers.forEach((tier, index) => {
      this.paintTier(pen, width, tier, this.peaks[index], top, this.highs[index]);
      top += this.highs[index] + 12;
    });
    if (this.at === null) return;
    pen.fillStyle = colour("ink");
    pen.fillRect(this.view.x(this.at, width), 0, 1, top - 12);
  }

  paintTier(pen, width, tier, peak, top, high) {
    pen.fillStyle = colour("soft");
    pen.fillText(tier, 0, top + 8);
    pen.fillStyle = colour("faint");
    if (!peak) { pen.fillText("nothing held", GUTTER + 4, top + 8); return; }
    const budget = this.model.budgets[tier] || 0, fits = budget > 0 && budget < 4 * peak;
    const most = fits ? Math.max(budget, peak) : peak;
    pen.fillText(fitted(pen, `peak ${bytes(peak)}`, GUTTER - 6), 0, top + 25);
    if (budget > 0 && budget < 1e18) pen.fillText(fitted(pen, `of ${bytes(budget)}`, GUTTER - 6), 0, top + 41);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, width - GUTTER, top + high + 2);
    pen.clip();
    pen.fillStyle = colour("band");
    pen.fillRect(GUTTER, top, width - GUTTER, high);
    this.paintSteps(pen, width, tier, top, high, most * 1.06);
    if (fits) {
      pen.strokeStyle = colour("faint");
      pen.lineWidth = 1;
      pen.setLineDash([4, 4]);
      const y = Math.round(top + high - (budget / (most * 1.06)) * high) + 0.5;
      pen.beginPath();
      pen.moveTo(GUTTER, y);
      pen.lineTo(width, y);
      pen.stroke();
      pen.setLineDash([]);
    }
    pen.restore();
  }

  // A line that keeps its height until the next change; within one pixel the most counts.
  paintSteps(pen, width, tier, top, high, most) {
    const { t } = this.model.occupancy, held = this.model.occupancy[tier], { view } = this;
    const y = (value) => top + high - (value / most) * high;
    let index = Math.max(0, firstFrom(t, view.from) - 1), pixel = null, peak = 0, x = 0;
    const first = Math.max(view.x(t[index], width), GUTTER - 2), points = [];
    for (; index < t.length && t[index] <= view.to; index++) {
      x = Math.max(view.x(t[index], width), GUTTER - 2);
      const now = Math.floor(x);
      peak = now === pixel ? Math.max(peak, held[index]) : held[index];
      if (now !== pixel) points.push([x, peak]); else points[points.length - 1][1] = peak;
      if (now === pixel && held[index] < peak) points.push([x + 0.5, held[index]]);
      pixel = now;
    }
    if (!points.length) return;
    const last = Math.min(view.x(this.model.end, width), width + 2);
    pen.beginPath();
    pen.moveTo(first, y(points[0][1]));
    points.forEach(([at, value], place) => {
      if (place) pen.lineTo(at, y(points[place - 1][1]));
      pen.lineTo(at, y(value));
    });
    pen.lineTo(last, y(points[points.length - 1][1]));
    pen.strokeStyle = colour(tier);
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.stroke();
    pen.lineTo(last, top + high);
    pen.lineTo(first, top + high);
    pen.globalAlpha = 0.16;
    pen.fillStyle = colour(tier);
    pen.fill();
    pen.globalAlpha = 1;
  }
}

// A bar for each step: solid up to its bound, where there is one, and pale above.
class Strip {
  constructor(model, chosen) {
    Object.assign(this, { model, chosen });
    const times = model.steps.map((step) => step.seconds), sorted = [...times].sort((a, b) => a - b);
    const usual = sorted[Math.floor(0.9 * (sorted.length - 1))] || 1;
    this.most = Math.min(sorted[sorted.length - 1], 2.2 * usual) || 1;
    this.surface = new Surface((pen, width) => this.paint(pen, width), "Seconds of each step; the step buttons choose one", 118);
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.surface.box.append(this.tip);
    const canvas = this.surface.canvas;
    canvas.style.cursor = "pointer";
    canvas.addEventListener("click", (event) => { const step = this.find(event); if (step) chosen.choose(step); });
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    chosen.watchers.push(() => this.surface.ask());
  }

  find(event) {
    const x = event.clientX - this.surface.canvas.getBoundingClientRect().left, { steps } = this.model;
    return x < GUTTER ? null : steps[Math.min(steps.length - 1, Math.floor(((x - GUTTER) / (this.surface.width - GUTTER)) * steps.length))];
  }

  hover(event) {
    const step = this.find(event), box = this.surface.canvas.getBoundingClientRect(), x = event.clientX - box.left;
    this.tip.hidden = !step;
    if (!step) return;
    const rows = [`time: ${seconds(step.seconds)}`];
    if (step.bound !== null) rows.push(`bound: ${seconds(step.bound)}, ${percent(step.bound / step.seconds)} of the time`, `binding: ${step.binding}`);
    this.tip.replaceChildren(make("b", "", "step " + step.n), ...rows.map((row) => make("div", "", row)));
    this.tip.style.left = Math.max(0, x + 18 + this.tip.offsetWidth > box.width ? x - this.tip.offsetWidth - 12 : x + 18) + "px";
    this.tip.style.top = "14px";
  }

  paint(pen, width) {
    const { steps } = this.model, top = 8, base = this.surface.height - 20, high = base - top;
    const each = (width - GUTTER) / steps.length, gap = each > 5 ? Math.min(3, each * 0.18) : 0;
    const mark = nice((this.most * 1e6) / 5) / 1e6;
    for (let value = 0; value <= this.most * 1.001; value += mark) {
      const y = Math.round(base - (value / this.most) * high) + 0.5;
      pen.fillStyle = colour(value ? "grid" : "line");
      pen.fillRect(GUTTER, y, width - GUTTER, 1);
      pen.fillStyle = colour("faint");
      pen.textAlign = "right";
      pen.fillText(value ? moment(value * 1e6, mark * 1e6) : "0", GUTTER - 10, y);
      pen.textAlign = "left";
    }
    const accent = colour("accent"), pale = colour("step"), bar = colour("device");
    steps.forEach((step, index) => {
      const x = GUTTER + index * each, tall = Math.min(step.seconds / this.most, 1) * high;
      const wide = Math.max(each - gap, 1), known = step.bound !== null;
      if (step === this.chosen.step) {
        pen.fillStyle = colour("accent-soft");
        pen.fillRect(x - gap / 2, top - 6, Math.max(each, 2), high + 6);
      }
      pen.fillStyle = known ? pale : bar;
      pen.fillRect(x, base - tall, wide, tall);
      if (known) {
        pen.fillStyle = bar;
        const solid = Math.min(step.bound / this.most, 1) * high;
        pen.fillRect(x, base - solid, wide, solid);
      }
      if (step.seconds > this.most) {
        pen.fillStyle = colour("card");
        pen.fillRect(x, top + 5, wide, 2.5);
      }
      if (step === this.chosen.step) {
        pen.fillStyle = accent;
        pen.fillRect(x, base + 1, Math.max(wide, 2), 3);
      }
    });
    const every = Math.max(1, nice((56 * steps.length) / (width - GUTTER)));
    pen.fillStyle = colour("faint");
    pen.textAlign = "center";
    steps.forEach((step, index) => {
      if (step.n % every === 0 || (index === 0 && every > 2)) pen.fillText(String(step.n), Math.min(GUTTER + (index + 0.5) * each, width - 12), base + 12);
    });
    pen.textAlign = "left";
    pen.fillText("step", 0, base + 12);
    pen.fillText("seconds", 0, top + 2);
  }
}

"""`tiered report`: timelines read as they were written or cut off, the numbers of its tables, its page in a browser."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tiered.cli import main as run
from tiered.cli import recorded
from tiered.cli import report as command
from tiered.cli.looking import Reporting
from tiered.cli.options import parse
from tiered.cli.page import page
from tiered.cli.recorded import group_of, read
from tiered.cli.steps import mean_of, steps_of
from tiered.stats import Meter

HOSTILE = "</script><img src=x onerror=alert(1)>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 120
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")


def event(name: str, kind: str, row: int, start: float, duration: float) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": row, "ts": start, "dur": duration}


def limit(step: int, ts: float, bound: float) -> dict[str, Any]:
    args = {
        "step": step, "seconds": 0.002, "bound_s": bound, "binding": "drive read+write" if bound > 0.001 else "compute",
        "terms": {"compute": 0.0008, "drive": bound}, "stalls": {"fetch": 0.0001, "norm": 0.0003},
    }  # fmt: skip
    return {"name": "limit", "cat": "limit", "ph": "i", "pid": 0, "tid": 1, "ts": ts, "args": args}


def events(steps: int = 3, rank: int = 0, group: str = "head") -> list[dict[str, Any]]:
    """Steps of 2000 µs each, from 100 µs on: forward 1000 with a wait of 200, backward 500, the update 500."""
    told: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "tid": 0, "args": {"name": f"rank {rank}"}},
        {"name": "thread_name", "ph": "M", "tid": 1, "args": {"name": "loop"}},
        {"name": "thread_name", "ph": "M", "tid": 2, "args": {"name": "MainThread"}},
        {"name": "thread_name", "ph": "M", "tid": 1000, "args": {"name": "drive 1"}},
        {"name": "thread_name", "ph": "M", "tid": 1001, "args": {"name": "drive 2"}},
        {"name": "groups", "ph": "M", "tid": 1, "args": {"names": [group]}},
        {"name": "budgets", "ph": "M", "tid": 1, "args": {"device": 8 << 20, "host": 16 << 20}},
    ]
    for step in range(steps):
        at = 100 + 2000 * step
        held = {"device": (1 + step) << 20, "host": 3 << 20, "nvme": 0}
        told.append({"name": "occupancy", "ph": "C", "tid": 1, "ts": at, "args": held})
        told.append(event("wait: fetch", "stall", 2, at + 100, 200))
        told.append(event("read param of group 0", "drive", 1000, at + 50, 400))
        told.append(event("write exp_avg of group 0", "drive", 1001, at + 250, 400))
        told.append(event("read exp_avg of group 0", "drive", 1000, at + 450, 100))
        told.append(event(f"forward {group}", "forward", 1, at, 1000))
        told.append(event(f"backward {group}", "backward", 1, at + 1000, 500))
        told.append(event(f"update {group}", "update", 2, at + 1500, 300))
        told.append(event("wait: norm", "stall", 2, at + 1550, 50))
        told.append(event("step", "step", 1, at + 1500, 500))
    return [{**one, "pid": rank} for one in told]


def text_of(told: list[dict[str, Any]], ended: bool = True) -> str:
    end = [{"name": "end", "ph": "i", "s": "g", "pid": 0, "tid": 1, "ts": 1e5}] if ended else []
    lines = [json.dumps(one) for one in told + end]
    return "[\n" + ",\n".join(lines) + ("\n]\n" if ended else ",\n")


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(told: list[dict[str, Any]], name: str = "run.json", *, ended: bool = True) -> Path:
        (tmp_path / name).write_text(text_of(told, ended), encoding="utf-8")
        return tmp_path / name

    return written


def train(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    swap = path.parent / "swap"
    swap.mkdir()
    config = tiered.Config(
        device="cpu", trace=path, nvme=swap, param_tier="nvme", optimizer_tier="nvme", host_budget="8MiB"
    )
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


# --- what a timeline holds ---


def test_a_run_writes_what_a_report_tells_and_its_bytes_are_those_of_the_budgets(tmp_path: Path) -> None:
    train(tmp_path / "run.json")
    found = read(tmp_path / "run.json")
    assert found.ended
    assert found.groups == ("0", "1", "2")
    assert found.budgets["host"] == 8 << 20
    assert len(steps_of(found)) == 2
    assert {label.group for label in found.labels if label.kind == "drive read"} == {"0", "1", "2"}
    times = [one[0] for one in found.occupancy]
    assert times == sorted(times)
    assert len(times) > 2
    assert all(before[1:] != after[1:] for before, after in zip(found.occupancy, found.occupancy[1:], strict=False))
    assert all(0 <= host <= 8 << 20 and nvme > 0 for _, _, host, nvme in found.occupancy)
    assert max(device for _, device, _, _ in found.occupancy) > 0


def test_without_a_timeline_nobody_asks_for_the_bytes() -> None:
    meter = Meter()
    meter.watch(["a"], {}, lambda: pytest.fail("asked"))
    meter.at("forward", "a")
    meter.at("step")


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_timeline_cut_anywhere_in_its_last_line_is_one(cut: int, write: Write) -> None:
    path = write(events(), ended=False)
    whole = read(path)
    path.write_bytes(path.read_bytes()[:-cut])
    found = read(path)
    assert not found.ended
    assert whole.events - found.events == (0 if cut == 1 else 1)
    assert len(steps_of(found)) == (3 if cut == 1 else 2)


def test_a_timeline_whose_tail_was_never_written_is_one(write: Write) -> None:
    path = write(events(), ended=False)
    path.write_bytes(path.read_bytes() + bytes(5000))
    assert len(steps_of(read(path))) == 3


def test_a_timeline_that_another_program_has_written_again_is_one(tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(events()), encoding="utf-8")
    assert len(steps_of(read(path))) == 3


def test_events_of_others_are_left_alone(write: Write) -> None:
    told = [*events(), {"ph": "B", "name": "x"}, {"ph": "C", "name": "other", "args": {}}, {"ph": "i", "name": "x"}]
    assert read(write(told)).events == read(write(events())).events


def test_no_more_events_than_a_page_can_show_are_kept(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST", 10)
    found = read(write(events()))
    assert (found.events, found.left_out) == (27, 17)
    assert sum(len(row.start) for row in found.rows.values()) == 10


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [
        ("forward a.b", "forward", "a.b"),
        ("update a", "update", "a"),
        ("early update a", "update", "a"),
        ("gradient of a", "gradient", "a"),
        ("read param of group 1", "drive read", "second"),
        ("read param of group 7", "drive read", "group 7"),
        ("want of groups [0]", "ranks", "first"),
        ("want of groups [0, 1]", "ranks", ""),
        ("wait: fetch", "stall", ""),
        ("save to run/saved", "save", ""),
        ("step", "step", ""),
        ("commit", "commit", ""),
        ("forward a", "", ""),
    ],
)
def test_an_event_is_about_the_group_that_its_name_says(name: str, kind: str, group: str) -> None:
    assert group_of(name, kind, ["first", "second"]) == group


# --- the numbers ---


def test_steps_without_a_bound_have_their_times_and_the_waits_inside_of_them(write: Write) -> None:
    told = [*events(), event("wait: save", "stall", 3, 2000, 300)]  # 100 of it in the first step, 200 in the second
    steps = steps_of(read(write(told)))
    assert [step.number for step in steps] == [1, 2, 3]
    assert [step.seconds for step in steps] == pytest.approx([0.002] * 3)
    assert steps[0].stalls == pytest.approx({"fetch": 2e-4, "norm": 5e-5, "save": 1e-4})
    assert steps[1].stalls == pytest.approx({"fetch": 2e-4, "norm": 5e-5, "save": 2e-4})
    mean = mean_of(steps)
    assert mean is not None
    assert (mean.bound_s, mean.share, mean.bound_steps) == (None, None, 0)
    assert mean.stalls == pytest.approx({"fetch": 2e-4, "norm": 5e-5, "save": 1e-4})


def test_the_bound_is_that_of_its_step_and_the_mean_is_of_those_that_have_one(write: Write) -> None:
    told = [*events(), limit(11, 1700, 0.0016), limit(12, 4099, 0.001)]
    steps = steps_of(read(write(told)))
    assert [step.number for step in steps] == [11, 12, 13]
    assert [step.limit and step.limit.bound_s for step in steps] == [0.0016, 0.001, None]
    assert steps[0].stalls == {"fetch": 0.0001, "norm": 0.0003}  # as told, not as added up
    mean = mean_of(steps)
    assert mean is not None
    assert mean.bound_s == pytest.approx(0.0013)
    assert mean.share == pytest.approx(0.65)
    assert mean.terms == pytest.approx({"compute": 0.0008, "drive": 0.0013})
    assert (mean.binding_steps, mean.bound_steps) == (1, 2)


def test_a_step_that_never_ended_gives_its_bound_to_no_other(write: Write) -> None:
    steps = steps_of(read(write([*events(), limit(3, 5700, 0.001), limit(4, 7700, 0.002)])))
    assert [step.limit and step.limit.step for step in steps] == [None, None, 3]


def test_a_run_that_was_killed_in_its_first_step_has_no_step(write: Write) -> None:
    found = read(write([one for one in events(1) if one.get("cat") != "step"], ended=False))
    assert steps_of(found) == []
    assert mean_of([]) is None
    assert page([found])


# --- the command ---


def test_every_option_reaches_its_argument() -> None:
    want = Reporting(timelines=(Path("a.json"), Path("b.json")), output=Path("c.html"))
    assert parse(["report", "a.json", "b.json", "-o", "c.html"]) == want


def test_a_report_is_one_page_that_loads_nothing(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    line = [sys.executable, "-m", "tiered", "report", str(write(events())), "-o", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{out}: 3 steps, 27 events\n")
    text = out.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"https?:|src=|href=|@import|url\(", text.replace("'none'", ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json"]


def test_a_page_is_replaced_as_a_whole(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    out.write_text("before", encoding="utf-8")
    assert run(["report", str(write(events())), "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_names_cannot_end_the_script_that_holds_them(write: Write, tmp_path: Path) -> None:
    path = write(events(group=HOSTILE + "<!--<script>\udcff\u2028"), "r&<b>n.json")
    assert run(["report", str(path), "-o", str(tmp_path / "run.html")]) == 0
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "<title>r&amp;&lt;b&gt;n.json" in text


def bad(name: str, tmp_path: Path) -> str:
    path = tmp_path / "bad.json"
    texts = {
        "empty": "",
        "only begun": "[\n",
        "no event": text_of(events()[:7]),
        "words": "step 1 took 3 s\nstep 2\n",
        "a list of words": "[\nstep 1 took\nstep 2 took\n",
        "numbers": "[\n1,\n2,\n",
        "an object": json.dumps({"traceEvents": events()}),
        "a time that is none": text_of([*events(), event("a", "b", 1, float("nan"), 1)]),
        "a time before the start": text_of([*events(), event("a", "b", 1, -5, 1)]),
        "a name that is none": text_of([*events(), {**event("a", "b", 1, 0, 1), "name": 3}]),
        "a bound that is none": text_of([*events(), limit(1, 1700, -1)]),
        "deep": "[\n" + "[" * 100000 + "\n1\n",
    }
    if name in texts:
        path.write_text(texts[name], encoding="utf-8")
    elif name == "bytes":
        path.write_bytes(os.urandom(4096))
    elif name == "a folder":
        path.mkdir()
    return str(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "cannot read the timeline"),
        ("a folder", "cannot read the timeline"),
        ("empty", "is empty"),
        ("only begun", "has no event yet"),
        ("no event", "has no event yet"),
        *(
            (name, "is not a timeline")
            for name in ("words", "a list of words", "numbers", "bytes", "an object", "deep")
        ),
        *((f"a time {kind}", "is not a timeline (line 39") for kind in ("that is none", "before the start")),
        *((f"a {what} that is none", "is not a timeline (line 39") for what in ("name", "bound")),
    ],
)
def test_what_is_no_timeline_is_code_2_and_one_line_and_no_page(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = bad(name, tmp_path), tmp_path / "run.html"
    assert run(["report", given, "-o", str(out)]) == 2
    told, error = capsys.readouterr()
    assert told == ""
    assert error.count("\n") == 1
    assert error.startswith("tiered report: error: ")
    assert given in error
    assert says in error
    assert not out.exists()


@pytest.mark.parametrize("out", [".", "no/such/run.html", "run.json", "run.json/run.html", "pipe"])
def test_a_place_where_no_page_can_go_is_code_2_before_anything_is_read(
    out: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(events())
    before = path.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    assert run(["report", str(path), "-o", str(tmp_path / out)]) == 2
    assert capsys.readouterr().err.startswith("tiered report: error: --output: ")
    assert path.read_bytes() == before


def test_a_page_that_cannot_be_written_is_code_1_and_what_was_there_stays(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    out.write_text("before", encoding="utf-8")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert run(["report", str(write(events())), "-o", str(out)]) == 1
    assert "cannot write the page" in (said := capsys.readouterr().err)
    assert "No space left" in said
    assert out.read_text(encoding="utf-8") == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json"]


def test_a_signal_ends_it_with_its_code(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.BytesDisplay, "__call__", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(recorded, "_PROGRESS", 1)
    assert run(["report", str(write(events())), "-o", str(tmp_path / "run.html")]) == 143
    assert capsys.readouterr().err.startswith("tiered report: stopped by SIGTERM")
    assert not (tmp_path / "run.html").exists()


# --- the page, in a browser ---


def browse(path: Path, address: str, *options: str, clock: Sequence[str] = ("--virtual-time-budget=4000",)) -> str:
    """The page's DOM after its scripts have run. Whatever they complain of fails the test."""
    assert BROWSER is not None
    line = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={path.parent / 'profile'}", "--window-size=1400,1600", *clock, *options,
        f"{path.as_uri()}{address}",
    ]  # fmt: skip
    done = subprocess.run(line, capture_output=True, timeout=SECONDS, check=False)
    told = done.stderr.decode(errors="replace")
    assert done.returncode == 0, told
    assert "CONSOLE" not in told, told
    return done.stdout.decode()


def attributes(dom: str, tag: str) -> list[Mapping[str, str]]:
    """The data-... attributes of each such element."""
    found = [re.findall(r'data-(\w+)="([^"]*)"', tags) for tags in re.findall(rf"<{tag}\b[^>]*>", dom)]
    return [{name: html.unescape(value) for name, value in pairs} for pairs in found]


def row(dom: str, start: str) -> list[str]:
    """The texts of the cells of a row of a table."""
    (cells,) = re.findall(rf"<tr[^>]*{start}[^>]*>(.*?)</tr>", dom)
    return [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells)]


@in_browser
def test_the_page_shows_the_numbers_of_a_step_and_names_as_text(write: Write, tmp_path: Path) -> None:
    told = [*events(group=HOSTILE), limit(11, 1700, 0.0016), limit(12, 3700, 0.001), limit(13, 5700, 0.0015)]
    paths = [write(told, "run-r0.json"), write(events(2, rank=1, group="head"), "run-r1.json", ended=False)]
    assert run(["report", *map(str, paths), "-o", str(tmp_path / "run.html")]) == 0
    dom = browse(tmp_path / "run.html", "#step=12", "--dump-dom")
    (page_told,) = attributes(dom, "html")
    assert (page_told["ready"], page_told["errors"]) == ("true", "0")
    assert 8 <= int(page_told["drawn"]) <= 12
    shown = dom.split("<main")[1].split("</main>")[0]
    assert "<img" not in shown
    assert html.escape(HOSTILE, quote=False) in shown
    rows = {one["kind"]: one for one in attributes(shown, "tr") if "kind" in one}
    assert {kind: float(one["busy"]) for kind, one in rows.items()} == {
        "forward": 1000, "backward": 500, "step": 500, "update": 300, "stall": 250,
        "drive read": 500, "drive write": 400,
    }  # fmt: skip
    (group,) = [one for one in attributes(shown, "tr") if "group" in one]
    assert (group["group"], float(group["sum"])) == (HOSTILE, 1000 + 500 + 300 + 500 + 400 + 200)
    assert row(shown, 'data-step="12"') == [
        "12", "2.00 ms", "1.00 ms", "50 %", "compute", "1.00 ms", "800 µs", "300 µs", "100 µs",
    ]  # fmt: skip
    assert row(shown, 'data-step="mean"')[:5] == ["mean", "2.00 ms", "1.37 ms", "68 %", "drive read+write (2 of 3)"]
    assert row(shown, 'data-part="1"')[1:5] == ["run-r1.json", "2", "2.00 ms", "not known"]
    dom = browse(tmp_path / "run.html", "#part=1", "--dump-dom")
    assert "No bound was recorded in this timeline" in dom
    assert "The timeline was not closed" in dom
    assert row(dom, 'data-step="2"') == ["2", "2.00 ms", "200 µs", "50.0 µs"]


SCRIPT = """
addEventListener("load", () => {
  const said = [], canvas = document.querySelector("canvas.drag"), box = canvas.getBoundingClientRect();
  const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
  const mouse = (kind, x, y, on = canvas) => on.dispatchEvent(new PointerEvent(kind,
    { clientX: box.left + x, clientY: box.top + y, button: 0, bubbles: true }));
  const soon = (act) => new Promise((done) => {
    act();
    setTimeout(() => done(document.documentElement.dataset.drawn), 200);
  });
  const detail = () => document.querySelector(".said").textContent;
  (async () => {
    const out = { all: await soon(() => key("0")) };
    mouse("pointermove", 200, 40);
    out.tip = canvas.parentElement.querySelector(".tip").innerText;
    key("Escape");
    out.none = detail();
    key("ArrowRight");
    out.first = detail();
    key("ArrowRight");
    out.second = detail();
    key("ArrowDown");
    out.below = detail();
    out.entered = await soon(() => key("Enter"));
    out.back = await soon(() => key("0"));
    canvas.focus();
    const wheel = new WheelEvent("wheel", { deltaY: -1500, clientX: box.left + 700 });
    out.wheel = await soon(() => canvas.dispatchEvent(wheel));
    out.panned = await soon(() => {
      mouse("pointerdown", 700, 40);
      mouse("pointermove", 1200, 40, window);
      mouse("pointerup", 0, 0, window);
    });
    out.next = await soon(() => { key("0"); key("PageDown"); });
    out.title = [...document.querySelectorAll("h2")].map((one) => one.textContent).join("|");
    out.hidden = await soon(() => document.querySelector(".legend button").click());
    document.body.dataset.out = JSON.stringify(out);
  })();
});
"""


@in_browser
def test_mouse_and_keys_move_through_the_timeline(write: Write, tmp_path: Path) -> None:
    text = page([read(write(events()))])
    own = f"'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
    text = text.replace("script-src ", f"script-src {own} ").replace("</body>", f"<script>{SCRIPT}</script></body>")
    (tmp_path / "run.html").write_text(text, encoding="utf-8")
    dom = browse(tmp_path / "run.html", "", "--dump-dom")
    (body,) = attributes(dom, "body")
    out = json.loads(body["out"])
    assert out["all"] == out["back"] == "27"
    assert out["tip"].split("\n")[0] == "forward head"
    assert "duration: 1.00 ms" in out["tip"]
    assert out["none"].startswith("Point at an event")
    assert out["first"].startswith("forward headkind forward · start ")
    assert out["second"].startswith("backward headkind backward · start ")
    assert out["below"].startswith("update head")
    assert int(out["entered"]) < 27
    assert 0 < int(out["wheel"]) < 27
    assert out["panned"] != out["wheel"]
    assert "Where the time goes in step 1" in out["title"]
    assert int(out["hidden"]) == int(out["next"]) - 2  # the first kind: of this step, and where the next one begins


@in_browser
def test_a_hundred_thousand_events_are_drawn_at_once(write: Write, tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text(page([read(write(events(11_112)))]), encoding="utf-8")
    dom = browse(tmp_path / "run.html", "", "--dump-dom", clock=())
    (told,) = attributes(dom, "html")
    assert (told["ready"], told["errors"], told["drawn"]) == ("true", "0", "100008")
    assert float(told["took"]) < 1000  # ms; 8 where nothing else runs


@in_browser
def test_the_page_is_light_or_dark_as_the_reader_has_it(write: Write, tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text(page([read(write(events()))]), encoding="utf-8")
    shades = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        out = tmp_path / f"{scheme}.png"
        browse(tmp_path / "run.html", "", f"--screenshot={out}", f"--blink-settings=preferredColorScheme={number}")
        shades[scheme] = picture(out.read_bytes())
    for rows in shades.values():
        assert len(set(rows)) > 100  # lines of pixels that differ: something is drawn all over it
    assert shades["dark"] != shades["light"]


def picture(png: bytes) -> list[bytes]:
    """The filtered lines of pixels of a PNG."""
    assert png.startswith(b"\x89PNG")
    height, data, at = int.from_bytes(png[20:24], "big"), b"", 8
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    pixels = zlib.decompress(data)
    stride = len(pixels) // height
    return [pixels[stride * line : stride * (line + 1)] for line in range(height)]

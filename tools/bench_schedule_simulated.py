"""For bench_schedule: steps of the reference GPT, simulated and measured beside each other; and schedules of small
chains beside the best ones there are.

What the simulation is given is measured in runs that are not judged: computing on the host alone, at each batch, and
four runs of half the layers with the drive. Each run is a process of its own (`--child`). A step in which other
processes had more than `BUSY` of a core is left out; a run goes on until enough steps are left.
"""

import dataclasses
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import tiered
from tiered.api import sharded_model
from tiered.cli.gpt import GPT, GPTShape
from tiered.schedule.cost import Costs, Group, Shape, staging
from tiered.schedule.optimum import gap
from tiered.schedule.simulate import predict
from tiered.store.tier import Tier

CONTEXT = 128
BUSY = 0.1  # of a core, by others
TICK = os.sysconf("SC_CLK_TCK")
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A run: settings of the Config, and of the model and its input."""

    config: dict[str, Any]
    layers: int = 8
    batch: int = 2
    warm: int = 2
    """Steps before the first that counts."""


def drive(overlap: str, host_budget: str = "600MiB", **settings: Any) -> dict[str, Any]:
    """Everything on the drive."""
    tiers = {"param_tier": "nvme", "optimizer_tier": "nvme", "host_budget": host_budget}
    return {**tiers, "overlap": overlap, **settings}


HOST = {"param_tier": "host", "optimizer_tier": "host"}
STATES = {"param_tier": "host", "optimizer_tier": "nvme", "host_budget": "1050MiB"}
JUDGED = {
    "drive, none": Setting(config=drive("none")),
    "drive, prefetch": Setting(config=drive("prefetch")),
    "drive, forward": Setting(config=drive("forward")),
    "drive, backward": Setting(config=drive("backward"), warm=12),
    "states on the drive, prefetch": Setting(config={**STATES, "overlap": "prefetch"}),
    "states on the drive, forward": Setting(config={**STATES, "overlap": "forward"}),
    "as placed in 1200 MiB, forward": Setting(config={"host_budget": "1200MiB", "overlap": "forward"}),
    "as placed in 1500 MiB, forward": Setting(config={"host_budget": "1500MiB", "overlap": "forward"}),
    "drive, window of 384 MiB, prefetch": Setting(config=drive("prefetch", device_budget="384MiB")),
    "drive, batch of 4, forward": Setting(config=drive("forward"), batch=4),
}
CALIBRATING = {
    "host, batch of 2": Setting(config=HOST),
    "host, batch of 4": Setting(config=HOST, batch=4),
    "half on the drive, none": Setting(config=drive("none", "360MiB"), layers=4),
    "half on the drive, prefetch": Setting(config=drive("prefetch", "360MiB"), layers=4),
    "half on the drive, forward": Setting(config=drive("forward", "360MiB"), layers=4),
    "half of the states there, forward": Setting(
        config={**STATES, "host_budget": "616MiB", "overlap": "forward"}, layers=4
    ),
}


# --- one run, in a process of its own ---


def child(name: str, folder: Path, steps: int) -> Figures:
    """Trains as a setting says; what its steps took, and what it is made of."""
    setting = (JUDGED | CALIBRATING)[name]
    with tempfile.TemporaryDirectory(dir=folder) as swap:
        trace = Path(swap) / "timeline.json"
        config = tiered.Config(device="cpu", nvme=swap, trace=trace, **setting.config)
        with tiered.deferred_init(config):
            model = GPT(GPTShape(layers=setting.layers))
        tiered.shard(model, config)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1e3)
        text = torch.randint(GPTShape().vocabulary, (setting.batch, CONTEXT + 1), generator=torch.Generator())
        taken = []
        while (
            sum(step["others"] < BUSY for step in taken[setting.warm :]) < steps
            and len(taken) < setting.warm + 3 * steps
        ):
            taken.append(one_step(model, optimizer, text))
        found = {**parts(model), "steps": taken, "warm": setting.warm}
        tiered.close(model, keep_weights=False)
        return {**found, "spans": spans(trace)}


def one_step(model: torch.nn.Module, optimizer: Any, text: torch.Tensor) -> Figures:
    """A training step: its seconds, those of its parts, bytes on the drive, and cores that others had meanwhile."""
    moved, stalled, busy, marks = on_drive(model), waited(model), others(), [time.perf_counter()]
    loss = model(text[:, :-1], text[:, 1:])
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    before_step = waited(model)
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    seconds = marks[-1] - marks[0]
    names = ("forward_s", "backward_s", "step_s")
    each = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
    taken = {"seconds": seconds, **each, "others": (others() - busy) / seconds}
    now = waited(model)
    taken |= {"waited_s": now - stalled, "step_waited_s": now - before_step}
    return {**taken, "moved_bytes": on_drive(model) - moved}


def waited(model: torch.nn.Module) -> float:
    """Seconds that the loop has waited so far."""
    return sum(sharded_model(model).runtime.meter.stalls.values())


def on_drive(model: torch.nn.Module) -> int:
    """Bytes read from and written to drives so far."""
    meter = sharded_model(model).runtime.meter
    return meter.read["nvme"] + meter.written["nvme"]


def others() -> float:
    """Seconds of all cores that other processes have had so far."""
    fields = [int(ticks) for ticks in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    own = resource.getrusage(resource.RUSAGE_SELF)
    return (sum(fields[:3]) + sum(fields[5:8])) / TICK - own.ru_utime - own.ru_stime


def parts(model: torch.nn.Module) -> Figures:
    """What the simulation has to know of a run: sizes and homes of its groups, and room."""
    sharded = sharded_model(model)
    if any(block.home is Tier.NVME for g in sharded.groups for kind, block in g.blocks.items() if kind == "grad"):
        raise SystemExit("bench_schedule: gradients on the drive are not simulated")
    groups = [
        {
            "name": group.name,
            "elements": group.spec.numel,
            "page_bytes": group.nbytes,
            "state_bytes": sum(
                block.nbytes for kind, block in group.blocks.items() if kind != "param" and block.home is Tier.NVME
            ),
            "gradients": len(group.params),
        }
        for group in sharded.groups
    ]
    window = sharded.room.capacity()
    sharded.finish_update()
    return {"groups": groups, "window_bytes": window, "room_bytes": sharded.runtime.store.room()}


def spans(trace: Path) -> Figures:
    """Milliseconds of each event of the loop, and of updates, in each step that the timeline has whole."""
    events = [e for e in json.loads(trace.read_text(encoding="utf-8")) if e.get("ph") == "X"]
    begins = [e["ts"] for e in events if e["cat"] == "step"]
    found: Figures = {}
    for e in events:
        step = sum(begin <= e["ts"] for begin in begins) - 1
        if 0 <= step < len(begins) - 1 and e["cat"] in ("forward", "backward", "step", "update"):
            each = found.setdefault(
                e["cat"] if e["cat"] in ("step", "update") else e["name"], [0.0] * (len(begins) - 1)
            )
            each[step] += e["dur"] / 1e3
    return found


# --- measured beside simulated ---


def calm() -> None:
    """Wait until others have little of the cores for a second, but not for ever."""
    for _ in range(60):
        before = others()
        time.sleep(1.0)
        if others() - before < BUSY:
            return


def measured(name: str, folder: Path, steps: int) -> Figures:
    """What `child` finds, run by a process of its own; with the medians of the steps that count."""
    calm()
    command = [sys.executable, __file__, "--child", name, str(folder), str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"bench_schedule: {' '.join(command)} ended with code {done.returncode}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    warm = found["warm"]
    quiet = [i for i, step in enumerate(found["steps"]) if i >= warm and step["others"] < BUSY]
    if len(quiet) < steps:  # then those least disturbed
        late = range(warm, len(found["steps"]))
        quiet = sorted(sorted(late, key=lambda i: found["steps"][i]["others"])[:steps])
    found["quiet"] = quiet
    for key in found["steps"][0]:
        found[key] = statistics.median(found["steps"][i][key] for i in quiet)
    # a timeline's steps go from one optimizer step to the next: the one that begins in step i is mostly step i + 1
    spans = {name: [each[i - 1] for i in quiet if 0 < i <= len(each)] for name, each in found["spans"].items()}
    found["spans"] = {name: statistics.median(each) / 1e3 for name, each in spans.items() if each}
    print(
        f"  {name:36} {found['seconds']:.3f} s, {len(quiet)} of {len(found['steps'])} steps, "
        f"{found['others']:.0%} of a core by others",
        file=sys.stderr,
    )
    return found


def shape_of(run: Figures, host: Figures, overlap: str) -> Shape:
    """What the simulation is given of a run; seconds of computing are those of `host`'s."""
    groups = tuple(
        Group(
            forward_s=host["spans"].get(f"forward {name}", host["spans"].get("forward blocks.0", 0.0)),
            backward_s=host["spans"].get(f"backward {name}", 0.0),
            in_backward=f"backward {name}" in host["spans"],
            **group,
        )
        for group in run["groups"]
        if (name := group["name"])
    )
    slots, chunk = staging(groups, run["room_bytes"])
    return Shape(groups=groups, window_bytes=run["window_bytes"], slots=slots, chunk_elements=chunk, overlap=overlap)


def solved(low: float, high: float, target: float, figure: Callable[[float], float]) -> float:
    """The argument between `low` and `high` with which a figure that grows with it is `target`; the nearer end, where
    none is."""
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if figure(middle) < target else (low, middle)
    return (low + high) / 2


def calibrated(runs: dict[str, Figures]) -> Costs:
    """What this machine's parts cost, each from the run in which it alone is not known yet: computing, updates and
    steps on the host alone; uses, fetches and chunks on demand; what fetches take of computing from those ahead; what
    chunks take of it, and what it leaves to the drive, from updates of states under forward; what is handed over there
    from those of parameters too."""
    host = runs["host, batch of 2"]  # its first layers are those of half the model
    none, prefetch, forward = (runs[f"half on the drive, {way}"] for way in ("none", "prefetch", "forward"))
    costs = Costs(
        drive_bytes_per_s=4e9,
        fetch_bytes_per_s=2.5e9,
        update_s_per_element=host["spans"]["update"] / sum(group["elements"] for group in host["groups"]),
        step_s=max(0.0, host["step_s"] - host["spans"]["update"]),
    )

    def fit(run: Figures, overlap: str, field: str, ends: tuple[float, float], of: Callable[[Any], float]) -> Costs:
        """`costs` with the value of a field, or of 1 / a rate, with which a figure of a run is the measured one."""
        shape, rate = shape_of(run, host, overlap), field.endswith("_per_s") or field == "beside"
        measured = of(SimpleNamespace(**run))

        def with_it(x: float) -> Costs:
            return dataclasses.replace(costs, **{field: 1 / x if rate else x})

        return with_it(solved(*ends, measured, lambda x: of(predict(shape, with_it(x)))))

    def on_demand() -> Costs:
        return fit(none, "none", "drive_bytes_per_s", (1.25e-10, 2e-9), lambda s: s.step_s)

    for _ in range(3):
        costs = fit(none, "none", "use_s", (0, 0.02), lambda s: s.seconds - s.step_s - s.waited_s + s.step_waited_s)
        costs = fit(none, "none", "chunk_s", (0, 0.005), lambda s: s.step_s - s.step_waited_s)
        costs = fit(none, "none", "fetch_bytes_per_s", (1e-10, 4e-9), lambda s: s.forward_s + s.backward_s)
        costs = on_demand()
        most = 0.9 / costs.fetch_bytes_per_s
        costs = fit(prefetch, "prefetch", "fetch_cpu_s_per_byte", (0, most), lambda s: s.forward_s + s.backward_s)
    states, found = runs["half of the states there, forward"], []
    shape = shape_of(states, host, "forward")
    for beside, taken in itertools.product((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), range(0, 26, 2)):
        if taken * 1e-11 * beside * 8e9 < 1:  # both at once, as neither means much without the other
            costs = dataclasses.replace(costs, beside=beside, io_cpu_s_per_byte=taken * 1e-11, drive_bytes_per_s=4e9)
            costs = on_demand()
            told = predict(shape, costs)
            off = (told.seconds - states["seconds"], told.waited_s - states["waited_s"])
            found.append((math.hypot(*off), costs))
    costs = min(found, key=lambda each: each[0])[1]
    costs = fit(forward, "forward", "copy_s_per_byte", (0, 2e-9), lambda s: s.seconds)
    return costs


def simulate(folder: Path, steps: int, rounds: int = 3) -> Figures:
    """Prints and returns what steps take, measured and simulated. Runs that others have disturbed are made again, twice
    at most."""
    runs: dict[str, Figures] = {}
    for _ in range(rounds):
        for name in (*CALIBRATING, *JUDGED):
            if name not in runs or runs[name]["others"] >= BUSY:
                again = measured(name, folder, steps)
                runs[name] = min(runs.get(name, again), again, key=lambda run: run["others"])
    return compare(runs, list(JUDGED))


def compare(runs: dict[str, Figures], names: list[str]) -> Figures:
    """The table of `simulate`, and its figures."""
    costs = calibrated(runs)
    print("costs: " + ", ".join(f"{name}={value:.3g}" for name, value in dataclasses.asdict(costs).items()))
    print(f"{'setting':36}{'measured':>9}{'simulated':>10}{'error':>8}   forward, backward, step; GB moved")
    found: Figures = {}
    for name in names:
        run, setting = runs[name], JUDGED[name]
        overlap = setting.config["overlap"]
        told = predict(shape_of(run, runs[f"host, batch of {setting.batch}"], overlap), costs)
        error = told.seconds / run["seconds"] - 1
        row = {"measured": {key: run[key] for key in dataclasses.asdict(told) if key in run}}
        found[name] = {**row, "simulated": dataclasses.asdict(told), "error": error, "others": run["others"]}
        each = " ".join(f"{run[key]:.3f}/{getattr(told, key):.3f}" for key in ("forward_s", "backward_s", "step_s"))
        print(
            f"{name:36}{run['seconds']:9.3f}{told.seconds:10.3f}{error:8.1%}   {each}  "
            f"{run['moved_bytes'] / 1e9:.3f}/{told.moved_bytes / 1e9:.3f}"
        )
    errors = [abs(row["error"]) for row in found.values()]
    print(f"largest error {max(errors):.1%}, median {statistics.median(errors):.1%}")
    known = {name: {key: value for key, value in runs[name].items() if key != "steps"} for name in CALIBRATING}
    return {"costs": dataclasses.asdict(costs), "calibrating": known, "settings": found}


# --- executed beside the optimum ---

RATIOS = (0.25, 0.5, 1.0, 2.0)
"""Seconds to fetch a group over seconds of its forward."""


def optimum(seeds: int) -> Figures:
    """Prints and returns by how much schedules of the executor take longer than the best there are, in chains of 3 to 6
    groups of which 2 to 4 fit, and each costs what others do or up to four times as much."""
    costs = Costs(drive_bytes_per_s=4e9, fetch_bytes_per_s=2.5e9, beside=0.8, fetch_cpu_s_per_byte=1e-10)
    found: Figures = {}
    print(f"{'chains, two steps each':36}{'count':>6}{'optimal':>9}{'mean gap':>10}{'largest':>9}")
    for kind in ("equal groups", "unequal computing", "unequal pages and computing"):
        for groups in (3, 4, 5, 6):
            gaps = []
            for fitting, ratio, seed in itertools.product(
                (2, 3, 4), RATIOS, range(1 if kind == "equal groups" else seeds)
            ):
                if fitting < groups:
                    executed, best = gap(drawn(kind, groups, fitting, ratio, seed, costs), costs, steps=2)
                    gaps.append(max(0.0, executed / best - 1))  # below: what rounding makes of equal times
            optimal = sum(each < 1e-6 for each in gaps) / len(gaps)
            row = {"chains": len(gaps), "optimal": optimal, "mean": statistics.mean(gaps), "largest": max(gaps)}
            found[f"{groups} {kind}"] = row
            name = f"{groups} {kind}"
            print(f"{name:36}{len(gaps):6}{optimal:9.0%}{row['mean']:10.2%}{row['largest']:9.2%}")
    return found


def drawn(kind: str, groups: int, fitting: int, ratio: float, seed: int, costs: Costs) -> Shape:
    """A chain of groups; `fitting` of the largest fit."""
    draw = random.Random(seed)
    page = 48 << 20

    def factor(varies: bool) -> float:
        return draw.uniform(0.25, 1.0) if varies else 1.0

    each = []
    for index in range(groups):
        size = int(page * factor("pages" in kind)) >> 12 << 12
        forward = page / costs.fetch_bytes_per_s / ratio * factor("unequal" in kind)
        each.append(
            Group(
                name=str(index), elements=size // 4, page_bytes=size, state_bytes=0,
                forward_s=forward, backward_s=2 * forward, gradients=0,
            )
        )  # fmt: skip
    return Shape(groups=tuple(each), window_bytes=fitting * max(group.page_bytes for group in each))


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))

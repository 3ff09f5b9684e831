"""The bound of a step is the largest of what each resource needs by itself, and says whose it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tiered
from tiered.schedule import limit
from tiered.schedule.limit import DriveCount, Recorder
from tiered.stats import Meter

MIB = 1 << 20


class Run:
    """A meter, drives and a clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, in_place: bool = True, drives: int = 1) -> None:
        self.now = 100.0
        self.meter = Meter()
        self.counts = [DriveCount(f"drive{n}", 0, 0, 0.0) for n in range(drives)]
        self.links: dict[str, float] = {}
        monkeypatch.setattr(limit.time, "perf_counter", lambda: self.now)
        self.make: Callable[..., Recorder] = lambda **more: Recorder(
            self.meter, lambda: list(self.counts), in_place=in_place, links=self.links, **more
        )

    def step(self, recorder: Recorder, seconds: float, *, update: float = 0.0, **stalls: float) -> None:
        self.now += seconds
        self.meter.spent["update"] += update
        for cause, waited in stalls.items():
            self.meter.stalls[cause] += waited
        recorder.step()

    def moves(self, number: int, read: int, written: int, busy: float) -> None:
        was = self.counts[number]
        self.counts[number] = DriveCount(was.path, was.read + read, was.written + written, was.busy_s + busy)


def test_on_one_cpu_compute_and_update_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    recorder = run.make()
    recorder.step()
    assert recorder.last is recorder.mean() is None
    run.step(recorder, 10.0, update=2.0, fetch=3.0)
    last = recorder.last
    assert last is not None
    assert last.seconds == 10.0
    assert last.terms == {"compute and update": pytest.approx(7.0)}
    assert last.binding == "compute and update"
    assert last.share == pytest.approx(0.7)
    assert last.stall_seconds == {"fetch": 3.0}


def test_a_drive_that_becomes_slower_is_measured_by_what_it_can_do_then(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    recorder = run.make()
    recorder.step()
    for busy in [1.0] * 3 + [3.0] * 16:
        run.moves(0, 300 * MIB, 0, busy)
        run.step(recorder, 4.0, fetch=3.5)
    assert recorder.last is not None
    assert recorder.last.terms["drive drive0"] == pytest.approx(3.0)
    assert recorder.drives()[0].bytes_per_s == pytest.approx(100 * MIB)


def test_beside_a_device_each_resource_has_a_term_of_its_own_and_waiting_for_the_device_is_its_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, in_place=False)
    run.links = {"to the device": 100.0, "from the device": 50.0}
    recorder = run.make()
    recorder.step()
    run.meter.count("device", read=200, written=100)
    run.step(recorder, 10.0, update=2.0, norm=5.0, fetch=1.0)
    assert recorder.last is not None
    assert recorder.last.terms == pytest.approx(
        {"compute": 7.0, "update": 2.0, "to the device": 1.0, "from the device": 4.0}
    )


def test_the_quickest_of_recent_steps_is_what_computing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    recorder = run.make()
    recorder.step()
    for seconds in (8.0, 4.0, 6.0):
        run.step(recorder, seconds)
    assert recorder.last is not None
    assert recorder.last.bound_s == pytest.approx(4.0)
    mean = recorder.mean()
    assert mean is not None
    assert mean.seconds == pytest.approx(6.0)
    assert mean.bound_s == pytest.approx((8 + 4 + 4) / 3)


def test_a_drive_is_measured_by_the_most_it_has_moved_in_a_second_and_the_slowest_of_them_binds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, drives=2)
    recorder = run.make(endurance=(10**12, 10**12))
    recorder.step()
    run.moves(0, 300 * MIB, 100 * MIB, 4.0)  # 100 MiB/s
    run.moves(1, 80 * MIB, 20 * MIB, 5.0)  # 20 MiB/s
    run.step(recorder, 10.0, fetch=9.0)
    run.moves(0, 400 * MIB, 0, 8.0)  # it can do better
    run.moves(1, 1 * MIB, 0, 0.001)  # too little to say
    run.step(recorder, 20.0, fetch=19.0)
    first, second = recorder.drives()
    assert (first.bytes_per_s, second.bytes_per_s) == (100 * MIB, 20 * MIB)
    last, mean = recorder.last, recorder.mean()
    assert last is not None
    assert mean is not None
    assert last.binding == "drive drive0"
    assert last.bound_s == pytest.approx(4.0)
    assert mean.bound_s == pytest.approx((5.0 + 4.0) / 2)
    assert first.written_bytes == 50 * MIB
    assert first.endurance_days == pytest.approx(10**12 / (100 * MIB / 30.0) / 86400)
    assert second.endurance_days == pytest.approx(10**12 / (20 * MIB / 30.0) / 86400)


@pytest.mark.parametrize(
    ("given", "drives", "expected"),
    [(None, 1, ()), ("600TB", 2, (600 * 10**12,) * 2), (["1TB", 5], 2, (10**12, 5)), (["1TB"], 1, (10**12,))],
)
def test_ratings_are_one_for_all_drives_or_one_for_each(
    given: object, drives: int, expected: tuple[int, ...], tmp_path: Path
) -> None:
    nvme = [tmp_path / str(n) for n in range(drives)]
    assert tiered.Config(nvme=nvme, drive_endurance=given).endurance == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["0", "600XB", ["1TB", "1TB", "1TB"], ["1TB"], -1])
def test_a_rating_that_is_none_is_refused_by_name(given: object, tmp_path: Path) -> None:
    with pytest.raises(tiered.ConfigError, match="drive_endurance"):
        tiered.Config(nvme=[tmp_path / "a", tmp_path / "b"], drive_endurance=given)  # type: ignore[arg-type]


def test_a_run_says_how_close_it_was_what_it_moved_and_how_long_its_drive_lasts(tmp_path: Path) -> None:
    (swap := tmp_path / "swap").mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    tiers = {"param_tier": "nvme", "optimizer_tier": "nvme"}
    config = tiered.Config(
        device="cpu", host_budget="16MiB", nvme=swap, drive_endurance="1TB", trace=tmp_path / "run.json", **tiers
    )
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(4):
            model(torch.ones(2, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = tiered.stats(model)
        tiered.close(model, keep_weights=False)
    last, mean = found.last_step, found.mean_step
    assert last is not None
    assert mean is not None
    for each in (last, mean):
        assert 0 < each.bound_s <= each.seconds * (1 + 1e-9)
        assert 0 < each.share <= 1 + 1e-9
        assert each.binding in each.terms
        assert sum(each.stall_seconds.values()) <= each.seconds
    assert found.bytes_per_parameter["nvme written"] >= 12
    assert found.bytes_per_parameter["nvme read"] >= 12
    (drive,) = found.drives
    assert drive.path.startswith(str(swap))
    assert drive.written_bytes == pytest.approx(found.bytes_per_parameter["nvme written"] * 8 * (512 * 512 + 512), 0.01)
    assert drive.endurance_days == pytest.approx(1e12 / (drive.written_bytes / mean.seconds) / 86400, 0.01)
    events = json.loads((tmp_path / "run.json").read_text())
    limits = [event["args"] for event in events if event["name"] == "limit"]
    assert [each["step"] for each in limits] == [1, 2, 3]
    assert limits[-1]["seconds"] == last.seconds
    assert limits[-1]["binding"] == last.binding


def test_a_slow_link_is_what_binds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    slow = tiered.Emulation(h2d_bytes_per_s=20e6, d2h_bytes_per_s=4e6)
    config = tiered.Config(device="emulated", device_budget="1MiB", host_budget="64MiB", emulation=slow)
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = tiered.stats(model).mean_step
    assert mean is not None
    assert mean.binding == "from the device"
    assert mean.terms["from the device"] == pytest.approx(4 * 4 * (256 * 256 + 256) / 4e6, 0.05)

"""The result as table and JSON, and the verdict of the comparison."""

import io
import json
import math
from pathlib import Path

import pytest

import tiered
from tiered.cli.options import parse
from tiered.cli.plain import largest_difference
from tiered.cli.summary import Comparison, show, summarize, write_json
from tiered.cli.train import Outcome

STATS = tiered.Stats(
    steps=3,
    skipped_steps=1,
    read_bytes={"nvme": 3 << 20},
    written_bytes={"nvme": 2 << 20},
    resident_bytes={},
    peak_bytes={"host": 5 << 20},
    staging_buffers=0,
    stall_seconds={"read": 0.25, "write": 0.0},
    hit_rate=0.5,
    placement={"exp_avg": {"host": 0, "nvme": 4 << 20}},
)


def outcome(losses: list[float]) -> Outcome:
    return Outcome(losses=losses, seconds=[9.0, 2.0, 4.0][: len(losses)], peak_growth_bytes=7 << 20, stats=STATS)


def test_the_rate_is_the_median_step_without_the_first() -> None:
    order = parse(["train", "--context", "10", "--batch", "3", "--accumulate", "2"])
    assert summarize(order, outcome([3.0, 2.0, 1.0]), None, None).tokens_per_s == 60 / 3.0


def test_the_table_tells_where_each_kind_lives_and_what_moved() -> None:
    stream = io.StringIO()
    order = parse(["train", "--host-budget", "96MiB"])
    show(summarize(order, outcome([3.0, 2.0, 1.0]), [3.0, 2.0, 1.0], "SIGINT"), stream)
    text = " ".join(stream.getvalue().split())
    for shown in (
        "stopped by SIGINT",
        "3.0000 -> 1.0000",
        "nvme 4.0 MiB",
        "3.0 MiB read",
        "read 0.25",
        "host 96.0 MiB",
    ):
        assert shown in text
    assert "equal within rounding" in text
    assert "host 0" not in text


def test_the_json_holds_the_same_and_stays_json_when_a_loss_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    summary = summarize(parse(["train"]), outcome([3.0, math.nan]), [3.0, math.inf], None)
    write_json(summary, str(path), io.StringIO())
    found = json.loads(path.read_text())
    assert found["losses"] == [3.0, None]
    assert found["memory"]["peak_growth_bytes"] == 7 << 20
    assert found["memory"]["state_bytes"] == 16 * found["parameters"]
    assert found["stats"]["written_bytes"] == {"nvme": 2 << 20}
    assert found["plain"]["largest_difference"] is None


def test_a_dash_writes_the_json_to_stdout() -> None:
    stream = io.StringIO()
    write_json(summarize(parse(["train"]), Outcome(), None, "SIGTERM"), "-", stream)
    found = json.loads(stream.getvalue())
    assert found["stopped_by"] == "SIGTERM"
    assert found["losses"] == []
    assert found["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("ours", "equal"), [([1.0, 2.0], True), ([1.0, 2.00001], True), ([1.0, 2.1], False), ([1.0, math.nan], False)]
)
def test_losses_are_equal_only_within_the_tolerance(ours: list[float], equal: bool) -> None:
    gap = largest_difference(ours, [1.0, 2.0])
    assert Comparison(losses=[1.0, 2.0], largest_difference=gap, tolerance=1e-4).equal is equal

"""The result as table and JSON, and the verdict of the comparison."""

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest

import tiered
from tiered.cli.options import parse
from tiered.cli.plain import largest_difference
from tiered.cli.ranks import Place
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
    assert summarize(order, Place(), outcome([3.0, 2.0, 1.0]), None, None).tokens_per_s == 60 / 3.0


def test_the_table_tells_where_each_kind_lives_and_what_moved() -> None:
    stream = io.StringIO()
    order = parse(["train", "--host-budget", "96MiB"])
    show(summarize(order, Place(), outcome([3.0, 2.0, 1.0]), [3.0, 2.0, 1.0], "SIGINT"), stream)
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


def test_the_table_of_several_ranks_says_what_they_exchanged_and_whose_the_numbers_are() -> None:
    stream = io.StringIO()
    order = parse(["train", "--host-budget", "96MiB", "--budgets", "node", "--stage", "2"])
    exchanged = {"all_gather": 9 << 20, "reduce_scatter": 6 << 10, "broadcast": 0}
    stats = dataclasses.replace(STATS, ranks=4, collective_bytes=exchanged)
    ran = dataclasses.replace(outcome([3.0, 2.0, 1.0]), stats=stats)
    show(summarize(order, Place(ranks=4), ran, None, None), stream)
    text = " ".join(stream.getvalue().split())
    for shown in (
        "│ 4, ZeRO stage 2;",
        "memory given per node │ device chosen by the runtime, host 96.0 MiB",
        "peak resident growth per rank │ 7.0 MiB",
        "communicated a step │ all_gather 3.0 MiB, reduce_scatter 2.0 KiB │",
    ):
        assert shown in text


def test_the_table_of_one_process_says_nothing_of_ranks() -> None:
    stream = io.StringIO()
    show(summarize(parse(["train"]), Place(), outcome([3.0, 2.0, 1.0]), None, None), stream)
    assert "rank" not in stream.getvalue()
    assert "communicated" not in stream.getvalue()


def test_the_json_holds_the_same_and_stays_json_when_a_loss_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    summary = summarize(parse(["train"]), Place(), outcome([3.0, math.nan]), [3.0, math.inf], None)
    write_json(summary, str(path), io.StringIO())
    found = json.loads(path.read_text())
    assert found["losses"] == [3.0, None]
    assert found["memory"]["peak_growth_bytes"] == 7 << 20
    assert found["memory"]["state_bytes"] == 16 * found["parameters"]
    assert (found["ranks"], found["stage"], found["memory"]["budgets_of"]) == (1, 3, "rank")
    assert found["stats"]["written_bytes"] == {"nvme": 2 << 20}
    assert found["plain"]["largest_difference"] is None


def test_a_dash_writes_the_json_to_stdout() -> None:
    stream = io.StringIO()
    write_json(summarize(parse(["train"]), Place(), Outcome(), None, "SIGTERM"), "-", stream)
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

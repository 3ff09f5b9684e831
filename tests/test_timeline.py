"""A timeline is a file that trace viewers open, whatever ends the run, and changes nothing of it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded_ranks import World
from torch import nn

import tiered
from tiered.device.ticket import Completion
from tiered.stats import Meter
from tiered.timeline import Timeline

PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "drive": {"param_tier": "nvme", "optimizer_tier": "nvme", "host_budget": "8MiB"},
    "beside a device": {"device": "emulated", "host_budget": "64MiB"},
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def train(config: tiered.Config, model: nn.Module, steps: int = 3) -> list[float]:
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(steps):
            loss = model(torch.ones(2, 64) * step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file that may not have been ended."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text if text.endswith("]\n") else text.rstrip().rstrip(",") + "]")


def rows(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(event["tid"], []).append(event)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_run_with_a_timeline_is_the_run_without_and_names_what_each_group_does(
    place: str, tmp_path: Path, one_thread: None
) -> None:
    (tmp_path / "swap").mkdir()
    settings = {"device": "cpu", "nvme": tmp_path / "swap" if place == "drive" else None, **PLACES[place]}
    path = tmp_path / "run.json"
    want = train(tiered.Config(**settings), network())
    assert train(tiered.Config(**settings, trace=path), network()) == want
    events = read(path)
    assert events[-1]["name"] == "end"
    names = [event["name"] for event in events]
    assert all(f"forward {group}" in names for group in "0123"), names
    assert all(f"backward {group}" in names for group in "123"), names  # no gradient needs the first one's weight
    assert names.count("step") == 3
    assert all(f"update {group}" in names for group in "0123")
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    wanted = {"host": {"update"}, "drive": {"update", "drive", "commit"}, "beside a device": {"gradient", "update"}}
    assert wanted[place] <= kinds
    if place == "drive":
        assert {"read exp_avg of group 0", "write exp_avg of group 0"} <= set(names)


def test_events_of_one_row_lie_apart_or_inside_of_each_other(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    settings = {"device": "cpu", "nvme": tmp_path / "swap", **PLACES["drive"]}
    train(tiered.Config(**settings, trace=tmp_path / "run.json"), network())
    for events in rows(read(tmp_path / "run.json")).values():
        spans = sorted((e["ts"], -e["dur"]) for e in events)
        open_until: list[float] = []
        for start, minus in spans:
            while open_until and open_until[-1] <= start + 0.11:  # times are rounded to a tenth
                open_until.pop()
            assert not open_until or start - minus <= open_until[-1] + 0.11
            open_until.append(start - minus)


def test_what_goes_on_beside_at_once_has_rows_apart_and_they_are_used_again(tmp_path: Path) -> None:
    line = Timeline(tmp_path / "run.json", 0)
    meter = Meter(line)
    tickets = [Completion() for _ in range(3)]
    for number, ticket in enumerate(tickets):
        meter.flight(f"read {number}", "drive", ticket)
    tickets[1].finish()
    again = Completion()
    meter.flight("read 3", "drive", again)
    for ticket in (again, tickets[2], tickets[0]):
        ticket.finish()
    meter.close()
    by_name = {e["name"]: e["tid"] for e in read(tmp_path / "run.json") if e["ph"] == "X"}
    assert len({by_name["read 0"], by_name["read 1"], by_name["read 2"]}) == 3
    assert by_name["read 3"] == by_name["read 1"]


def test_what_a_run_that_was_killed_has_written_is_a_timeline(tmp_path: Path) -> None:
    line = Timeline(tmp_path / "run.json", 0)
    line.at("forward a", "forward")
    line.at("step", "step")
    assert [e["name"] for e in read(tmp_path / "run.json") if e["ph"] == "X"] == ["forward a"]
    line.close()


def test_threads_write_whole_events(tmp_path: Path) -> None:
    line = Timeline(tmp_path / "run.json", 0)

    def work(number: int) -> None:
        for _ in range(200):
            with line.span(f"work {number}", "work"):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.close()
    line.close()
    assert len([e for e in read(tmp_path / "run.json") if e["ph"] == "X"]) == 800


def test_a_timeline_that_cannot_be_written_ends_by_name_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, one_thread: None
) -> None:
    want = train(tiered.Config(device="cpu"), network(), 200)
    assert train(tiered.Config(device="cpu", trace="/dev/full"), network(), 200) == want
    assert len([m for m in caplog.messages if "/dev/full: the timeline ends here: No space left" in m]) == 1


@pytest.mark.parametrize("trace", ["", 3, b"", "no/such/folder/run.json", "."])
def test_a_path_that_cannot_be_a_file_is_refused_by_name_and_the_module_stays_plain(trace: Any) -> None:
    model = network()
    with pytest.raises(tiered.ConfigError, match="trace="):
        tiered.shard(model, tiered.Config(device="cpu", trace=trace))
    assert type(model) is nn.Sequential


def test_ranks_write_a_file_each(tmp_path: Path) -> None:
    models = [network() for _ in range(2)]

    def program(rank: int) -> None:
        train(tiered.Config(device="cpu", trace=tmp_path / "run.json"), models[rank])

    with World(2).installed() as world:
        world.run(program)
    for rank in range(2):
        events = read(tmp_path / f"run-r{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        assert any(event.get("cat") == "ranks" for event in events)

"""The display while a run is going: live on a terminal, a line every few steps elsewhere."""

import io

import pytest
from torch import nn

import tiered
from tiered.cli import progress
from tiered.cli.progress import QUIET_SECONDS, StepDisplay

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of which `tiered.stats` tells 6 MiB more moved and half a second more waited at each call."""
    calls = iter(range(1, 1000))

    def stats(model: nn.Module) -> tiered.Stats:
        call = next(calls)
        return tiered.Stats(
            steps=call,
            skipped_steps=0,
            read_bytes={"nvme": 4 * MIB * call},
            written_bytes={"nvme": 2 * MIB * call},
            resident_bytes={},
            peak_bytes={},
            staging_buffers=0,
            stall_seconds={"read": 0.5 * call},
            hit_rate=1.0,
            placement={},
        )

    monkeypatch.setattr(progress.tiered, "stats", stats)
    return nn.Identity()


def test_elsewhere_than_on_a_terminal_a_line_comes_every_few_steps(counted: nn.Module) -> None:
    stream = io.StringIO()
    with StepDisplay(stream, steps=40, tokens=100) as display:
        display.watch(counted)
        for step in range(1, 41):
            display(step, 2.5, 0.5)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/40"] + [f"{step}/40" for step in range(4, 41, 4)]
    assert lines[1] == "step 4/40  loss 2.5000  200 tokens/s  nvme 2.0 MiB/step  stalled 33%"


def test_a_slow_run_is_not_silent_for_long(counted: nn.Module) -> None:
    stream = io.StringIO()
    with StepDisplay(stream, steps=1000, tokens=1) as display:
        display.watch(counted)
        for step in (1, 2, 3):
            display(step, 1.0, QUIET_SECONDS)
    assert len(stream.getvalue().splitlines()) == 3


def test_a_terminal_shows_the_last_step_live(counted: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with StepDisplay(stream, steps=2, tokens=100) as display:
        display.watch(counted)
        display(1, 2.5, 0.5)
        display(2, 1.25, 0.5)
    assert "loss 1.2500" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_a_step_before_a_model_is_refused() -> None:
    with StepDisplay(io.StringIO(), steps=2, tokens=1) as display, pytest.raises(tiered.UsageError, match="watch"):
        display(1, 1.0, 1.0)

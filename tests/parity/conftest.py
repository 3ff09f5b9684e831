"""Fixtures of the parity tests: where bytes live, an own swap directory, one thread, and an end to a hang.

Invariants: 1. every test runs with one torch thread, so that sums have one order. 2. a test that waits for ever ends:
first by an alarm whose traceback shows where Python waits, then, if native code holds the process, by its exit.
"""

import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from parity.harness import PLACEMENTS, Placement

ALARM_S = 120
EXIT_S = 150


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Invariant 1."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test was still waiting after {ALARM_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(ALARM_S)
    faulthandler.dump_traceback_later(EXIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    """An existing, empty directory for the NVMe tier; it must be empty again when the test is over."""
    path = tmp_path / "swap"
    path.mkdir()
    return path


@pytest.fixture(params=PLACEMENTS, ids=lambda placement: placement.name)
def placement(request: pytest.FixtureRequest) -> Placement:
    """Each of the places the same training may live in."""
    return request.param

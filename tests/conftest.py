"""Shared set-up: makes `models` and `parity.harness` importable in every test process.

The tests directory goes to the end of the path, so that nothing in it can shadow an installed package and the
`tiered` under test is the one that is installed. Ctrl-C means what it means at a terminal, here and in every process a
test starts: a run in the background (`nohup`, some CI) inherits an ignored SIGINT.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def signals_as_usual() -> Iterator[None]:
    """A command that ends by itself ignores further signals, and what a later test starts would inherit that."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

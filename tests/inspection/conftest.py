"""The fixtures of tests/inspection: a swap folder, what a dead run left there, and a checkpoint."""

from pathlib import Path

import pytest
import torch
from inspection_support import leave, running

import tiered


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap"


@pytest.fixture
def left(swap: Path) -> Path:
    """The swap directory of a dead run."""
    leave(swap)
    (found,) = swap.iterdir()
    return found


@pytest.fixture
def saved(tmp_path: Path, swap: Path) -> Path:
    with running(swap, 2) as (model, optimizer):
        return tiered.save(model, optimizer, tmp_path / "saved", extra={"a": torch.ones(3)})

"""What the store tests share: a store on a real swap file, and blocks with known bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiered.io.swapfile import SwapSpace
from tiered.stats import Meter
from tiered.store.block import Block, BlockKey
from tiered.store.store import TieredStore
from tiered.store.tier import Budget, Tier

OpenStore = Callable[[int], TieredStore]


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    """An existing, empty directory for the swap file."""
    path = tmp_path / "swap"
    path.mkdir()
    return path


@pytest.fixture
def open_store(swap: Path) -> Iterator[OpenStore]:
    """Opens stores with a host budget of so many bytes, and closes them at the end."""
    opened: list[TieredStore] = []

    def open_one(budget: int) -> TieredStore:
        opened.append(TieredStore(Budget(Tier.HOST, budget), SwapSpace([swap], threads=2), Meter()))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def filled() -> Callable[[TieredStore, int, int], Block]:
    """A block on the drive of so many bytes, with content that depends on its group; none of it cached."""

    def fill(store: TieredStore, group: int, nbytes: int) -> Block:
        block = store.create(BlockKey(group, "param"), nbytes, Tier.NVME)
        store.patch(block, content(group, nbytes), 0)
        return block

    return fill


def content(group: int, nbytes: int) -> torch.Tensor:
    """The bytes of a filled block, uint8 (nbytes,)."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(group))

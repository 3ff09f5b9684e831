"""Windows: how any bytes of a block are reached through bounded memory, where its drive moves whole pieces only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tiered.device.memory import Memory
from tiered.store.block import Block

if TYPE_CHECKING:
    from tiered.store.store import TieredStore

WINDOW_BYTES = 4 << 20  # a multiple of every drive's piece


def windows(block: Block, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Piece-aligned windows [start, stop) of the block that cover a range."""
    if nbytes:
        for start in range(offset // WINDOW_BYTES * WINDOW_BYTES, offset + nbytes, WINDOW_BYTES):
            yield start, min(start + WINDOW_BYTES, block.nbytes)


def load(store: TieredStore, block: Block, out: torch.Tensor, offset: int) -> None:
    """Fill `out` (1-D uint8) with bytes of a block on a drive."""
    with _window(store, block) as memory:
        for start, stop in windows(block, offset, out.numel()):
            store.read(block, memory, offset=start, nbytes=stop - start).wait()
            low, high = max(start, offset), min(stop, offset + out.numel())
            out[low - offset : high - offset].copy_(memory.bytes[low - start : high - start])


def patch(store: TieredStore, block: Block, data: torch.Tensor, offset: int) -> None:
    """Replace bytes of a block on a drive by `data` (1-D uint8)."""
    with _window(store, block) as memory:
        for start, stop in windows(block, offset, data.numel()):
            low, high = max(start, offset), min(stop, offset + data.numel())
            if (low, high) != (start, stop):
                store.read(block, memory, offset=start, nbytes=stop - start).wait()
            memory.bytes[low - start : high - start].copy_(data[low - offset : high - offset])
            store.write(block, memory, offset=start, nbytes=stop - start).wait()


@contextlib.contextmanager
def _window(store: TieredStore, block: Block) -> Iterator[Memory]:
    """Staging for one window on the block."""
    memory = store.staging(min(WINDOW_BYTES, block.nbytes), f"a window on {block.key}")
    try:
        yield memory
    finally:
        store.unstage(memory)

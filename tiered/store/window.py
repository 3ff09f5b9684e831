"""Windows: how any bytes of a block are reached through bounded memory, where its drive moves whole pieces only."""

from __future__ import annotations

from collections.abc import Iterator

from tiered.store.block import Block

WINDOW_BYTES = 4 << 20  # a multiple of every drive's piece


def windows(block: Block, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Piece-aligned windows [start, stop) of the block that cover a range."""
    if nbytes:
        for start in range(offset // WINDOW_BYTES * WINDOW_BYTES, offset + nbytes, WINDOW_BYTES):
            yield start, min(start + WINDOW_BYTES, block.nbytes)

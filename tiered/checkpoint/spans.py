"""Spans: bytes of a data file that are checked on one grid, and the checks there are.

    span      offset |---- piece 0 ----|---- piece 1 ----|- 2 -|      each piece has a checksum
    parts            |  a  |     b      |   c   |  d   |              elements of it; a check of one reads whole pieces

A save that writes bytes takes their xxh3. One that links them (`store.snapshot`) has not seen them, and takes the
checksums that their drive's pieces have. Invariant: a check means the same on every machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from tiered.store.checks import CHECKS

PIECE_BYTES = 4 << 20
"""At most so many have one checksum."""
GRID_BYTES = 1 << 20
"""What is written here has one for each so many."""


def hash_of(data: Any) -> str:
    """The xxh3 of bytes, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


DIGITS: Mapping[str, int] = {"xxh3": 16, **dict.fromkeys(CHECKS, 8)}
_DIGEST: Mapping[str, Callable[[memoryview], str]] = {"xxh3": hash_of, **CHECKS}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + nbytes) of a file, in pieces of `piece_bytes`; the last may be shorter."""

    file: str
    offset: int
    nbytes: int
    check: str  # a key of DIGITS
    piece_bytes: int
    sums: str  # of each piece, in hexadecimal, one after the other

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes

    @property
    def pieces(self) -> int:
        return -(-self.nbytes // self.piece_bytes)

    def piece(self, number: int) -> tuple[int, int]:
        """Where a piece is in the file, and its bytes."""
        at = number * self.piece_bytes
        return self.offset + at, min(self.piece_bytes, self.nbytes - at)

    def right(self, number: int, data: memoryview) -> bool:
        """`data` is what was written as this piece."""
        digits = DIGITS[self.check]
        return _DIGEST[self.check](data) == self.sums[number * digits : (number + 1) * digits]

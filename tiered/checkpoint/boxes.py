"""Flat ranges of a contiguous tensor as boxes (offsets and sizes by dimension), and boxes within boxes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in each dimension, and how far it reaches."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a contiguous tensor as few boxes, in order, each without gaps in its memory."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    if skipped or stop - start < row:  # within a row, to its end at most
        end = min(stop, (first + 1) * row)
        yield from _in_row(first, boxes(shape[1:], skipped, end - first * row))
        start, first = end, first + 1
    whole = max(stop - start, 0) // row
    if whole:
        yield (first, *(0 for _ in shape[1:])), (whole, *shape[1:])
    yield from _in_row(first + whole, boxes(shape[1:], 0, stop - start - whole * row))


def _in_row(row: int, inner: Iterator[Box]) -> Iterator[Box]:
    for offsets, sizes in inner:
        yield (row, *offsets), (1, *sizes)


def shared(one: Box, other: Box) -> Box | None:
    """What two boxes have in common, if anything."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    if any(end <= offset for end, offset in zip(ends, offsets, strict=True)):
        return None
    return offsets, tuple(end - offset for end, offset in zip(ends, offsets, strict=True))


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The index of a box in a tensor that holds another one, which it lies in."""
    starts = [a - b for a, b in zip(inner[0], outer[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner[1], strict=True))


def position(inner: Box, outer: Box) -> int:
    """The number of the first element of a box in a contiguous tensor that holds another one, which it lies in."""
    at = 0
    for a, b, size in zip(inner[0], outer[0], outer[1], strict=True):
        at = at * size + a - b
    return at


def exact(shape: Sequence[int], parts: Sequence[Box]) -> bool:
    """Whether boxes cover every element of a tensor once."""
    for offsets, sizes in parts:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)):
            return False
    filled = sorted(part for part in parts if math.prod(part[1]))
    if sum(math.prod(sizes) for _, sizes in filled) != math.prod(shape):
        return False
    open_: list[Box] = []  # those before that reach as far as the next one begins
    for box in filled:
        open_ = [other for other in open_ if shape and other[0][0] + other[1][0] > box[0][0]]
        if any(shared(box, other) is not None for other in open_):
            return False
        open_.append(box)
    return True

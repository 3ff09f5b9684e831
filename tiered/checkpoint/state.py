"""Training state on its way between formats: named tensors that are read a piece at a time, whoever wrote them.

Every format this package reads gives a `State`, and every one it writes takes one, so n formats need 2 n programs and
not n squared. Nothing here opens a file. Invariants:
1. A `Source` holds no values: they come by `fill`, in the pieces that the writer asks for.
2. Values pass bit for bit unless a cast is asked for, and a cast that would make a finite value infinite is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tiered.checkpoint.spans import PIECE_BYTES
from tiered.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is read in pieces: `fill(out, start)` gives its elements from `start` on, in the order of a
    contiguous tensor; `out` is 1-D, of `dtype`, on the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, int], None]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self, window: torch.Tensor) -> Iterator[memoryview]:
        """All its bytes, in order, through `window` (of `a_window`): each piece is good until the next."""
        for at in range(0, self.nbytes, PIECE_BYTES):
            piece = window[: min(PIECE_BYTES, self.nbytes - at)]
            self.fill(piece.view(self.dtype), at // self.dtype.itemsize)
            yield piece.numpy().data

    def whole(self) -> torch.Tensor:
        """All of it at once; for small ones."""
        out = torch.empty(self.numel, dtype=self.dtype, device="cpu")
        if self.numel:
            self.fill(out, 0)
        return out.view(self.shape)


def a_window() -> torch.Tensor:
    """Memory for the pieces of one source after the other: the system keeps some of what is taken for each anew."""
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")


def constant(value: torch.Tensor) -> Source:
    """A source of values that are there."""
    flat = value.reshape(-1)

    def fill(out: torch.Tensor, start: int) -> None:
        out.copy_(flat[start : start + out.numel()])

    return Source(tuple(value.shape), value.dtype, fill)


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """What AdamW keeps of one parameter."""

    step: int  # updates taken, 1 or more
    exp_avg: Source
    exp_avg_sq: Source

    def items(self) -> tuple[tuple[str, Source], ...]:
        return (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The weights of a model, and the optimizer's state where there is one."""

    weights: Mapping[str, Source]
    """Parameters and persistent buffers, by name."""
    buffers: frozenset[str] | None = None
    """Which of them are buffers; None where that is not known."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Another name of a tied parameter -> the name it has in `weights`."""
    moments: Mapping[str, Moments] = dataclasses.field(default_factory=dict)
    """By name of the parameter; none of a parameter that was never updated."""
    groups: Sequence[Mapping[str, Any]] | None = None
    """Parameter groups: hyperparameters, and "params": names. None: there was no optimizer."""

    def sources(self) -> Iterator[Source]:
        """All that is to be read."""
        yield from self.weights.values()
        for moments in self.moments.values():
            yield moments.exp_avg
            yield moments.exp_avg_sq

    def each(self, change: Callable[[str, Source], Source]) -> State:
        """The same with every source as `change(name, source)` gives it."""
        weights = {name: change(name, source) for name, source in self.weights.items()}
        moments = {
            name: Moments(
                m.step, change(f"exp_avg of {name}", m.exp_avg), change(f"exp_avg_sq of {name}", m.exp_avg_sq)
            )
            for name, m in self.moments.items()
        }
        return dataclasses.replace(self, weights=weights, moments=moments)


def cast(name: str, source: Source, dtype: torch.dtype) -> Source:
    """`source` in another floating dtype, rounded to nearest. Filling raises UsageError, with `name`, where a finite
    value would become infinite."""
    if source.dtype == dtype:
        return source

    def fill(out: torch.Tensor, start: int) -> None:
        step = PIECE_BYTES // source.dtype.itemsize
        for at in range(0, out.numel(), step):
            into = out[at : at + step]
            values = torch.empty(into.numel(), dtype=source.dtype, device="cpu")
            source.fill(values, start + at)
            into.copy_(values)
            lost = torch.isinf(into) & torch.isfinite(values)
            if lost.any():
                where = int(lost.nonzero()[0])
                raise UsageError(
                    f"'{name}': element {start + at + where} is {values[where].item()!r}, which {dtype} does not "
                    f"hold: choose another dtype"
                )

    return Source(source.shape, dtype, fill)


def watched(source: Source, tell: Callable[[int], None]) -> Source:
    """`source`; `tell` is given the bytes of each piece once it has been read."""

    def fill(out: torch.Tensor, start: int) -> None:
        source.fill(out, start)
        tell(out.nbytes)

    return Source(source.shape, source.dtype, fill)

"""Reducer: when the gradients of a model are averaged over ranks.

    backward    a group is offered as soon as what is expected of it has arrived, and reduced beside the rest
    its end     (stages 2 and 3) all ranks find out together what any of them has left, and reduce that
    step        (stage 1, and after no_sync) likewise, so that there is one reduction for all backwards of a step

What is expected of a group is what it had the last time ranks found out; at first, all that requires a gradient. In
stage 1 groups are offered in the last backward of a step, once the number of backwards a step is learnt.

Invariants:
1. The number of backwards since the last step, and of those that failed half way, is compared whenever ranks meet.
2. Buffers that changed on any rank have rank 0's values after each meeting, so the next forward begins with them on
   every rank.
Leaves to whom: what a reduction is, `zero.shared` and `zero.traffic`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tiered.zero.agreement import Call, Flag
from tiered.zero.buffers import SharedBuffers
from tiered.zero.departures import Departures
from tiered.zero.exchange import Exchange
from tiered.zero.shared import SharedGrads

T = TypeVar("T")


class Reducer:
    """See the file's contract."""

    def __init__(self, exchange: Exchange, departures: Departures, module: nn.Module, stage: int) -> None:
        self._exchange = exchange
        self._departures = departures
        self._buffers = SharedBuffers(module)
        self._stage = stage
        self._grads: Sequence[SharedGrads] = ()
        self.backwards = 0  # since the last step
        self._failed = 0  # likewise: those that ended half way, after something was offered
        self._usual: int | None = None  # backwards a step
        self._deferring = 0
        self._left = False  # something may wait for the step
        self._task: int | None = None  # of the backward that is going on
        self._offered = False  # something of it, to the other ranks

    def start(self, grads: Sequence[SharedGrads]) -> None:
        """Reduce these, and give every rank the buffers of rank 0."""
        self._grads = grads
        self._exchange.together(Call.BACKWARD, "shard()", lambda: self._buffers.share(self._exchange.ranks, all_=True))

    # --- backward ---

    @property
    def reducing(self) -> bool:
        """A group whose gradients are complete is reduced in this backward."""
        last = self._stage > 1 or self.backwards + 1 == self._usual
        return not self._deferring and last

    def offered(self) -> None:
        """A group's gradients go to the other ranks before backward is over."""
        self._offered = True

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """See `tiered.no_sync`."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    def inside_backward(self) -> None:
        """Called inside backward, before anything of it arrives or is recomputed. A checkpoint may run a backward of
        its own inside the one that is going on: only that one's end counts."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            self._offered = False
            for grads in self._grads:
                grads.begin_backward()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
            self._exchange.computing(f"backward {self.backwards + 1} of a step")

    @contextlib.contextmanager
    def forward(self, label: str, *, inside: bool) -> Iterator[None]:
        """A module computes: `inside` a backward, again."""
        if inside:
            self.inside_backward()
            yield
            return
        self.outside_backward()
        self._exchange.check()
        with self._exchange.within(f"the forward of '{label}'", computing=True):
            yield

    def outside_backward(self) -> None:
        """Called where no backward is going on: one that was has failed."""
        if self._task is not None:
            self._task = None
            self._exchange.idle("a backward that failed")
            self._failed += self._offered

    def _end_backward(self) -> None:
        self._departures.drain()
        self._task = None
        self.backwards += 1
        if self._deferring or self._stage == 1:
            self._left = True
        else:
            again = f", tried again after it failed {self._failed} times half way" if self._failed else ""
            self._meet(f"the end of backward {self.backwards} of a step{again}")
        self._exchange.idle(f"backward {self.backwards} of a step")

    # --- step ---

    def before_step(self) -> None:
        """Every gradient is known and reduced when this returns."""
        self.outside_backward()
        if self._left:
            self._meet(f"step(), after {self.backwards} backwards")

    def agree(self, total: float, settings: Sequence[str]) -> float:
        """The sum of `total` over ranks, when every rank has come to its step, with the same `settings` of parameter
        groups. From then on this rank's shards are not given out, until `stepped`."""
        detail = zlib.crc32(f"{self._signature} {settings}".encode())
        doing = f"step(), after {self.backwards} backwards, with {', '.join(dict.fromkeys(settings))}"
        return self._exchange.together(
            Call.STEP, doing, lambda: self._exchange.ranks.sum([total])[0], detail=detail, closes=True
        )

    def stepped(self) -> None:
        """A step has been taken, or skipped."""
        self._usual = self.backwards
        self.backwards = self._failed = 0
        self._exchange.open()

    @property
    def _signature(self) -> str:
        return f"{self.backwards} {self._failed}"

    # --- both ---

    def land(self) -> None:
        """Account for every reduction that has been offered."""
        for grads in self._grads:
            grads.land()

    def with_room(self, take: Callable[[], T], scarce: type[BaseException]) -> T:
        """`take()`, again once what is being reduced has given its memory back, where it raised `scarce`."""
        for grads in self._grads:
            try:
                return take()
            except scarce:
                grads.land()
        return take()

    def _meet(self, doing: str) -> None:
        """Find out with all ranks what any of them has left, and reduce it."""
        flags, withdrawn = self._exchange.together(
            Call.BACKWARD, doing, self._found_out, detail=zlib.crc32(self._signature.encode())
        )
        for index in withdrawn:
            self._grads[index].withdraw()
        self._left = False
        found = iter(flags)
        for grads in self._grads:
            mine = [next(found) for _ in grads.left]
            if any(mine):
                grads.expected = mine
                self.with_room(lambda grads=grads, mine=mine: grads.offer(mine), MemoryError)  # type: ignore[misc]
        self.land()

    def _found_out(self) -> tuple[list[bool], list[int]]:
        """On the communication thread: what any rank has left, by group and parameter; and the groups whose reduction
        was offered here and not by all."""
        withdrawn = self._exchange.withdraw(Flag.GRADIENT)
        mine: list[bool] = []
        for grads in self._grads:
            being_reduced = grads.reduction is not None and grads.group.index not in withdrawn
            mine += [False] * len(grads.left) if being_reduced else grads.left
        ranks = self._exchange.ranks
        flags = ranks.any(mine)
        self._buffers.share(ranks)
        return flags, withdrawn

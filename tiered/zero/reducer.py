"""Reducer: when the gradients of a model are averaged over ranks.

    backward    a group is offered as soon as what is expected of it has arrived, and reduced beside the rest
    its end     (stages 2 and 3) all ranks find out together what any of them has left, and reduce that
    step        (stage 1, and after no_sync) likewise, so that there is one reduction for all backwards of a step

What is expected of a group is what it had the last time ranks found out; at first, all that requires a gradient. In
stage 1 groups are offered in the last backward of a step, once the number of backwards a step is learnt, where there
is memory to undo that.

Invariants:
1. The number of backwards since the last step, and of those that failed half way, is compared whenever ranks meet.
2. Buffers that changed on any rank have rank 0's values after each meeting, so the next forward begins with them on
   every rank.
3. Whether and when a group is offered early shows in no bit. (But for a backward tried again after it failed.)
Leaves to whom: what a reduction is, `zero.shared` and `zero.traffic`.
"""

from __future__ import annotations

import collections
import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tiered.device.interrupt import interruptible
from tiered.device.memory import Memory
from tiered.errors import RankError
from tiered.store.store import TieredStore
from tiered.zero.agreement import Call, Flag
from tiered.zero.buffers import SharedBuffers
from tiered.zero.departures import Departures
from tiered.zero.exchange import Exchange
from tiered.zero.shared import SharedGrads


class Reducer:
    """See the file's contract."""

    def __init__(
        self,
        exchange: Exchange,
        departures: Departures,
        module: nn.Module,
        stage: int,
        store: TieredStore,
        reserve: int,
    ) -> None:
        """`reserve`: bytes of the host budget that nothing early may take."""
        self._exchange = exchange
        self._store = store
        self._reserve = reserve
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
        self._spares: list[Memory] = []  # of whole gradients, while a backward goes on
        self._relieving = False
        self._nested = False  # parts of it run backwards of their own
        self._uses: collections.Counter[int] = collections.Counter()  # of each group, since a backward ended
        self._training: bool | None = None  # the outermost forward that is going on records a graph

    def start(self, grads: Sequence[SharedGrads]) -> None:
        """Reduce these, and give every rank the buffers of rank 0."""
        self._grads = grads
        ranks = self._exchange.ranks
        self._exchange.together(Call.BACKWARD, "shard()", lambda: self._buffers.share(ranks, compare=True, all_=True))

    # --- backward ---

    def reduces(self, group: int) -> bool:
        """A group whose gradients seem complete is reduced in this backward, before its end. Gradients of a group that
        was used twice may come twice, where checkpoints run backwards of their own."""
        last = self._stage > 1 or self.backwards + 1 == self._usual
        return last and not self._deferring and not (self._nested and self._uses[group] > 1)

    def spare(self, nbytes: int) -> bool:
        """The host has `nbytes` that nothing else is going to need."""
        return nbytes <= self._store.room() - self._reserve

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
        elif self._task != torch._C._current_graph_task_id():
            self._nested = True

    @contextlib.contextmanager
    def forward(self, label: str, groups: Iterable[int], *, inside: bool) -> Iterator[None]:
        """A module computes with these groups: `inside` a backward, again."""
        if inside:
            self.inside_backward()
            yield
            return
        self.outside_backward()
        self._exchange.check()
        before = self._training
        if before is None:
            self._training = torch.is_grad_enabled()
        if self._training:
            self._uses.update(groups)
            self._nested |= not torch.is_grad_enabled()  # a checkpoint that will run a backward of its own
        try:
            with self._exchange.within(f"the forward of '{label}'", computing=True):
                yield
        finally:
            self._training = before

    def outside_backward(self) -> None:
        """Called where no backward is going on: one that was has failed."""
        if self._task is not None:
            self._over()
            self._exchange.idle("a backward that failed")
            self._failed += self._offered

    def _end_backward(self) -> None:
        self._departures.drain()
        self._over()
        self.backwards += 1
        again = f", tried again after it failed {self._failed} times half way" if self._failed else ""
        try:
            if self._deferring or self._stage == 1:
                self._left = True
            else:
                self._meet(f"the end of backward {self.backwards} of a step{again}")
        finally:
            self._exchange.idle(f"backward {self.backwards} of a step")

    def _over(self) -> None:
        self._task, self._nested = None, False
        self._uses.clear()
        self._drop_spares()

    # --- step ---

    def before_step(self) -> None:
        """Every gradient is known and reduced when this returns."""
        self.outside_backward()
        if self._left:
            self._meet(f"step(), after {self.backwards} backwards")

    def agree(self, total: float, settings: Sequence[str]) -> float:
        """The sum of `total` over ranks, when every rank has come to its step, with the same `settings` of parameter
        groups. From then on this rank's shards are not given out, until `stepped`."""
        present = [there for grads in self._grads for there in grads.present]
        detail = zlib.crc32(f"{self._signature} {settings} {present}".encode())
        doing = (
            f"step(), after {self.backwards} backwards, with {sum(present)} gradients, and with "
            f"{', '.join(dict.fromkeys(settings))}"
        )
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

    # --- the memory of whole gradients ---

    def whole(self, nbytes: int, what: str) -> Memory:
        """Host memory for this rank's gradients of a group until they are reduced. Memory of groups that have been
        reduced in this backward serves again: the system would fill new pages with zeros first. Raises BudgetError."""
        self._land_done()
        for memory in self._spares:
            if memory.nbytes == nbytes:
                self._spares.remove(memory)
                return memory
        return self._store.staging(nbytes, what)

    def give_back(self, memory: Memory) -> None:
        """Undo `whole`."""
        if self._task is None:
            self._store.unstage(memory)
        else:
            self._spares.append(memory)

    def _drop_spares(self) -> bool:
        """Give memory that may serve again to whoever needs some; False where there is none."""
        spares, self._spares = self._spares, []
        for memory in spares:
            self._store.unstage(memory)
        return bool(spares)

    def relieve(self) -> bool:
        """Host memory is short: take back what serves speed alone, or wait until a reduction gives back what it holds.
        False where none will."""
        if self._relieving:
            return False
        self._relieving = True
        try:
            return self._drop_spares() or self._recall() or self._land_some()
        finally:
            self._relieving = False

    def _recall(self) -> bool:
        undone = [grads for grads in self._grads if any(grads.early)]
        for grads in undone:
            grads.recall()
        return bool(undone)

    def _land_some(self) -> bool:
        coming = [done for grads in self._grads if (done := grads.done) is not None]
        doing = "a wait for memory that the gradients of other groups hold until every rank has theirs"
        with interruptible():
            if not coming or not self._exchange.any_of(coming, doing):
                return False
        self._land_done()
        return True

    def _land_done(self) -> None:
        for grads in self._grads:
            if (done := grads.done) is not None and done.done():
                grads.land()

    def _meet(self, doing: str) -> None:
        """Find out with all ranks what any of them has left, and reduce it."""
        flags, withdrawn = self._exchange.together(
            Call.BACKWARD, doing, self._found_out, detail=zlib.crc32(self._signature.encode())
        )
        for index in withdrawn:
            self._grads[index].withdraw()
        self._left = False
        found = iter(flags)
        again: list[SharedGrads] = []
        for grads in self._grads:
            left, early = [[next(found) for _ in grads.left] for _ in range(2)]
            undone, frozen = next(found), next(found)
            if any(left) and frozen:
                raise RankError(
                    f"group '{grads.group.name}' is trained on one rank and frozen on another: set requires_grad alike "
                    f"on every rank"
                )
            if any(left) or (any(early) and undone):
                grads.recall()
                grads.expected = [either or other for either, other in zip(left, early, strict=True)]
                again.append(grads)
            else:
                grads.land()
                grads.confirm()
        for grads in again:
            grads.offer(grads.expected)
        for grads in again:
            grads.land()

    def _found_out(self) -> tuple[list[bool], list[int]]:
        """On the communication thread: by group, the parameters of which any rank has something left, those that were
        reduced early, whether that is undone on any rank, and whether any rank has it frozen; and the groups whose
        reduction was offered here and not by all."""
        withdrawn = self._exchange.withdraw(Flag.GRADIENT)
        mine: list[bool] = []
        for grads in self._grads:
            being_reduced = grads.reduction is not None and grads.group.index not in withdrawn
            mine += [False] * len(grads.left) if being_reduced else grads.left
            mine += [*grads.early, not any(grads.early), "grad" not in grads.group.blocks]
        ranks = self._exchange.ranks
        *flags, altered = ranks.any([*mine, self._buffers.altered])
        self._buffers.share(ranks, compare=altered)
        return flags, withdrawn

"""The step's pipeline: chunks of optimizer state through read, compute and write, each side several chunks deep.

Reads are issued as many chunks ahead as there are slots, and a slot is free again when its writes are done: with
PIPELINE_SLOTS or more, read, compute and write overlap.

Invariants:
1. Chunks are computed in order, and every element once, whatever the number of slots or the chunk's size.
2. When a run is over, by `finish`, `close` or an error, nothing of it is in flight, and every slot is back; but
   `hand_over` gives both to the run that follows.
Leaves to whom: what an update is, is the caller's function; what moves how is `optim.slots`'.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tiered.optim.slots import Array, Chunk, Filled, Slots, Work, moving
from tiered.stats import Meter
from tiered.store.block import Block
from tiered.store.store import TieredStore
from tiered.zero.group import ParamGroup

_MOST_AHEAD = 8  # chunks, of which some may need no slot

Update = Callable[[Chunk, dict[str, torch.Tensor]], None]
Updated = Callable[[ParamGroup], None]


class Run:
    """Updates every chunk of every group, as far as it is asked to, in the order given; see the file's contract."""

    def __init__(
        self,
        store: TieredStore,
        meter: Meter,
        groups: Iterable[Work],
        update: Update,
        updated: Updated | None = None,
        *,
        slots: Slots | None = None,
    ) -> None:
        """update(chunk, kind -> 1-D tensor of the chunk's elements): in place.
        updated: told of each group once its last chunk is computed and on its way back. What of it lies in memory is
        final then; what was staged may still be being written, and staging is scarce until the run is over.
        slots: those of a run that has handed over. Raises BudgetError where staging has no room."""
        work = list(groups)
        self._update = update
        self._updated = updated
        self._scope = contextlib.ExitStack()
        self._slots = slots or Slots(store, meter, work)
        self._scope.enter_context(self._slots)
        self._coming: collections.deque[Chunk] = collections.deque()
        self._ahead: collections.deque[Filled] = collections.deque()
        for group, arrays in work:
            self.add(group, arrays)

    def add(self, group: ParamGroup, arrays: Sequence[Array], *, beside: bool = False) -> None:
        """A group to be updated after the others; `beside`: its chunks are candidates."""
        self._coming.extend(_chunks(group, arrays, self._slots.chunk, beside))

    def advance(self) -> ParamGroup | None:
        """Compute the next chunk; gives its group if that was its last, and None after the very last.

        Raises what a read, a write, `update` or `updated` raised, after waiting for what is in flight: it is over then.
        """
        with self._ending_by_error():
            self.read_ahead()
            if not self._ahead:
                return None
            filled = self._ahead.popleft()
            self._update(filled.chunk, self._slots.tensors(filled))
            self._slots.write_back(filled)
            if self._updated is not None and filled.chunk.last:
                self._updated(filled.chunk.group)
            return filled.chunk.group

    @property
    def over(self) -> bool:
        """Every chunk is computed."""
        return not self._coming and not self._ahead

    @property
    def ready(self) -> bool:
        """The next chunk can be computed without waiting for anything."""
        return bool(self._ahead) and all(read.done() for read in self._ahead[0].reads)

    def read_ahead(self, *, wait: bool = True) -> None:
        """Begin to read what comes next, as far as slots are free; for the very next chunk, with `wait`, one is waited
        for."""
        while self._coming:
            needed = wait and not self._ahead
            if moving(self._coming[0]) and not self._slots.available(wait=needed):
                break
            self._ahead.append(self._slots.fill(self._coming.popleft()))
            if len(self._ahead) > _MOST_AHEAD:
                break

    def written(self, block: Block) -> None:
        """Wait until nothing of a block is on its way back. Raises as `advance`."""
        with self._ending_by_error():
            self._slots.written(block)

    def finish(self) -> None:
        """Compute all that is left, and wait for every write. Raises as `advance`."""
        while not self.over:
            self.advance()
        with self._ending_by_error():
            self._slots.finish()
        self.close()

    def hand_over(self) -> Slots:
        """End here, and let another run go on with the slots, and with what is in flight of them; what is not computed
        stays so."""
        self._coming.clear()
        while self._ahead:
            self._slots.leave(self._ahead.popleft())
        self._scope.pop_all()
        return self._slots

    def close(self) -> None:
        """Wait for what is in flight, and give back what was taken; what is not computed stays so. Idempotent."""
        self._coming.clear()
        self._ahead.clear()
        self._scope.close()

    @contextlib.contextmanager
    def _ending_by_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _chunks(group: ParamGroup, arrays: Sequence[Array], size: int, beside: bool) -> Iterator[Chunk]:
    numel = group.spec.shard_numel
    step = size if moving(Chunk(group, arrays, 0, numel, beside)) else max(numel, 1)
    for start in range(0, numel, step):
        yield Chunk(group, arrays, start, min(start + step, numel), beside)

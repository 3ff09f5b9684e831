"""Step: what an update of groups means to the rest of a model, while it goes on and when it is over.

    parts    the groups in portions that are updated one after the other
    updated  one group's own shard has its new values
    finish   every group has its new values, everywhere

With one rank a group's copies on the device are refreshed as soon as it is updated. With several, each updates its
shard; where the stage does not partition parameters, the shards are then exchanged, beside the update of later groups,
and a block that has its home on a drive is in memory for as long as that takes.

Invariant: with several ranks nothing is fetched from other ranks, or given to them, before all of a step is done here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from tiered.device.memory import Memory
from tiered.device.ticket import Completion, Finished, Ticket
from tiered.store.store import TieredStore
from tiered.store.tier import Tier
from tiered.zero import groupstate
from tiered.zero.group import ParamGroup
from tiered.zero.traffic import Traffic

_WHOLE = ("param", "grad")  # kinds that some stage does not partition


class LazyUpdate(groupstate.LazyUpdate, Protocol):
    """The update of a step, while it is not over."""

    @property
    def computed(self) -> bool:
        """All of it is; it may be on its way back."""

    def finish(self) -> None:
        """It is over on return."""

    def abandon(self) -> None:
        """Nobody wants what it would give."""

    def relieve(self) -> bool:
        """Finish, so that memory comes back; False where it cannot now."""


class EarlyUpdate(Protocol):
    """Candidates for the update of the step that comes."""

    def forget(self) -> None:
        """There are none any more, and nothing of them is on its way."""

    def relieve(self) -> bool:
        """Forget them for the memory they take; False where they take none."""


class Step:
    """With one rank; see the file's contract."""

    def __init__(self) -> None:
        self.fresh: set[int] = set()
        """Groups whose copies on the device are up to date already."""

    def parts(self, groups: Sequence[ParamGroup]) -> Iterator[Sequence[ParamGroup]]:
        """All at once."""
        if groups:
            yield groups

    def alive(self) -> None:
        """The update goes on."""

    def updated(self, group: ParamGroup) -> None:
        """A group has its new values."""
        if group.lies_in_memory("param"):  # its copy needs no staging, and may overlap the rest of the step
            group.refresh()
            self.fresh.add(group.index)

    def finish(self) -> None:
        """Every group has."""


class SharedStep(Step):
    """With several ranks; see the file's contract."""

    def __init__(self, traffic: Traffic, store: TieredStore) -> None:
        super().__init__()
        self._traffic = traffic
        self._store = store
        self._completing: list[tuple[ParamGroup, Memory, Completion]] = []

    def parts(self, groups: Sequence[ParamGroup]) -> Iterator[Sequence[ParamGroup]]:
        away = [group for group in groups if self._away(group)]
        yield from super().parts([group for group in groups if group not in away])
        for group in away:
            with contextlib.ExitStack() as scope:
                for kind in self._away(group):
                    if not (kind == "param" and group.runtime.in_place and group.present):  # there it is the buffer
                        scope.enter_context(self._store.pinned(group.blocks[kind], dirty=kind == "param"))
                yield [group]
                self.finish()

    def alive(self) -> None:
        self._traffic.exchange.computing("step()")

    def updated(self, group: ParamGroup) -> None:
        if not group.runtime.partitions("param"):
            memory = group.memory_of("param")
            self._completing.append((group, memory, self._traffic.spread(group, memory)))

    def finish(self) -> None:
        completing, self._completing = self._completing, []
        writes: list[Ticket] = []
        for group, memory, done in completing:
            self._traffic.exchange.wait(done, "gather")
            block = group.blocks["param"]
            writes.append(Finished() if memory is block.memory else self._store.write(block, memory))
        for write in writes:
            write.wait()

    def _away(self, group: ParamGroup) -> list[str]:
        """Kinds of which this rank has the whole, with their home on a drive."""
        return [kind for kind in _WHOLE if not group.runtime.partitions(kind) and group.blocks[kind].home is Tier.NVME]

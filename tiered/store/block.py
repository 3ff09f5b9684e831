"""Blocks: one kind of bytes of one group's shard, its state, and the only way to change that state.

    NVME --begin_fetch--> FETCHING --settle--> HOST --begin_flush--> FLUSHING --settle--> HOST (clean) --evict--> NVME
    any --fail--> FAILED                     every later call raises with the first cause
    HOST --discard--> NVME (blank)           contents no longer wanted

Pins (a count) and dirty stand beside the state. Invariants:
1. `memory` is not None exactly in HOST, FETCHING and FLUSHING.
2. A pinned or dirty block is never evicted; a FETCHING or FLUSHING one is settled first.
3. What is in flight is one value: the ticket, beside the memory it fills or drains.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from tiered.device.buffer import Buffer
from tiered.device.ticket import Ticket
from tiered.errors import StorageError
from tiered.io.swapfile import Extent
from tiered.store.tier import Tier


class BlockState(enum.Enum):
    """Where the current contents of a block are."""

    NVME = "nvme"
    FETCHING = "fetching"
    HOST = "host"
    FLUSHING = "flushing"
    FAILED = "failed"


_LEGAL = {
    (BlockState.NVME, BlockState.FETCHING),
    (BlockState.NVME, BlockState.HOST),
    (BlockState.FETCHING, BlockState.HOST),
    (BlockState.HOST, BlockState.FLUSHING),
    (BlockState.HOST, BlockState.NVME),
    (BlockState.FLUSHING, BlockState.HOST),
    *((state, BlockState.FAILED) for state in BlockState if state is not BlockState.FAILED),
}


@dataclasses.dataclass(frozen=True, slots=True)
class BlockKey:
    """Names a block: the group's index and what kind of bytes it holds."""

    group: int
    kind: str  # "param", "master", "exp_avg", "exp_avg_sq" or "grad"

    def __str__(self) -> str:
        return f"{self.kind} of group {self.group}"

    @property
    def lasts(self) -> bool:
        """What it names is of every step, and not of one that is not over."""
        return self.kind != "grad"


class Block:
    """One block's record; the store is the only one to change it."""

    __slots__ = (
        *("_state", "cause", "dirty", "extent", "home", "key", "memory", "nbytes", "next_use", "pins", "ticket"),
        *("unwanted", "update"),
    )

    def __init__(self, key: BlockKey, nbytes: int, home: Tier, extent: Extent | None) -> None:
        self.key = key
        self.nbytes = nbytes
        self.home = home
        self.extent = extent  # None for a block that never leaves the host
        self.memory: Buffer | None = None  # Memory, unless it is a device's own
        self.ticket: Ticket | None = None
        self.cause: BaseException | None = None
        self.pins = 0
        self.dirty = False
        self.next_use = 0  # larger is later; a hint for eviction
        self.update: Callable[[], None] | None = None  # brings its contents up to date; None where they are
        self.unwanted = False  # its contents, once what needs them is over
        self._state = BlockState.NVME

    @property
    def state(self) -> BlockState:
        """The block's state; changed by `move` alone."""
        return self._state

    def move(self, state: BlockState) -> None:
        """Change the state. Raises RuntimeError on a change the diagram does not show."""
        if (self._state, state) not in _LEGAL:
            raise RuntimeError(f"{self.key}: illegal change of state {self._state.name} -> {state.name}")
        self._state = state

    @property
    def place(self) -> Extent:
        """Its extent. Raises RuntimeError where it has none."""
        if self.extent is None:
            raise RuntimeError(f"{self.key} lives on the {self.home.value}: it has no extent on a drive")
        return self.extent

    @property
    def lasts(self) -> bool:
        """It is part of what is committed."""
        return self.home is Tier.NVME and self.key.lasts

    @property
    def evictable(self) -> bool:
        """It is in memory, and may go back to its drive."""
        there = self.home is Tier.NVME and self._state is not BlockState.FAILED and self.memory is not None
        return there and not self.pins and not (self.memory is not None and self.memory.exported())

    def check(self) -> None:
        """Bring the contents up to date where they are not. Raises the first cause if the block has failed."""
        if self.update is not None:
            self.update()
        if self._state is BlockState.FAILED:
            cause = self.cause
            if isinstance(cause, StorageError):  # the same kind again, with its errno and file
                raise type(cause)(cause.errno, f"{self.key} was lost: {cause.strerror}", cause.filename) from cause
            raise StorageError(f"{self.key} was lost: {cause!r}") from cause

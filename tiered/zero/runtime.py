"""What one sharded model runs on: its device, store, budget and ranks, made once and passed down."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tiered.device.base import Device
from tiered.device.buffer import Buffer
from tiered.device.memory import page_ceil
from tiered.stats import Meter
from tiered.store.store import TieredStore
from tiered.store.tier import Budget
from tiered.zero.collectives import Ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The resources of one sharded model on this rank."""

    device: Device
    store: TieredStore
    budget: Budget  # of the device: gathered parameters
    meter: Meter
    ranks: Ranks

    @property
    def in_place(self) -> bool:
        """A group's shard on the host is the gathered group itself: no copy between the two."""
        return self.device.in_place and self.ranks.size == 1

    @contextlib.contextmanager
    def loan(self, nbytes: int, what: str) -> Iterator[Buffer]:
        """Device memory for the time of the block. Raises BudgetError where the device budget has no room."""
        self.budget.charge(page_ceil(nbytes), what)
        buffer = self.device.allocate(nbytes)
        try:
            self.device.commit(buffer)
            yield buffer
        finally:
            self.device.release(buffer)
            self.budget.refund(page_ceil(nbytes))

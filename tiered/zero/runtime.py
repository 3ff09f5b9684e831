"""What one sharded model runs on: its device, store, budget and ranks, made once and passed down."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from tiered.device.base import Device
from tiered.device.buffer import Buffer
from tiered.device.memory import page_ceil
from tiered.stats import Meter
from tiered.store.store import TieredStore
from tiered.store.tier import Budget
from tiered.zero.agreement import Call
from tiered.zero.collectives import Ranks
from tiered.zero.traffic import Traffic

T = TypeVar("T")
_FIRST_STAGE = {"param": 3, "grad": 2}  # that partitions a kind; optimizer states are partitioned in every stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The resources of one sharded model on this rank."""

    device: Device
    store: TieredStore
    budget: Budget  # of the device: gathered parameters
    meter: Meter
    ranks: Ranks
    stage: int
    traffic: Traffic | None = None  # of several ranks

    @property
    def several(self) -> bool:
        """There are several ranks."""
        return self.traffic is not None

    def partitions(self, kind: str) -> bool:
        """Each rank has its shard of a kind of state, rather than the whole of every group."""
        return partitions(kind, self.stage, self.ranks.size)

    @property
    def in_place(self) -> bool:
        """A group's param block on the host is the gathered group itself: no copy between the two."""
        return self.device.in_place and not self.partitions("param")

    def check(self) -> None:
        """Raise RankError where another rank has been lost."""
        if self.traffic is not None:
            self.traffic.exchange.check()

    def together(self, call: Call, doing: str, action: Callable[[], T], *, detail: int = 0, closes: bool = False) -> T:
        """Run `action`, with several ranks once all of them have made the same call: see `zero.exchange`."""
        if self.traffic is None:
            return action()
        return self.traffic.exchange.together(call, doing, action, detail=detail, closes=closes)

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


def partitions(kind: str, stage: int, ranks: int) -> bool:
    """Whether `stage` partitions a kind of state over `ranks`."""
    return ranks > 1 and stage >= _FIRST_STAGE.get(kind, 1)

"""Tiers and budgets: the places bytes can live, and the account of each.

Invariant: `used` never exceeds `limit`; a charge that would is refused before anything is allocated.
"""

from __future__ import annotations

import enum
import threading

from tiered.config import format_size
from tiered.errors import BudgetError


class Tier(enum.Enum):
    """A place where bytes live, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Budget:
    """The account of one tier, in bytes. Thread-safe."""

    def __init__(self, tier: Tier, limit: int) -> None:
        self.tier = tier
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that can still be charged."""
        return self.limit - self.used

    def charge(self, nbytes: int, what: str) -> None:
        """Take `nbytes` for `what`. Raises BudgetError, with nothing taken, where they are not free."""
        with self._lock:
            if nbytes > self.limit - self.used:
                raise BudgetError(
                    f"{what} needs {format_size(nbytes)} of {self.tier.value} memory, but only "
                    f"{format_size(self.limit - self.used)} of {self.tier.value}_budget={format_size(self.limit)} "
                    f"is free: raise {self.tier.value}_budget to at least {self.used + nbytes} bytes, or hold fewer "
                    f"parameters at once"
                )
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    def refund(self, nbytes: int) -> None:
        """Give back `nbytes` charged before."""
        with self._lock:
            self.used -= nbytes

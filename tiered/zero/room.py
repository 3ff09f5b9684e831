"""DeviceRoom: the bytes of a device that groups may take, given what else is there.

    device budget  =  groups that stay for good  +  groups that move  +  activations

"Activations" is whatever the process holds on the device beside this package's own bytes: activations, temporaries,
gradients, inputs. They are measured rather than asked for: at each use of a group, what the device says is allocated,
less what every budget on it is charged with. Between two uses the charge is constant, so a new peak of the whole is a
new peak of the rest.

Invariants:
1. `activations` never shrinks, so that what is kept on the device between uses leaves room for what was needed before.
2. Until a first step has been seen, all but `least` is left to them: nothing is kept that would have to go again.
3. On a device that measures nothing they are 0.
"""

from __future__ import annotations

import logging
import weakref

from tiered.config import format_size
from tiered.device.base import Device
from tiered.store.tier import Budget

_budgets: weakref.WeakSet[Budget] = weakref.WeakSet()  # of every live model; a process computes on one device


class DeviceRoom:
    """See the file's contract, and `schedule.execute.Room`."""

    def __init__(self, device: Device, budget: Budget, least: int, *, given: bool) -> None:
        """`least`: bytes that moving groups need at once; `given`: the budget is the user's, not what others have left
        free. What is charged to the budget now stays for good."""
        self.activations = 0
        self.learnt = False
        self._device = device
        self._budget = budget
        self._least = least
        self._staying = budget.used
        self._before = 0  # bytes that others held when the budget was made of what they had left free
        self._peak = (device.allocated() or (0, 0))[1]
        self._told = False
        _budgets.add(budget)
        if not given and (held := device.allocated()) is not None:
            self._before = max(0, held[0] - sum(each.used for each in _budgets))

    def capacity(self) -> int:
        return self._budget.limit - self._staying - self._left()

    def free(self) -> int:
        return self._budget.free - self._left()

    def observe(self) -> None:
        if (measured := self._device.allocated()) is not None:
            now, peak = measured
            ours = sum(budget.used for budget in _budgets) + self._before
            self.activations = max(self.activations, now - ours, peak - ours if peak > self._peak else 0)
            self._peak = peak

    def stepped(self) -> None:
        """A step is over: what it needed is known. Warns once where it does not fit beside what groups need."""
        if self._device.allocated() is None:
            return
        self.observe()
        self.learnt = True
        if self.activations + self._staying + self._least > self._budget.limit and not self._told:
            self._told = True
            logging.getLogger("tiered").warning(
                "activations and temporaries took %s on the device, and groups need %s at once: that is more than "
                "device_budget=%s. Use a smaller batch, activation checkpointing, or smaller groups",
                format_size(self.activations),
                format_size(self._least + self._staying),
                format_size(self._budget.limit),
            )

    def spare(self, margin: float) -> int:
        """Bytes that more groups could take for good, beside two windows of moving groups and `margin` times the
        activations; none until a step has been measured."""
        if not self.learnt:
            return 0
        return max(0, self._budget.limit - self._staying - 2 * self._least - int(margin * self.activations))

    def stays(self, nbytes: int) -> None:
        """`nbytes` more of the budget's charge stay for good."""
        self._staying += nbytes

    def leave(self) -> None:
        """The model is closed: its budget counts no more."""
        _budgets.discard(self._budget)

    def _left(self) -> int:
        """Bytes left to activations."""
        if self.learnt or self._device.allocated() is None:
            return self.activations
        return max(0, self._budget.limit - self._staying - 2 * self._least)

"""ResidentGrads: gradients of a group that lives wholly on a device of its own memory; they never leave it.

Invariants: those of `zero.grads`, but that sums of squares are the optimizer's, which measures on the device; nothing
here makes the host wait for the device.
"""

from __future__ import annotations

import torch

from tiered.zero import residence
from tiered.zero.grads import GroupGrads


class ResidentGrads(GroupGrads):
    """See the file's contract."""

    @torch.no_grad()
    def take(self, position: int, flat: torch.Tensor) -> None:
        target = self._slice(position)
        if self.present[position]:
            target.add_(flat)
        else:
            target.copy_(flat)
        self.present[position] = True

    def add(self, position: int, flat: torch.Tensor) -> None:
        self.take(position, flat.to(self.group.runtime.device.torch_device))

    def view(self, position: int) -> torch.Tensor | None:
        if not self.present[position]:
            return None
        return self._slice(position).view(self.group.spec.slots[position].shape)

    def replace(self, position: int, grad: torch.Tensor | None) -> None:
        self.present[position] = False
        if grad is None:
            if not any(self.present) and "grad" in self.group.blocks:
                residence.renew_if_viewed(self.group, "grad")
        else:
            self.take(position, grad.detach().reshape(-1).to(self.group.runtime.device.torch_device))

    @torch.no_grad()
    def zero(self, position: int) -> None:
        if self.present[position]:
            self._slice(position).zero_()

    def _slice(self, position: int) -> torch.Tensor:
        slot = self.group.spec.slots[position]
        return self.group.on_device("grad", self.dtype)[slot.start : slot.stop]

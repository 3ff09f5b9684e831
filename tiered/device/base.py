"""The interface every device fills.

A device buffer has one storage for life, so tensors (and what autograd saved of them) stay valid objects while its
contents come and go. Copies are asynchronous and run in order per direction; a ticket stands for each.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tiered.device.memory import Memory
from tiered.device.ticket import Ticket


class Device(Protocol):
    """Where gathered parameters live."""

    name: str
    torch_device: torch.device
    in_place: bool
    """Device memory is host memory: what lies on the host can compute there, without a copy."""

    def allocate(self, nbytes: int) -> Memory:
        """A reserved buffer of `nbytes` on the device, without pages yet."""

    def release(self, buffer: Memory) -> None:
        """Give up the buffer's contents and pages; it can be committed again."""

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Copy host `source` to device `destination`, same shape and dtype; both stay alive until it is done."""

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Copy device `source` to host `destination` (same shape and dtype)."""

    def close(self) -> None:
        """Wait for what is in flight and stop the device's threads; idempotent."""

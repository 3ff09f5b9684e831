"""The CPU as a device: gathered parameters are host memory, and a copy is a memcpy on the caller's thread."""

from __future__ import annotations

import torch

from tiered.device.memory import Memory
from tiered.device.ticket import Finished, Ticket


class CpuDevice:
    """See `device.base.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    in_place = True

    def allocate(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def release(self, buffer: Memory) -> None:
        buffer.decommit()

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        destination.copy_(source)
        return Finished()

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        destination.copy_(source)
        return Finished()

    def close(self) -> None:
        return None

"""The CPU as a device: gathered parameters are host memory, and a copy is a memcpy on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiered.device.buffer import Buffer
from tiered.device.host import available_bytes
from tiered.device.memory import Memory
from tiered.device.ticket import Event, Finished


class InHostMemory:
    """What devices have in common whose memory is the host's: nothing to lock, nothing measured, nothing captured."""

    def pin(self, memory: Memory) -> None:
        return None

    def unpin(self, memory: Memory) -> None:
        return None

    def pinned_bytes(self) -> int:
        return 0

    def allocated(self) -> tuple[int, int] | None:
        return None

    def fragmentation_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return available_bytes()

    def check_usable(self) -> None:
        return None


class CpuDevice(InHostMemory):
    """See `device.base.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    in_place = True

    def allocate(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def commit(self, buffer: Buffer) -> None:
        if isinstance(buffer, Memory):
            buffer.commit()

    def release(self, buffer: Buffer) -> None:
        buffer.decommit()

    def fence(self) -> Event:
        return Finished()

    def order(self, event: Event) -> None:
        return None  # a copy is over when it has been given

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Event:
        destination.copy_(source)
        return Finished()

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        destination.copy_(source)
        return Finished()

    def communicate(self, work: Callable[[], None], after: Event) -> Event:
        after.wait()
        work()
        return Finished()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        return None

"""The interface every device fills, in the words of streams.

A device computes in the order in which it is given work (its compute stream) and copies beside it, one stream for each
direction. Whoever gives work never waits for it: an `Event` stands for a point in a stream, and `order` makes the
compute stream, not the caller, wait for one. A device knows bytes and tensors, never parameters, files or budgets.

Invariants every device keeps:
1. A buffer's storage is one object for life, so tensors that view it stay valid objects while its contents come and go.
2. `commit` and `release` take effect in the order of the compute stream: work given before a `release` still reads the
   old contents, and a copy into a buffer waits for the point at which it was committed.
3. Copies of one direction happen in order. The host memory a copy reads or fills belongs to it until its event is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tiered.device.buffer import Buffer
from tiered.device.memory import Memory
from tiered.device.ticket import Event


class Device(Protocol):
    """Where gathered parameters live, and how bytes get there."""

    name: str
    torch_device: torch.device
    in_place: bool
    """Device memory is host memory: what lies on the host can compute there, without a copy."""

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` on the device, without memory yet."""

    def commit(self, buffer: Buffer) -> None:
        """Give the buffer memory, its contents undefined. Raises MemoryError where the device has none."""

    def release(self, buffer: Buffer) -> None:
        """Give up the buffer's contents and memory; it can be committed again."""

    def fence(self) -> Event:
        """The point that the compute stream has been given work up to."""

    def order(self, event: Event) -> None:
        """What the compute stream is given from now on waits for `event`; the caller does not."""

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Event:
        """Copy host `source` to device `destination`, same shape and dtype, once `after` (default: `fence()`) is done.

        May be called on any thread.
        """

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy device `source` to host `destination` (same shape and dtype) as the compute stream has left it by now.

        The caller keeps `source` alive until the event is done.
        """

    def communicate(self, work: Callable[[], None], after: Event) -> Event:
        """Give `work`, collectives on the device's memory, to the communication stream, once `after` is done.

        May be called on any thread; `work` is called on that thread.
        """

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with its values on the host, itself where it is there; on return they can be read."""

    def pin(self, memory: Memory) -> None:
        """Page-lock committed host memory, as far as the system allows, so that copies from and to it are asynchronous.

        Nothing where the device gains nothing by it; where locking fails the memory stays usable, only slower."""

    def unpin(self, memory: Memory) -> None:
        """Undo `pin`; nothing where the memory is not pinned. Waits for no copy: the caller has."""

    def pinned_bytes(self) -> int:
        """Host memory that is page-locked now."""

    def allocated(self) -> tuple[int, int] | None:
        """Bytes of the device this process has allocated for tensors: now, and at most so far; None where unknown."""

    def fragmentation_bytes(self) -> int:
        """Bytes of the device that the allocator holds and no tensor has."""

    def free_bytes(self) -> int:
        """Bytes of the device that this process can still take."""

    def check_usable(self) -> None:
        """Raise UsageError where work that moves memory must not be given now (a graph is being captured)."""

    def close(self) -> None:
        """Wait for what is in flight and stop the device's threads; idempotent."""

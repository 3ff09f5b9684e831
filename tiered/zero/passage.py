"""Passage: a group's shard on its way from the store into the group's buffer on the device.

    drive --read--> staging --copy--> buffer      host block --copy--> buffer      drive --read--> buffer (in place)

The host waits for a drive only, and never for a copy: the copy is given to the device by whatever thread the bytes
arrive on, and `arrive` makes the compute stream wait for it. Invariants:
1. The copy waits for the point of the compute stream at which the buffer got its memory.
2. The host block it reads is registered as busy until it is done, and staging goes back when it is done, without
   anybody waiting.
"""

from __future__ import annotations

from tiered.device.buffer import Buffer
from tiered.device.memory import Memory
from tiered.device.ticket import Event, Finished, Ticket, after, settled
from tiered.store.block import Block
from tiered.zero.runtime import Runtime


class Passage:
    """See the file's contract; it has started once it exists."""

    def __init__(self, runtime: Runtime, block: Block, buffer: Buffer, *, hint: bool) -> None:
        """`buffer` has its memory. Raises BudgetError, with nothing started, where there is no room for staging; a
        `hint` waits for none."""
        self._runtime = runtime
        self._block = block
        self._buffer = buffer
        self._staging: Memory | None = None
        self._copy: Event | None = None
        self.issued: Ticket = Finished()
        """Done when the host has done its part."""
        if runtime.in_place:
            self.issued = runtime.store.read(block, host_memory(buffer))
            return
        ready = runtime.device.fence()
        if runtime.store.resident(block):
            source = runtime.store.acquire(block)
            runtime.store.release(block)
            self._upload(source, ready)
            return
        what = f"{block.key} on its way to the device"
        self._staging = staging = runtime.store.staging(block.nbytes, what, hint=hint)
        try:
            self.issued = after(runtime.store.read(block, staging), lambda: self._upload(staging, ready))
        except BaseException:
            runtime.store.unstage(staging)
            raise

    @property
    def copied(self) -> Event:
        """What the device has to do once `issued` is done."""
        return Finished() if self._copy is None else self._copy

    def over(self) -> bool:
        """Whether nothing of it is in flight."""
        return self.issued.done() and (self._copy is None or self._copy.done())

    def settle(self) -> None:
        """Wait until the host has done its part. An interrupt passes."""
        if not self.issued.done():
            with self._runtime.meter.stalled("fetch"):
                settled(self.issued)

    def arrive(self) -> None:
        """Compute given from now on finds the shard in its place. Raises what reading or copying raised."""
        try:
            self.issued.wait()
            if self._copy is not None:
                with self._runtime.meter.stalled("fetch"):  # nothing, on a device that can wait by itself
                    self._runtime.device.order(self._copy)
        finally:
            if self._staging is not None:
                self._runtime.store.retire(self._staging, self._copy or Finished())

    def _upload(self, source: Memory, ready: Event) -> None:
        """Give the device the copy of this rank's shard to its place in the buffer."""
        self._runtime.meter.count("device", written=source.nbytes)
        place = self._buffer.bytes
        if source.nbytes != place.numel():
            start = self._runtime.ranks.rank * source.nbytes
            place = place[start : start + source.nbytes]
        self._copy = self._runtime.device.copy_in(place, source.bytes, ready)
        source.busy(self._copy)


def host_memory(buffer: Buffer) -> Memory:
    """`buffer` as host memory. Raises RuntimeError where it is not."""
    if not isinstance(buffer, Memory):
        raise RuntimeError("this buffer is not in host memory")
    return buffer

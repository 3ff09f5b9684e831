"""A CPU device that behaves like a GPU behind a link: memory of its own, copies and waits on streams of their own.

It exists so that faults of order and lifetime show without a GPU. Invariants:
1. A copy happens on its direction's thread, in order, after a random delay, at the link's speed; a wait between streams
   is another random delay. Reading the destination, or reusing the source, before the event goes wrong visibly.
2. With `poison`, device memory that is released, or committed and not yet filled, reads as NaN in every floating dtype.
   Poison is written in the order of the compute stream, as a GPU's allocator hands memory on in that order.
3. `close` waits for both links and joins their threads.

torch computes on the CPU at once, so the compute stream is `Immediate`: work has happened when it has been given, and
making it wait makes the caller wait. `computing_on` puts another stream in its place, one that computes late.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from tiered.config import Emulation
from tiered.device.buffer import Buffer
from tiered.device.cpu import InHostMemory
from tiered.device.memory import Memory
from tiered.device.streams import Streams
from tiered.device.ticket import Completion, Event, Finished

_POISON = 0xFF  # all bits set is a NaN in fp32, fp16 and bf16


class ComputeStream(Protocol):
    """The stream torch's own work goes to."""

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` after all that was given before."""

    def record(self) -> Event:
        """An event for all that was given."""

    def wait(self, event: Event) -> None:
        """What is given from now on waits for `event`."""

    def took(self, buffer: Buffer) -> None:
        """`buffer` is memory of the device."""


class Immediate:
    """A compute stream without delay; see the file's contract."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return Finished()

    def wait(self, event: Event) -> None:
        event.wait()

    def took(self, buffer: Buffer) -> None:
        return None


_compute: ComputeStream = Immediate()


@contextlib.contextmanager
def computing_on(stream: ComputeStream) -> Iterator[None]:
    """Inside, `stream` is the compute stream of every emulated device of the process."""
    global _compute
    before, _compute = _compute, stream
    try:
        yield
    finally:
        _compute = before


class EmulatedBuffer(Memory):
    """Device memory: it comes and goes in the order of the compute stream, and the host reads and writes it only where
    that stream has come to rest."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._given = False  # whether the stream will have committed it when it has done all it was given

    def take(self) -> bool:
        """Have it committed; False where it is already. Raises MemoryError, or the stream does where it is late."""
        if self._given:
            return False
        self._given = True
        _compute.run(self.commit)
        return True

    def leave(self) -> None:
        """Have it decommitted. Refuses while `exported()`: who views it later views what it is committed for then."""
        if self.exported():
            raise RuntimeError(f"{self.nbytes} bytes of device memory are still viewed by a tensor")
        self._given = False
        _compute.run(self._drop_pages)

    def read(self, out: torch.Tensor, offset: int) -> None:
        _compute.record().wait()
        super().read(out, offset)

    def write(self, data: torch.Tensor, offset: int) -> None:
        _compute.record().wait()
        super().write(data, offset)


class EmulatedDevice(Streams, InHostMemory):
    """See `device.base.Device`."""

    name = "emulated"
    torch_device = torch.device("cpu")
    in_place = False

    def __init__(self, emulation: Emulation) -> None:
        self._poison = emulation.poison
        self._links = (
            Link("h2d", emulation.h2d_bytes_per_s, emulation.max_delay_s, emulation.seed),
            Link("d2h", emulation.d2h_bytes_per_s, emulation.max_delay_s, emulation.seed + 1),
        )
        super().__init__(*self._links, Immediate())
        for link in self._links:  # of a device that nobody closed
            weakref.finalize(self, link.stop).atexit = False

    def allocate(self, nbytes: int) -> EmulatedBuffer:
        buffer = EmulatedBuffer(nbytes)
        _compute.took(buffer)
        return buffer

    def commit(self, buffer: Buffer) -> None:
        if isinstance(buffer, EmulatedBuffer) and buffer.take():  # with poison, once and for life
            self._poisoned(buffer)

    def release(self, buffer: Buffer) -> None:
        if self._poison:
            self._poisoned(buffer)
        elif isinstance(buffer, EmulatedBuffer):
            buffer.leave()

    def fence(self) -> Event:
        return _compute.record()

    def order(self, event: Event) -> None:
        _compute.wait(event)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fence().wait()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # other memory, as the host's is
        with torch.no_grad():
            return host.copy_(tensor)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _poisoned(self, buffer: Buffer) -> None:
        if self._poison:
            _compute.run(lambda: _fill_with_poison(buffer))


def _fill_with_poison(buffer: Buffer) -> None:
    with torch.no_grad():
        buffer.bytes.fill_(_POISON)


class Link:
    """A stream with a thread: work in order, each copy and each wait after a random delay."""

    def __init__(self, name: str, bytes_per_s: float | None, max_delay_s: float, seed: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._error: BaseException | None = None  # of the work since the last event
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tiered-{name}", daemon=True)
        self._thread.start()

    def record(self) -> Event:
        reached = Completion()

        def reach() -> None:
            error, self._error = self._error, None
            reached.finish(error)

        self._queue.put(reach)
        return reached

    def wait(self, event: Event) -> None:
        def hold() -> None:
            self._sleep(0)
            event.wait()

        self._queue.put(hold)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        def move() -> None:
            self._sleep(source.numel() * source.element_size())
            with torch.no_grad():
                destination.copy_(source)

        self._queue.put(move)

    def stop(self) -> None:
        """Let the thread end once its queue is empty."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait for all that was given, and join the thread."""
        if self._thread.is_alive():
            self.stop()
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._error = self._error or error
            del work  # what is done holds no memory

    def _sleep(self, nbytes: int) -> None:
        delay = self._random.uniform(0, self._max_delay_s)
        if self._bytes_per_s is not None:
            delay += nbytes / self._bytes_per_s
        if delay:
            time.sleep(delay)

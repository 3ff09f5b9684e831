"""A CPU device that behaves like a GPU behind a link: separate memory, asynchronous copies, one queue per direction.

It exists so that overlap and lifetime faults show without a GPU. Invariants:
1. A copy happens on the direction's own thread, in order, after a random delay, at the link's speed: reading the
   destination, or reusing the source, before the ticket is done goes wrong visibly.
2. With `poison`, device memory that is released or has not arrived yet reads as NaN in every floating dtype.
3. `close` waits for both queues and joins their threads.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref

import torch

from tiered.config import Emulation
from tiered.device.memory import Memory
from tiered.device.ticket import Completion, Ticket

_POISON = 0xFF  # all bits set is a NaN in fp32, fp16 and bf16


class EmulatedDevice:
    """See `device.base.Device`."""

    name = "emulated"
    torch_device = torch.device("cpu")
    in_place = False

    def __init__(self, emulation: Emulation) -> None:
        self._poison = emulation.poison
        self._in = _Link("h2d", emulation.h2d_bytes_per_s, emulation.max_delay_s, emulation.seed)
        self._out = _Link("d2h", emulation.d2h_bytes_per_s, emulation.max_delay_s, emulation.seed + 1)
        for link in (self._in, self._out):  # of a device that nobody closed
            weakref.finalize(self, link.stop).atexit = False

    def allocate(self, nbytes: int) -> Memory:
        buffer = Memory(nbytes)
        if self._poison:  # stays committed for life: a late reader finds poison, not a fault
            buffer.commit()
            buffer.bytes.fill_(_POISON)
        return buffer

    def release(self, buffer: Memory) -> None:
        if self._poison:
            buffer.bytes.fill_(_POISON)
        else:
            buffer.decommit()

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        return self._in.submit(destination, source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        return self._out.submit(destination, source)

    def close(self) -> None:
        self._in.close()
        self._out.close()


class _Link:
    """One direction: a queue of copies and the thread that performs them."""

    def __init__(self, name: str, bytes_per_s: float | None, max_delay_s: float, seed: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._queue: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, Completion] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tiered-{name}", daemon=True)
        self._thread.start()

    def submit(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        done = Completion()
        self._queue.put((destination, source, done))
        return done

    def stop(self) -> None:
        """Let the thread end once its queue is empty."""
        self._queue.put(None)

    def close(self) -> None:
        if self._thread.is_alive():
            self.stop()
            self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            destination, source, done = job
            error: BaseException | None = None
            try:
                self._sleep(source.numel() * source.element_size())
                with torch.no_grad():
                    destination.copy_(source)
            except BaseException as caught:
                error = caught
            del destination, source, job  # a finished copy holds no memory
            done.finish(error)

    def _sleep(self, nbytes: int) -> None:
        delay = self._random.uniform(0, self._max_delay_s)
        if self._bytes_per_s is not None:
            delay += nbytes / self._bytes_per_s
        if delay:
            time.sleep(delay)

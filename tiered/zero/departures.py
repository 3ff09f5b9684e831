"""Departures: gradients of one model on their way from the device to what they are added to, in order.

Backward gives a gradient and goes on. The device copies it out beside the computation; a thread waits for each copy in
turn, adds it (or, where it landed in its final place, only measures it), and so knows each sum of squares when backward
is over. The thread touches memory and nothing else; blocks, pins and staging are the caller's thread's.

Invariants:
1. Gradients are added in the order in which backward gave them.
2. A gradient's memory on the device is held until its copy is done, its staging and its target's pin until it is
   added.
3. At most `limit` bytes are on their way at once (or one gradient); where the host has no room, earlier ones land
   first.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import weakref

import torch

from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory
from tiered.device.ticket import Completion, Event, settled
from tiered.errors import BudgetError
from tiered.stats import Meter
from tiered.zero.grads import GroupGrads, Kernels
from tiered.zero.runtime import Runtime


@dataclasses.dataclass(slots=True)
class _Departure:
    """A gradient on its way: where it goes, and what must live until it is there."""

    grads: GroupGrads
    position: int
    nbytes: int
    target: torch.Tensor | None  # 1-D, host: what it is added to
    add: bool
    staging: Memory | None  # what carries it, unless it goes to its target directly
    source: torch.Tensor | None  # 1-D, device
    copied: Event
    added: Completion
    total: float = 0.0


class Departures:
    """See the file's contract."""

    def __init__(self, runtime: Runtime, kernels: Kernels, limit: int) -> None:
        self._runtime = runtime
        self._kernels = kernels
        self._limit = limit
        self._bytes = 0
        self._queue: collections.deque[_Departure] = collections.deque()
        self._jobs: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def depart(self, grads: GroupGrads, position: int, flat: torch.Tensor) -> None:
        """Start bringing `flat` (1-D, on the device) to what it is added to."""
        while self._queue and (self._queue[0].added.done() or self._bytes + _nbytes(flat) > self._limit):
            self._land()
        viewed = grads.viewed()
        while True:
            try:
                with uninterrupted():  # a gradient that has begun is always given to the thread
                    departure = self._begin(grads, position, flat)
                    self._bytes += departure.nbytes
                    self._queue.append(departure)
                    self._serve().put(departure)
                break
            except BudgetError:
                if not self._queue:
                    raise
                self._land()
        if viewed:  # somebody has kept a view of p.grad: as in torch, it shows the sum when backward is over
            self.drain()

    def land_one(self) -> bool:
        """Wait for the oldest gradient on its way, which gives its memory back; False where there is none."""
        if not self._queue:
            return False
        self._land()
        return True

    def drain(self) -> None:
        """Wait until every gradient on its way has been added; raises the first failure, after all have landed."""
        failure: BaseException | None = None
        while self._queue:
            try:
                self._land()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Wait for every gradient on its way, and forget failures."""
        while self._queue:
            try:
                self._land()
            except Exception:
                continue

    def close(self) -> None:
        """End the thread, which first adds what is still on its way; idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    # --- inside ---

    def _begin(self, grads: GroupGrads, position: int, flat: torch.Tensor) -> _Departure:
        runtime = self._runtime
        target, add = grads.begin(position)
        staging: Memory | None = None
        try:
            if add or flat.dtype != target.dtype:
                staging = runtime.store.staging(_nbytes(flat), f"a gradient of group '{grads.group.name}'")
            landing = target if staging is None else staging.view(flat.dtype)
            copied = runtime.device.copy_out(landing, flat)
        except BaseException:
            if staging is not None:
                runtime.store.unstage(staging)
            grads.undo(position, add)
            raise
        runtime.meter.count("device", read=_nbytes(flat))
        if staging is not None:
            staging.busy(copied)
        return _Departure(grads, position, _nbytes(flat), target, add, staging, flat, copied, Completion())

    def _land(self) -> None:
        departure = self._queue[0]
        if not departure.added.done():
            with self._runtime.meter.stalled("gradient"):
                settled(departure.added)
        with uninterrupted():
            self._queue.popleft()
            self._bytes -= departure.nbytes
            if departure.staging is not None:
                self._runtime.store.unstage(departure.staging)
            departure.grads.end(departure.position, departure.total)
        departure.added.wait()

    def _serve(self) -> queue.SimpleQueue[_Departure | None]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_add_each,
                args=(self._jobs, self._kernels, self._runtime.meter),
                name="tiered-gradients",
                daemon=True,
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False  # of a model that nobody closed
        return self._jobs


def _add_each(jobs: queue.SimpleQueue[_Departure | None], kernels: Kernels, meter: Meter) -> None:
    while (job := jobs.get()) is not None:
        error: BaseException | None = None
        try:
            with meter.span(f"gradient of {job.grads.group.name}", "gradient"):
                _add(job, kernels)
        except BaseException as caught:
            error = caught
        job.source = job.target = None  # what is over holds no memory
        added = job.added
        del job
        added.finish(error)


def _add(job: _Departure, kernels: Kernels) -> None:
    job.copied.wait()
    source, job.source = job.source, None
    if job.target is None or source is None:
        raise RuntimeError("a gradient is added twice")
    if job.staging is None:
        job.total = kernels.sum_of_squares(job.target)
    else:
        job.total = kernels.accumulate(job.target, job.staging.view(source.dtype), job.add)


def _nbytes(flat: torch.Tensor) -> int:
    return flat.numel() * flat.element_size()

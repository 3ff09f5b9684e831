"""Outcome: one number on its way from the device to the host, asked for when it is wanted.

Invariants:
1. `send` waits for nothing that was given to the device before it; only `receive` waits, and for this copy alone.
2. One number is on its way at a time. Its host memory is page-locked, so that the copy is asynchronous, and stays until
   the copy is over, also where nobody receives it.
"""

from __future__ import annotations

import collections
import weakref

import torch

from tiered.device.base import Device
from tiered.device.memory import Memory
from tiered.device.ticket import Event, settled


class Outcome:
    """See the file's contract."""

    def __init__(self, device: Device) -> None:
        _free_left()
        self._device = device
        self._host = Memory(torch.float64.itemsize, committed=True)
        self._sent: tuple[Event, torch.Tensor] | None = None  # the copy, and its source, which must outlive it
        device.pin(self._host)
        weakref.finalize(self, _give_back, device, self._host).atexit = False

    def send(self, number: torch.Tensor) -> None:
        """Start copying `number` (() fp64, on the device), as work given by now leaves it."""
        source = number.reshape(1)
        event = self._device.copy_out(self._host.view(torch.float64), source)
        self._host.busy(event)
        self._sent = event, source

    def settle(self) -> None:
        """Wait until the number sent last can be received. An interrupt passes."""
        if self._sent is not None:
            settled(self._sent[0])

    def receive(self) -> float:
        """The number sent last, once. Raises what copying raised, RuntimeError where none was sent."""
        if self._sent is None:
            raise RuntimeError("no number is on its way")
        self._sent[0].wait()
        self._sent = None
        return float(self._host.view(torch.float64).item())


_left: collections.deque[tuple[Device, Memory]] = collections.deque()


def _give_back(device: Device, memory: Memory) -> None:
    """Runs wherever an Outcome is collected, maybe inside `pin` or on the thread that copies: it may neither wait nor
    lock."""
    _left.append((device, memory))


def _free_left() -> None:
    """Unpin what collected Outcomes have left."""
    while _left:
        device, memory = _left.popleft()
        memory.quiet()
        device.unpin(memory)

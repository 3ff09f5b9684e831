"""Streams, and the order between them: what a device of its own memory shares, whatever runs its streams.

    compute   forward and backward, in the order given       (the caller's current stream)
    inward    host to device, each copy after the point of the compute stream at which its destination was committed
    outward   device to host, each copy after the work that made its source
    between   collectives of several devices, each after what it is given on

Every wait between streams that a device needs is issued in this file, so that it is tested on emulated streams and
holds on real ones. Invariant: a copy, or a collective, is given to its stream together with the wait
before it and the event after it, though several threads give them.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from tiered.device.ticket import Event


class Stream(Protocol):
    """Work that happens in the order in which it is given."""

    def record(self) -> Event:
        """An event for all that the stream has been given; its `wait` raises what that raised."""

    def wait(self, event: Event) -> None:
        """What the stream is given from now on waits for `event`."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `destination`, same shape and dtype; one of them on the host."""


class WorkStream(Protocol):
    """A stream that torch's own calls are given to."""

    def record(self) -> Event:
        """See `Stream`."""

    def wait(self, event: Event) -> None:
        """See `Stream`."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`; what it gives to the device goes to this stream."""


class Streams(abc.ABC):
    """The streams of a device and the waits between them."""

    def __init__(self, inward: Stream, outward: Stream, between: WorkStream) -> None:
        self._inward, self._outward, self._between = inward, outward, between
        self._giving_in, self._giving_out = threading.Lock(), threading.Lock()
        self._giving_between = threading.Lock()

    @abc.abstractmethod
    def fence(self) -> Event:
        """See `device.base.Device`."""

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Event:
        """See `device.base.Device`."""
        after = self.fence() if after is None else after
        with self._giving_in:
            self._inward.wait(after)
            self._inward.copy(destination, source)
            return self._inward.record()

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """See `device.base.Device`."""
        after = self.fence()
        with self._giving_out:
            self._outward.wait(after)
            self._outward.copy(destination, source)
            return self._outward.record()

    def communicate(self, work: Callable[[], None], after: Event) -> Event:
        """See `device.base.Device`."""
        with self._giving_between:
            self._between.wait(after)
            self._between.run(work)
            return self._between.record()

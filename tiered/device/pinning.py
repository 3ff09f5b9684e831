"""Pinning: which host memory is page-locked, registered with a device's driver, and where a copy has to be cut.

A driver may lock less than is asked for. What it refuses is tried in smaller pieces; what it refuses then stays
pageable, works as before, only slower, and is named in one warning per process.

Invariants:
1. Registrations never overlap, cover whole pages of one memory each, and end before the memory's pages are unmapped,
   also where the memory is collected without `unpin`.
2. Each range that `pieces` gives lies wholly inside one registration or wholly outside all of them: drivers refuse a
   copy that spans two.
3. `pin` never raises for a refusal; it locks nothing where the machine or its control group has too little memory left.
4. RLIMIT_MEMLOCK refuses nothing here: most drivers do not charge to it. Where a driver does, it is the one to refuse.

Thread-safe. `pieces` takes no lock: it runs for every copy, and must not wait for a registration (about 0.3 s a GiB).
Leaves to whom: that no copy uses memory that is unpinned, to the caller; how much is pinned, to the host budget.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import logging
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tiered.config import format_size
from tiered.device.host import available_bytes, cgroup_limit
from tiered.device.memory import Memory, page_ceil

_LEAST_PIECE = 64 << 20  # bytes: below this, the copies a piece is cut into cost more than locking it gains
_LOGGER = logging.getLogger("tiered")
_warned = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Ranges:
    """Address ranges [start, stop), sorted; replaced as a whole, so that readers need no lock."""

    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def whole(self, start: int, stop: int) -> bool:
        """[start, stop) lies inside one range, or outside all."""
        index = bisect.bisect_right(self.starts, start)
        if index and start < self.stops[index - 1]:
            return stop <= self.stops[index - 1]
        return index == len(self.starts) or stop <= self.starts[index]

    def cuts(self, start: int, stop: int) -> list[int]:
        """The ends of ranges that lie strictly inside [start, stop), ascending."""
        low, high = bisect.bisect_right(self.stops, start), bisect.bisect_left(self.starts, stop)
        ends = {*self.starts[low:high], *self.stops[low:high]}
        return sorted(end for end in ends if start < end < stop)


class Pinning:
    """See the file's contract."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], None]) -> None:
        """`register(address, nbytes)` locks a range, or is refused (False); `unregister(address)` undoes it."""
        self._register = register
        self._unregister = unregister
        self._lock = threading.RLock()  # a collection inside may come back to unpin
        self._ranges = _Ranges()
        self._pinned: dict[int, tuple[list[tuple[int, int]], weakref.finalize[Any, Memory]]] = {}  # by address
        self._collected: collections.deque[int] = collections.deque()  # addresses of memories that went without `unpin`

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked now."""
        self._forget_collected()
        ranges = self._ranges
        return sum(ranges.stops) - sum(ranges.starts)

    def pin(self, memory: Memory) -> None:
        """Page-lock the whole pages of `memory`, which is committed, as far as that is possible; see the contract."""
        asked = page_ceil(memory.nbytes)
        with self._lock:
            self._forget_collected_locked()
            if not asked or memory.address in self._pinned:
                return
            found: list[tuple[int, int]] = []
            if asked <= available_bytes():
                self._register_pieces(memory.address, asked, found)
            if found:
                memory.share_with_forks(False)
                gone = weakref.finalize(memory, self._collect, memory.address, [start for start, _ in found])
                gone.atexit = False
                self._pinned[memory.address] = (found, gone)
                self._rebuild()
        pinned = sum(stop - start for start, stop in found)
        if pinned < asked:
            _warn_once(asked, pinned, self.pinned_bytes)

    def unpin(self, memory: Memory) -> None:
        """Undo `pin`; nothing where the memory is not pinned. No copy may use it any more."""
        with self._lock:
            self._forget_collected_locked()
            self._unpin(memory.address)
            memory.share_with_forks(True)

    def pieces(self, host: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Element ranges [start, stop) of a 1-D contiguous host tensor, in order, that one copy each may move."""
        if self._collected:
            self._forget_collected()
        numel, size = host.numel(), host.element_size()
        ranges, address = self._ranges, host.data_ptr()
        if not numel:
            return
        if ranges.whole(address, address + numel * size):
            yield 0, numel
            return
        start = 0
        for cut in ranges.cuts(address, address + numel * size):
            # Cuts are ends of pages, and an element of 2^n bytes at a multiple of its size never lies across one.
            stop, rest = divmod(cut - address, size)
            if rest:
                raise RuntimeError(f"an element of {host.dtype} at {address + stop * size:#x} lies across two pages")
            yield start, stop
            start = stop
        yield start, numel

    def close(self) -> None:
        """Unregister all that is left; idempotent."""
        with self._lock:
            self._forget_collected_locked()
            for address in list(self._pinned):
                self._unpin(address)

    # --- inside ---

    def _register_pieces(self, start: int, nbytes: int, found: list[tuple[int, int]]) -> bool:
        """Register the range, or its halves; False once a piece of the least size is refused: then the driver has
        reached its limit, and each further try would lock and unlock pages for nothing."""
        if self._register(start, nbytes):
            found.append((start, start + nbytes))
            return True
        half = page_ceil(nbytes // 2)
        if half < _LEAST_PIECE:
            return False
        return self._register_pieces(start, half, found) and self._register_pieces(start + half, nbytes - half, found)

    def _unpin(self, address: int) -> None:
        if (pinned := self._pinned.pop(address, None)) is not None:
            ranges, gone = pinned
            self._rebuild()
            if gone.detach() is not None:  # else its memory is being collected on another thread, which unregisters
                for start, _ in ranges:
                    self._unregister(start)

    def _collect(self, address: int, starts: list[int]) -> None:
        """A pinned memory is being collected; runs wherever that happens, so it may not lock."""
        self._collected.append(address)  # before its pages can be unmapped, hence before the address can be another's
        for start in starts:
            self._unregister(start)

    def _forget_collected(self) -> None:
        if self._collected:
            with self._lock:
                self._forget_collected_locked()

    def _forget_collected_locked(self) -> None:
        while self._collected:
            self._pinned.pop(self._collected.popleft(), None)
            self._rebuild()

    def _rebuild(self) -> None:
        found = sorted(each for ranges, _ in list(self._pinned.values()) for each in ranges)
        self._ranges = _Ranges(tuple(start for start, _ in found), tuple(stop for _, stop in found))


def _warn_once(asked: int, pinned: int, total: int) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limits = f"RLIMIT_MEMLOCK is {'unlimited' if soft == resource.RLIM_INFINITY else format_size(soft)}"
    group = cgroup_limit()
    if group is not None:
        limits += f", the control group's memory limit {format_size(group)}"
    _LOGGER.warning(
        "page-locked only %s of %s of host memory (%s in all; %s; %s available): copies of the rest are slower."
        " Raise the limit ('ulimit -l unlimited', or memlock in limits.conf or the container's settings), or lower "
        "host_budget. Said once",
        format_size(pinned),
        format_size(asked),
        format_size(total),
        limits,
        format_size(available_bytes()),
    )

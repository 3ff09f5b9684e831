"""Drives that fail: what a test says becomes of each read and write, the same for both I/O engines.

    with bad_drives() as drives:                 # before the swap space is opened
        ...
        drives.rule = lambda call: Error(errno.EIO) if call.offset == 4096 else None

The native engine makes its system calls through three pointers (csrc/file.h), the portable one through the files that
aiofiles gives it; both are led to `BadDrives.move`. A rule sees each call before it is made, on the thread that makes
it, and gives what becomes of it, None for what the system does. A stall keeps that thread, as the system would.

Invariants: 1. without a rule every byte moves as it would. 2. what stalls comes back at the end of the `with`, at the
latest. 3. the pointers are restored, but what they led to stays, for a thread that an engine left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tiered.io import portable


@dataclass(frozen=True)
class Call:
    """One system call: of `nbytes` at `offset` of the file `path`."""

    write: bool
    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Error:
    """It fails."""

    errno: int


@dataclass(frozen=True)
class Short:
    """It moves only `nbytes`, and says so."""

    nbytes: int


@dataclass(frozen=True)
class Torn:
    """A write of which only the first `nbytes` reach the drive, and that says it was whole."""

    nbytes: int


@dataclass(frozen=True)
class Flip:
    """The byte at `at` arrives inverted: in memory of a read, on the drive of a write. None is said."""

    at: int


@dataclass(frozen=True)
class Stall:
    """It does not come back before `until` is set; with an `errno`, it has failed then."""

    until: threading.Event
    errno: int = 0


Effect = Error | Short | Torn | Flip | Stall | None
Rule = Callable[[Call], Effect]


class BadDrives:
    """See the file's contract."""

    def __init__(self) -> None:
        self.rule: Rule = lambda call: None
        self.calls: list[Call] = []
        self._stalls: set[threading.Event] = set()

    def stall(self, errno: int = 0) -> Stall:
        """A stall that ends with the `with` block unless its event is set before."""
        event = threading.Event()
        self._stalls.add(event)
        return Stall(event, errno)

    def release(self) -> None:
        """Lets all that stalls come back, and later calls be made as they would."""
        self.rule = lambda call: None
        for event in self._stalls:
            event.set()

    def move(self, write: bool, descriptor: int, view: memoryview, offset: int) -> int:
        """Makes one call; gives the bytes moved, or raises OSError."""
        call = Call(write, os.readlink(f"/proc/self/fd/{descriptor}"), offset, len(view))
        self.calls.append(call)
        effect = self.rule(call)
        if isinstance(effect, Error):
            raise OSError(effect.errno, os.strerror(effect.errno))
        if isinstance(effect, Stall):
            effect.until.wait()
            if effect.errno:
                raise OSError(effect.errno, os.strerror(effect.errno))
        if isinstance(effect, Short | Torn):
            moved = _move(write, descriptor, view[: effect.nbytes], offset)
            return len(view) if isinstance(effect, Torn) else moved
        if not isinstance(effect, Flip):
            return _move(write, descriptor, view, offset)
        with mmap.mmap(-1, len(view)) as pages:  # aligned, as direct I/O wants it
            if not write:
                _move(write, descriptor, view, offset)
            pages[:] = bytes(view)
            pages[effect.at] ^= 0xFF
            if not write:
                view[:] = pages[:]
                return len(view)
            with memoryview(pages) as changed:
                return _move(write, descriptor, changed, offset)


def _move(write: bool, descriptor: int, view: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [view], offset) if write else os.preadv(descriptor, [view], offset)


class _File:
    """A file of the portable engine, below aiofiles."""

    def __init__(self, file: Any, drives: BadDrives) -> None:
        self._file = file
        self._drives = drives
        self._at = 0

    def seek(self, offset: int) -> int:
        self._at = offset
        return offset

    def readinto(self, view: memoryview) -> int:
        return self._moved(self._drives.move(False, self._file.fileno(), view, self._at))

    def write(self, view: memoryview) -> int:
        return self._moved(self._drives.move(True, self._file.fileno(), view, self._at))

    def _moved(self, nbytes: int) -> int:
        self._at += nbytes
        return nbytes


_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_kept: list[Any] = []  # invariant 3


def _native(drives: BadDrives, write: bool) -> Any:
    def call(descriptor: int, address: int, nbytes: int, offset: int) -> int:
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        try:
            return drives.move(write, descriptor, view, offset)
        except OSError as error:
            return -(error.errno or errno.EIO)

    _kept.append(_CALL(call))
    return _kept[-1]


@contextlib.contextmanager
def _native_led_to(drives: BadDrives) -> Iterator[None]:
    try:
        from tiered import _native as extension
    except ImportError:
        yield
        return
    pointers = (ctypes.c_void_p * 2).from_address(extension.file_calls())
    before = pointers[:]
    pointers[:] = [ctypes.cast(_native(drives, write), ctypes.c_void_p).value for write in (False, True)]
    try:
        yield
    finally:
        pointers[:] = before


@contextlib.contextmanager
def bad_drives() -> Iterator[BadDrives]:
    """Drives that do as they are told while the block lasts; swap spaces are opened inside it, and closed too."""
    drives = BadDrives()
    genuine = portable.aiofiles.open

    async def open_led(*arguments: Any, **settings: Any) -> Any:
        opened = await genuine(*arguments, **settings)
        opened._file = _File(opened._file, drives)
        return opened

    with mock.patch.object(portable.aiofiles, "open", open_led), _native_led_to(drives):
        try:
            yield drives
        finally:
            drives.release()

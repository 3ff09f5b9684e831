"""One drive's swap file: its descriptors, whether it takes direct I/O, and which of its bytes are free.

Invariants:
1. Ranges start at multiples of BLOCK and are whole blocks; live ranges never overlap, free ones never touch.
2. Every byte of the file is preallocated before a range over it is given out, so a write cannot find the drive full
   (but one to blocks that another file has come to share can: share.py).
3. A failed `take` leaves the file as long as it was and the free ranges as they were.
4. `direct` is the outcome of a real direct write and read on this file, not of a flag that was accepted.

Not thread-safe: SwapSpace calls it under its lock. Leaves moving bytes to the engine.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import logging
import mmap
import os
import stat

from tiered.errors import CorruptDataError, StorageError, SwapDirectoryError, SwapFullError
from tiered.io.directory import ClaimedDirectory

BLOCK = 4096  # bytes; the granularity of direct I/O, for memory, offsets and lengths alike
_LOGGER = logging.getLogger("tiered")
_FILE_NAME = "swap"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ZEROS_BYTES = 1 << 20


class Drive:
    """The swap file in one claimed directory, open until `close()`.

    Attributes:
        path: of the file, for messages.
        nbytes: length of the file.
        taken_bytes: of it, in ranges given out.
        buffered_fd, direct_fd: open for reading and writing; direct_fd is -1 where direct I/O does not work.
    """

    def __init__(self, directory: ClaimedDirectory, *, direct: bool = True, existing: bool = False) -> None:
        """Makes the file, or opens the `existing` one, all of it free; `direct=False` leaves direct I/O alone, for an
        engine that cannot use it. Raises OSError where there is no such file."""
        self.path = os.path.join(directory.path, _FILE_NAME)
        self._directory = directory
        self.nbytes = 0
        self.taken_bytes = 0
        self._free: list[tuple[int, int]] = []  # (start, stop) by start
        self._existing = existing
        self.buffered_fd = directory.reopen(_FILE_NAME) if existing else directory.create(_FILE_NAME)
        self.direct_fd = -1
        if existing:
            self.nbytes = _plain_size(self.buffered_fd, self.path) // BLOCK * BLOCK
            self._free = [(0, self.nbytes)] if self.nbytes else []
        if not direct:
            return
        try:
            self.direct_fd = self._open_direct()
        except BaseException:
            os.close(self.buffered_fd)
            raise
        if self.direct_fd < 0:
            _LOGGER.warning("%s takes no direct I/O (O_DIRECT); swapping through the page cache instead", self.path)

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self.direct_fd >= 0

    def reopen(self) -> int:
        """A new descriptor with a file position of its own; the caller closes it."""
        return self._directory.reopen(_FILE_NAME)

    def close(self) -> None:
        """Closes both descriptors; the file itself goes with its directory."""
        os.close(self.buffered_fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)

    def take(self, nbytes: int) -> int:
        """Gives out a range of `nbytes` (a positive multiple of BLOCK) and returns its start.

        The smallest free range that fits, or else the file grows. Raises SwapFullError with the path, the bytes needed
        and the bytes free.
        """
        start = self._reuse(nbytes)
        if start is None:
            start = self._extend(nbytes)
        self.taken_bytes += nbytes
        return start

    def room(self) -> int:
        """Bytes that can still be taken, as far as the drive says."""
        return self._free_bytes() + sum(stop - start for start, stop in self._free)

    def reserve(self, start: int, nbytes: int) -> None:
        """Takes the very range that an existing file has something in. Raises CorruptDataError where it is not free."""
        index = bisect.bisect_right(self._free, (start, self.nbytes)) - 1
        if start % BLOCK or index < 0 or start + nbytes > self._free[index][1]:
            raise CorruptDataError(
                errno.EIO, f"bytes {start} to {start + nbytes} are not there, or are named twice", self.path
            )
        low, high = self._free.pop(index)
        rest = [(low, start), (start + nbytes, high)]
        self._free[index:index] = [(first, last) for first, last in rest if first < last]
        self.taken_bytes += nbytes

    def sync(self) -> None:
        """What has been written is on the drive, whatever its cache and the system's have done. Raises StorageError."""
        try:
            os.fdatasync(self.buffered_fd)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise StorageError(
                error.errno or 0, f"the drive did not take what was written: {reason}", self.path
            ) from error

    def give_back(self, start: int, nbytes: int) -> None:
        """Makes a range from `take` free again and joins it with free neighbours."""
        self.taken_bytes -= nbytes
        stop = start + nbytes
        index = bisect.bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def undo_take(self, start: int, nbytes: int) -> None:
        """`give_back`, and shortens the file by what is free at its end; a drive that refuses keeps its length."""
        self.give_back(start, nbytes)
        start, stop = self._free[-1]
        if stop == self.nbytes:
            with contextlib.suppress(OSError):
                os.ftruncate(self.buffered_fd, start)
                self.nbytes = start
                self._free.pop()

    def _reuse(self, nbytes: int) -> int | None:
        fitting = [(stop - start, start) for start, stop in self._free if stop - start >= nbytes]
        if not fitting:
            return None
        _, start = min(fitting)
        index = bisect.bisect_left(self._free, (start, 0))
        stop = self._free[index][1]
        self._free[index : index + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
        return start

    def _extend(self, nbytes: int) -> int:
        ends_free = bool(self._free) and self._free[-1][1] == self.nbytes
        start = self._free[-1][0] if ends_free else self.nbytes  # a free end, too short alone, is used too
        self._grow(start + nbytes)
        if ends_free:
            self._free.pop()
        return start

    def _grow(self, nbytes: int) -> None:
        needed = nbytes - self.nbytes
        try:
            if (free := self._known_free()) is not None and free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _preallocate(self.buffered_fd, self.nbytes, needed)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.buffered_fd, self.nbytes)  # some file systems keep what they had got so far
            if error.errno not in _FULL:
                reason = os.strerror(error.errno or 0)
                what = f"the swap file cannot grow by {needed} bytes to {nbytes}: {reason}; the drive needs a look"
                raise StorageError(error.errno, what, self.path) from error
            raise SwapFullError(
                error.errno,
                f"no room to grow the swap file by {needed} bytes to {nbytes}: {os.strerror(error.errno or 0)}; "
                f"{self._free_bytes()} bytes are free on the drive: free space there or give another directory",
                self.path,
            ) from error
        self.nbytes = nbytes

    def _known_free(self) -> int | None:
        """Bytes free on the drive; None where it does not say."""
        try:
            status = os.fstatvfs(self.buffered_fd)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize

    def _free_bytes(self) -> int:
        return self._known_free() or 0

    def _open_direct(self) -> int:
        """A descriptor that has carried one block each way, or -1."""
        try:
            descriptor = self._directory.reopen(_FILE_NAME, os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # says nothing about the drive
            return -1
        with mmap.mmap(-1, BLOCK) as block:  # anonymous pages are aligned to BLOCK
            try:
                if self._existing:  # nothing of it is written here
                    os.preadv(descriptor, [block], 0)
                    return descriptor
                works = os.pwrite(descriptor, block, 0) == BLOCK and os.preadv(descriptor, [block], 0) == BLOCK
            except OSError as error:
                works = False
                if self._existing:
                    os.close(descriptor)
                    return -1
                if error.errno == errno.ENOSPC:
                    os.close(descriptor)
                    raise SwapFullError(errno.ENOSPC, "the drive is full; give another directory", self.path) from error
        os.ftruncate(self.buffered_fd, 0)
        if works:
            return descriptor
        os.close(descriptor)
        return -1


def _plain_size(descriptor: int, path: str) -> int:
    """Bytes of a file of one name that is this user's. Raises SwapDirectoryError for any other."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise SwapDirectoryError(errno.EPERM, "it is no plain file of this user with one name, so it is not used", path)
    return status.st_size


def _preallocate(descriptor: int, start: int, nbytes: int) -> None:
    """Room on the drive for every byte of a range; raises OSError. Where the file system cannot reserve any, the C
    library writes to each block instead, and where that does not either it is done here."""
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        zeros = memoryview(bytes(min(_ZEROS_BYTES, nbytes)))
        at, stop = start, start + nbytes
        while at < stop:
            at += os.pwrite(descriptor, zeros[: stop - at], at)

"""The native engine on drives of given speeds, emulated, as few machines have drives that differ."""

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping

_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)


@contextlib.contextmanager
def throttled(speeds: Mapping[str, float]) -> Iterator[None]:
    """Each read and write of a file in a folder of that name comes back when a drive of so many bytes a second, which
    makes one transfer after the other, has made it; spaces are opened and closed inside."""
    from tiered import _native

    lock, free_at = threading.Lock(), dict.fromkeys(speeds, 0.0)

    def led(write: bool) -> object:
        def call(descriptor: int, address: int, nbytes: int, offset: int) -> int:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            name = next(name for name in speeds if f"/{name}/" in path)
            with lock:
                until = free_at[name] = max(free_at[name], time.monotonic()) + nbytes / speeds[name]
            view = (ctypes.c_ubyte * nbytes).from_address(address)
            try:
                moved = (os.pwritev if write else os.preadv)(descriptor, [view], offset)
            except OSError as error:
                return -(error.errno or errno.EIO)
            time.sleep(max(0.0, until - time.monotonic()))
            return moved

        return _CALL(call)

    pointers = (ctypes.c_void_p * 2).from_address(_native.file_calls())  # csrc/file.h: read, write
    before, calls = pointers[:], [led(write) for write in (False, True)]
    pointers[:] = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]
    try:
        yield
    finally:
        pointers[:] = before

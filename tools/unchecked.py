"""The native engine without checksums, to measure what they cost; nothing that moves meanwhile is verified."""

import contextlib
import ctypes
from collections.abc import Iterator


@contextlib.contextmanager
def no_checksums() -> Iterator[None]:
    """The engine's checksum is a function that gives the same for all bytes: any of the C library's will do."""
    from tiered import _native

    pointers = (ctypes.c_void_p * 3).from_address(_native.file_calls())  # csrc/file.h: read, write, checksum
    before = pointers[2]
    pointers[2] = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    try:
        yield
    finally:
        pointers[2] = before

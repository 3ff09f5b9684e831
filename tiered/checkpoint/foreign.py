"""Files that others wrote: opened for reading, and read where a reader says, never beyond their end.

Links are followed, as the caches of model hubs are made of them; what a link leads to must still be a regular file of
the format, and nothing is ever written through one. Read by ordinary reads: a drive that fails gives an error, where
mapped memory would give a signal.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from types import TracebackType
from typing import NoReturn

import torch

from tiered.checkpoint.slices import read_into
from tiered.errors import CorruptDataError, StorageError

_NAME = re.compile(r"[^./\\\0][^/\\\0]*")


class File:
    """One file, open until `close`; use it as a scope, or close it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises StorageError naming the path where it cannot be opened, or is no regular file."""
        self.path = os.fspath(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe never waits
        except OSError as error:
            number = error.errno or 0
            raise StorageError(number, f"cannot be opened: {os.strerror(number)}", self.path) from error
        about = os.fstat(self._descriptor)
        self.nbytes = about.st_size
        self._kept: tuple[int, torch.Tensor] | None = None
        if not stat.S_ISREG(about.st_mode):
            self.close()
            raise StorageError(errno.EINVAL, "is no regular file", self.path)

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises CorruptDataError where the file ends before."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            self.refuse(f"{nbytes} bytes at {offset} reach beyond its {self.nbytes}: is it truncated?")
        out = bytearray(nbytes)
        read_into(memoryview(out), self._descriptor, offset, self.path)
        return bytes(out)

    def fill(self, out: torch.Tensor, offset: int) -> None:
        """Fill `out` (1-D, contiguous, on the CPU) with the bytes from `offset` on."""
        if out.numel():
            read_into(out.view(torch.uint8).numpy().data, self._descriptor, offset, self.path)

    def kept(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes from `offset` on (1-D uint8), kept until others are asked for; for what cannot be read in order."""
        if self._kept is None or self._kept[0] != offset or self._kept[1].numel() != nbytes:
            self._kept = None  # before there are others
            if offset + nbytes > self.nbytes:
                self.refuse(f"{nbytes} bytes at {offset} reach beyond its {self.nbytes}: is it truncated?")
            out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self.fill(out, offset)
            self._kept = (offset, out)
        return self._kept[1]

    def refuse(self, why: str) -> NoReturn:
        """Raises CorruptDataError with the file's path."""
        raise CorruptDataError(0, why, self.path)


def plain_name(name: object) -> bool:
    """Whether it names a file of the folder that it stands in, and no other."""
    return isinstance(name, str) and len(name) < 256 and bool(_NAME.fullmatch(name))

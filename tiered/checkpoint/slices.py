"""The bytes of a checkpoint: data files in the safetensors format, written in one pass and read in pieces.

A file is what safetensors calls one: 8 bytes of length, a JSON header, tensors one after the other; so any tool that
knows the format can look inside. It is written here because the libraries want all tensors of a file in memory at once.
Read are the pieces that the manifest names, by ordinary reads: a drive that fails gives an error, where mapped memory
would give a signal.

Invariants:
1. At most PIECE_BYTES of a file are in memory at once when it is read, and a reader keeps the last piece; what is
   written is the caller's memory.
2. What is read has the hash that was written, or CorruptDataError names the file and the offset.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
import xxhash

from tiered.checkpoint.folder import Folder
from tiered.checkpoint.manifest import PIECE_BYTES, Part, hash_of
from tiered.errors import CorruptDataError, StorageError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Entry(NamedTuple):
    """A tensor of a data file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Writer:
    """Writes one data file: `write` for each entry in the order given, then `finish`."""

    def __init__(
        self, descriptor: int, path: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Owns `descriptor` from now on, also where it raises StorageError; `metadata` goes to the header."""
        self._descriptor = descriptor
        self._path = path
        self._at = 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for entry in entries:
            span = [end, end := end + entry.nbytes]
            header[entry.key] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except BaseException:
            os.close(descriptor)
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._descriptor)

    def write(self, data: Iterable[memoryview]) -> tuple[int, tuple[str, ...]]:
        """Write the next entry, given in pieces of any size. Returns where it starts in the file, and its hashes."""
        offset, hashes, hashing = self._at, [], xxhash.xxh3_64()
        for piece in data:
            while piece:
                room = PIECE_BYTES - (self._at - offset) % PIECE_BYTES
                part, piece = piece[:room], piece[room:]
                hashing.update(part)
                self._put(part)
                if len(part) == room:
                    hashes.append(hashing.hexdigest())
                    hashing.reset()
        if (self._at - offset) % PIECE_BYTES:
            hashes.append(hashing.hexdigest())
        return offset, tuple(hashes)

    def finish(self) -> int:
        """Bring everything to the drive; returns the bytes of the file."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _named(error, "cannot be flushed", self._path) from error
        return self._at

    def _put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            try:
                count = os.write(self._descriptor, left)
            except OSError as error:
                raise _named(error, "cannot be written", self._path) from error
            left, self._at = left[count:], self._at + count


class Reader:
    """Reads ranges of parts; keeps the files it has used open until `close`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None  # windows that straddle pieces ask for one twice

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def windows(
        self, parts: Sequence[Part], dtype: torch.dtype, start: int, stop: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements [start, stop) of a kind, in order: the first one's number, and the values (1-D, of `dtype`), which
        are good until the next."""
        size = dtype.itemsize
        for part in parts:
            low, high = max(part.start, start), min(part.stop, stop)
            if low >= high:
                continue
            total = (part.stop - part.start) * size
            first, last = (low - part.start) * size // PIECE_BYTES, -(-(high - part.start) * size // PIECE_BYTES)
            for number in range(first, last):
                at = number * PIECE_BYTES
                piece = self.piece(part.file, part.offset + at, min(PIECE_BYTES, total - at), part.hashes[number])
                begin = part.start + at // size
                values = piece.view(dtype)
                yield max(low, begin), values[max(low - begin, 0) : high - begin]

    def piece(self, file: str, offset: int, nbytes: int, digest: str) -> torch.Tensor:
        """Bytes of a file (1-D uint8), as they were written; not to be changed."""
        if self._last is not None and self._last[0] == (file, offset) and self._last[1].numel() == nbytes:
            return self._last[1]
        self._last = None  # before there is another one
        if file not in self._open:
            self._open[file] = self._folder.open(file)
        path = str(self._folder.path / file)
        out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        view = out.numpy().data
        read_into(view, self._open[file], offset, path)
        if hash_of(view) != digest:
            raise CorruptDataError(
                errno.EIO, f"the {nbytes} bytes at {offset} are not those that were written (xxh3)", path
            )
        self._last = ((file, offset), out)
        return out


def read_into(view: memoryview, descriptor: int, offset: int, path: str) -> None:
    """Fill `view` with the bytes of a file from `offset` on. Raises StorageError, CorruptDataError where it ends."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise _named(error, "cannot be read", path) from error
        if not count:
            raise CorruptDataError(errno.EIO, f"ends at byte {offset + done}, inside of a piece", path)
        done += count


def _named(error: OSError, what: str, path: str) -> StorageError:
    number = error.errno or 0
    return StorageError(number, f"{what}: {os.strerror(number)}", path)

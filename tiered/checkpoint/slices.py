"""The bytes of a checkpoint: data files in the safetensors format, written in one pass and read in pieces.

A file is what safetensors calls one: 8 bytes of length, a JSON header, tensors one after the other; so any tool that
knows the format can look inside. It is written here because the libraries want all tensors of a file in memory at once.
Read are the pieces that the manifest names, by ordinary reads: a drive that fails gives an error, where mapped memory
would give a signal.

Invariants:
1. At most PIECE_BYTES of a file are in memory at once when it is read: a reader keeps the last pieces. What is written
   is the caller's memory.
2. What is read has the checksum that was written, or CorruptDataError names the file and the offset.
3. No byte of a file is without a tensor: between others there may be tensors of no meaning (`pad`).
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import xxhash

from tiered.checkpoint.folder import Folder
from tiered.checkpoint.manifest import Part
from tiered.checkpoint.spans import GRID_BYTES, PIECE_BYTES, Span
from tiered.errors import CorruptDataError, StorageError
from tiered.store.snapshot import Linked

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


PAD = re.compile(r"pad:[0-9]+")
"""Keys of tensors that only fill a place; a parameter's has two colons."""


def pad(number: int, nbytes: int) -> Entry:
    """The file's tensor `number` of those that only fill a place."""
    return Entry(f"pad:{number}", torch.uint8, (nbytes,))


class Writer:
    """Writes one data file: its entries in the order given, each or several at once by `write` or `link`, then
    `finish`."""

    def __init__(
        self,
        descriptor: int,
        folder: Path,
        name: str,
        entries: Sequence[Entry],
        metadata: Mapping[str, str] | None = None,
        *,
        align: int = 8,
    ) -> None:
        """The file `name` of `folder`. Owns `descriptor` from now on, also where it raises StorageError; `metadata`
        goes to the header. align: what the first entry's place is a multiple of."""
        self._descriptor = descriptor
        self._name = name
        self._path = str(folder / name)
        self._at = 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for entry in entries:
            span = [end, end := end + entry.nbytes]
            header[entry.key] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % align)
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except BaseException:
            os.close(descriptor)
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._descriptor)

    def write(self, data: Iterable[memoryview]) -> Span:
        """Write what comes next, given in pieces of any size."""
        offset, sums, hashing = self._at, [], xxhash.xxh3_64()
        for piece in data:
            while piece:
                room = GRID_BYTES - (self._at - offset) % GRID_BYTES
                part, piece = piece[:room], piece[room:]
                hashing.update(part)
                self._put(part)
                if len(part) == room:
                    sums.append(hashing.hexdigest())
                    hashing.reset()
        if (self._at - offset) % GRID_BYTES:
            sums.append(hashing.hexdigest())
        return Span(self._name, offset, self._at - offset, "xxh3", GRID_BYTES, "".join(sums))

    def link(self, nbytes: int, link: Callable[[int, int], Linked | None]) -> Span | None:
        """Have the next `nbytes` be those of another file, as `link(descriptor, offset)` makes them; None, with nothing
        written, where it gives None."""
        offset = self._at
        try:
            linked = link(self._descriptor, offset)
            if linked is None:
                return None
            self._at = os.lseek(self._descriptor, offset + nbytes, os.SEEK_SET)
        except OSError as error:
            raise _named(error, "cannot share its blocks with the swap file", self._path) from error
        return Span(self._name, offset, nbytes, *linked)

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
        self._kept: dict[tuple[Span, int], torch.Tensor] = {}  # the piece asked for last is the last

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
            grid, at = part.span.piece_bytes, part.at + (low - part.start) * size
            end = at + (high - low) * size
            for number in range(at // grid, -(-end // grid)):
                piece = self.piece(part.span, number)
                base = number * grid
                first = max(at - base, 0)
                yield low + (base + first - at) // size, piece[first : end - base].view(dtype)

    def piece(self, span: Span, number: int) -> torch.Tensor:
        """A piece (1-D uint8), as it was written; not to be changed. Windows on parts of one piece, and on kinds in
        turn, ask for one again and again."""
        out = self._kept.pop((span, number), None)
        if out is None:
            out = self._read(span, number)
        self._kept[span, number] = out
        return out

    def _read(self, span: Span, number: int) -> torch.Tensor:
        offset, nbytes = span.piece(number)
        while self._kept and sum(piece.numel() for piece in self._kept.values()) + nbytes > PIECE_BYTES:
            del self._kept[next(iter(self._kept))]
        if span.file not in self._open:
            self._open[span.file] = self._folder.open(span.file)
        path = str(self._folder.path / span.file)
        out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        view = out.numpy().data
        read_into(view, self._open[span.file], offset, path)
        if not span.right(number, view):
            raise CorruptDataError(
                errno.EIO, f"the {nbytes} bytes at {offset} are not those that were written ({span.check})", path
            )
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

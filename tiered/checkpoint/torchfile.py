"""The file that torch.save writes, out and in a piece at a time: a zip of one pickle and the bytes of each storage.

It is written here because torch wants all tensors in memory at once; torch.load(weights_only=True), with mmap=True or
without, reads what is written. It is read here because torch would have to be trusted with the pickle, and `inert` need
not be.
Invariants:
1. Written values are numbers, texts, None, lists, tuples and dictionaries of them, and tensors; storages are aligned as
   torch aligns them, to 64 bytes.
2. Whatever is read lies within the file, uncompressed, in the machine's byte order, or CorruptDataError names the
   file.
3. A contiguous tensor is read in place. The storage of any other is held whole while it is read.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from tiered.checkpoint import inert
from tiered.checkpoint.boxes import boxes, within
from tiered.checkpoint.foreign import File
from tiered.checkpoint.inert import Name, Record, Unreadable
from tiered.checkpoint.state import Source, a_window

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_TENSOR, _PARAMETER, _SIZE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch.Size"
_KNOWN = {_TENSOR, _PARAMETER, _SIZE, "collections.OrderedDict", *(f"torch.{name}" for name in _STORAGES)}
_ALIGNMENT, _LOCAL_HEADER, _ZIP64_FIELD = 64, 30, 20  # bytes
_LARGEST_PICKLE, _LARGEST, _DIMENSIONS = 1 << 30, 1 << 53, 64


# --- out ---


class _Storage:
    """What a pickle leaves to a file of the zip."""

    def __init__(self, source: Source, key: int) -> None:
        kind = next(name for name, dtype in _STORAGES.items() if dtype == source.dtype)
        self.identity = ("storage", getattr(torch, kind), str(key), "cpu", source.numel)


class _Pickler(pickle.Pickler):
    """Pickles sources as the tensors they will be, and keeps them in order."""

    def __init__(self, out: IO[bytes]) -> None:
        super().__init__(out, protocol=2)
        self.sources: list[Source] = []

    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Source):
            return NotImplemented
        storage = _Storage(value, len(self.sources))
        self.sources.append(value)
        strides = _contiguous(value.shape)
        return torch._utils._rebuild_tensor_v2, (
            storage, 0, value.shape, strides, False, collections.OrderedDict(),
        )  # fmt: skip


def write(descriptor: int, value: Any) -> None:
    """Write `value`, whose tensors are sources, to a file, flushed; owns `descriptor`. Raises OSError."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    with os.fdopen(descriptor, "wb") as out:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, data in (("data.pkl", pickled.getvalue()), (".format_version", b"1"), ("byteorder", b"little")):
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
            window = a_window()
            for key, source in enumerate(pickler.sources):
                with archive.open(_aligned(f"archive/data/{key}", out.tell()), "w", force_zip64=True) as entry:
                    for piece in source.pieces(window):
                        entry.write(piece)
            archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
        out.flush()
        os.fsync(out.fileno())


def _aligned(name: str, at: int) -> zipfile.ZipInfo:
    """An entry of a zip whose header begins at `at`, and whose data are aligned."""
    info = zipfile.ZipInfo(name)
    begin = at + _LOCAL_HEADER + len(name) + _ZIP64_FIELD + 4
    padding = -begin % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # as torch does
    return info


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# --- in ---


class TorchFile:
    """A value that torch.save wrote, at [offset, offset + nbytes) of a file that stays open as long as it is used."""

    def __init__(self, file: File, offset: int = 0, nbytes: int | None = None) -> None:
        """Raises CorruptDataError naming the file."""
        self._file = file
        self._offset = offset
        self._nbytes = file.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or self._nbytes < 0 or offset + self._nbytes > file.nbytes:
            file.refuse(f"{self._nbytes} bytes at {offset} reach beyond its {file.nbytes}: is it truncated?")
        try:
            with zipfile.ZipFile(_View(file, offset, self._nbytes)) as archive:
                entries = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1:
                raise Unreadable("it has no data.pkl")
            prefix = pickles[0].removesuffix("data.pkl")
            self._places = {name.removeprefix(prefix): self._place(info) for name, info in entries.items()}
            if self._small("byteorder", b"little") != b"little":
                raise Unreadable("it is in another byte order")
            start, size = self._places["data.pkl"]
            if size > _LARGEST_PICKLE:
                raise Unreadable(f"its pickle has {size} bytes, at most {_LARGEST_PICKLE} are read")
            plain = inert.read(file.read(start, size), _KNOWN)
            self._done: dict[int, Any] = {}
            self.value = self._with_sources(plain)
            self._done = {}
        except (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, EOFError, ValueError) as error:
            file.refuse(f"not a sound file of torch.save: {error}"[:300])
        except (Unreadable, RecursionError) as error:
            file.refuse(f"not read as a file of torch.save: {error}"[:300])

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Where the bytes of an entry are, and how many."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise Unreadable(f"{info.filename[:100]!r} is compressed")
        header = self._file.read(self._offset + info.header_offset, _LOCAL_HEADER)
        if header[:4] != b"PK\3\4":
            raise Unreadable(f"{info.filename[:100]!r} is not where the file says")
        begin = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", header[26:30]))
        if begin + info.file_size > self._nbytes:
            raise Unreadable(f"{info.filename[:100]!r} reaches beyond the end")
        return self._offset + begin, info.file_size

    def _small(self, name: str, default: bytes) -> bytes:
        start, size = self._places.get(name, (0, 0))
        return self._file.read(start, min(size, 64)) if name in self._places else default

    def _with_sources(self, value: Any, depth: int = 0) -> Any:
        """The value, its tensors as sources."""
        if depth > 16:
            raise Unreadable("it is nested too deeply")
        if id(value) not in self._done:  # once each, however often it is in there
            if isinstance(value, dict):
                self._done[id(value)] = {key: self._with_sources(each, depth + 1) for key, each in value.items()}
            elif isinstance(value, (list, tuple)):
                self._done[id(value)] = type(value)(self._with_sources(each, depth + 1) for each in value)
            elif isinstance(value, Name):
                raise Unreadable(f"it holds {value.text} itself")
            else:
                return self._record(value) if isinstance(value, Record) else value
        return self._done[id(value)]

    def _record(self, record: Record) -> Any:
        if record.name == _PARAMETER and record.arguments and isinstance(record.arguments[0], Record):
            return self._record(record.arguments[0])
        if record.name == _SIZE and len(record.arguments) == 1 and isinstance(record.arguments[0], tuple):
            return record.arguments[0]
        if record.name != _TENSOR or len(record.arguments) < 4:
            raise Unreadable(f"it holds {record.name}")
        return self._source(*record.arguments[:4])

    def _source(self, storage: Any, first: Any, shape: Any, strides: Any) -> Source:
        """A tensor: elements of a storage, the first of them `first`."""
        identity = storage.arguments[0] if isinstance(storage, Record) and storage.name == inert.PERSISTENT else ()
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise Unreadable("a tensor has no storage")
        kind, key = identity[1], identity[2]
        dtype = _STORAGES.get(kind.text.removeprefix("torch.")) if isinstance(kind, Name) else None
        place = self._places.get(f"data/{key}") if isinstance(key, str) else None
        if dtype is None or place is None:
            raise Unreadable("a tensor's storage is not there")
        shape = tuple(shape.arguments[0]) if isinstance(shape, Record) and shape.name == _SIZE else shape
        tuples = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= _DIMENSIONS
        numbers = [first, *shape, *strides] if tuples else [-1]
        if not all(type(n) is int and 0 <= n <= _LARGEST for n in numbers) or math.prod(shape) > _LARGEST:
            raise Unreadable("a tensor's shape or strides are no numbers, or absurd")
        start, nbytes = place
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and (last + 1) * dtype.itemsize > nbytes:
            raise Unreadable("a tensor reaches beyond its storage")
        expected = zip(shape, strides, _contiguous(shape), strict=True)
        if not math.prod(shape) or all(size == 1 or stride == right for size, stride, right in expected):
            return Source(shape, dtype, partial(self._fill, start + first * dtype.itemsize))
        length = (last + 1) * dtype.itemsize
        return Source(shape, dtype, partial(self._fill_strided, start, length, first, shape, strides))

    def _fill(self, offset: int, out: torch.Tensor, start: int) -> None:
        self._file.fill(out, offset + start * out.dtype.itemsize)

    def _fill_strided(
        self,
        offset: int,
        nbytes: int,
        first: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        out: torch.Tensor,
        start: int,
    ) -> None:
        whole = self._file.kept(offset, nbytes).view(out.dtype).as_strided(shape, strides, first)
        origin = tuple(0 for _ in shape)
        at = 0
        for box in boxes(shape, start, start + out.numel()):
            count = math.prod(box[1])
            out[at : at + count].view(box[1]).copy_(whole[within(box, (origin, shape))])
            at += count


class _View(io.RawIOBase):
    """A range of a file as a file of its own, as zipfile wants it."""

    def __init__(self, file: File, offset: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._offset, self._nbytes, self._at = file, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._nbytes - self._at, 0)
        count = left if size is None or size < 0 else min(size, left)
        data = self._file.read(self._offset + self._at, count)
        self._at += count
        return data


def opened_value(path: Path, file: File) -> Mapping[str, Any]:
    """The dictionary in a file of torch.save. Raises CorruptDataError."""
    value = TorchFile(file).value
    if not isinstance(value, dict):
        file.refuse(f"it holds {type(value).__name__}, expected a dictionary")
    return value

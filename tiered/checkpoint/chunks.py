"""What a folder of torch.distributed.checkpoint holds: tensors in chunks and plain values, read without torch.

The metadata are a pickle; `inert` reads it, and nothing it names is made. Invariants:
1. Every name, number and place is checked before the first tensor is read: chunks cover their tensor once, and lie in
   files beside the metadata. What is not so is CorruptDataError with the file.
2. Chunks are boxes of any kind, as shards in several dimensions are; a tensor is read in its own order all the same, a
   window at a time.
Leaves to `dcp` what the names mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiered.checkpoint import inert
from tiered.checkpoint.boxes import Box, boxes, exact, position, shared, within
from tiered.checkpoint.foreign import File, plain_name
from tiered.checkpoint.inert import Name, Record, Unreadable
from tiered.checkpoint.state import Source
from tiered.checkpoint.torchfile import TorchFile

METADATA = ".metadata"
_LARGEST_METADATA, _LARGEST = 1 << 30, 1 << 53

_OF = "torch.distributed.checkpoint.metadata."
_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_KNOWN = {
    *(_OF + name for name in (*_CLASSES, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *_DTYPES,
    _PLACE,
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes that torch.save made of something are."""

    file: File
    offset: int
    nbytes: int

    def read(self) -> Any:
        """A plain value, or a source. Raises CorruptDataError."""
        return TorchFile(self.file, self.offset, self.nbytes).value


class _Chunked:
    """A tensor in chunks."""

    def __init__(self, name: str, dtype: torch.dtype, chunks: Sequence[tuple[Box, Place]]) -> None:
        self._name = name
        self._dtype = dtype
        self._chunks = chunks
        self._read: dict[int, Source] = {}  # by number, what each holds

    def fill(self, shape: tuple[int, ...], out: torch.Tensor, start: int) -> None:
        at = 0
        for box in boxes(shape, start, start + out.numel()):
            into = out[at : at + math.prod(box[1])]
            at += into.numel()
            for number, (chunk, _) in enumerate(self._chunks):
                part = shared(box, chunk)
                if part == box:
                    self._source(number).fill(into, position(box, chunk))
                elif part is not None:  # of a box without gaps in the whole tensor there are none in a chunk's part
                    values = torch.empty(math.prod(part[1]), dtype=self._dtype, device="cpu")
                    self._source(number).fill(values, position(part, chunk))
                    into.view(box[1])[within(part, box)] = values.view(part[1])

    def _source(self, number: int) -> Source:
        if number not in self._read:
            (_, sizes), place = self._chunks[number]
            found = place.read()
            if not isinstance(found, Source) or found.shape != sizes or found.dtype != self._dtype:
                place.file.refuse(f"the chunk of '{self._name}' at {place.offset} is not what the metadata say")
            self._read[number] = found
        return self._read[number]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[dict[str, Source], dict[str, Place]]]:
    """Tensors and plain values by their whole names, to be read inside. Raises StorageError for a file that is missing,
    CorruptDataError for what is not sound."""
    with contextlib.ExitStack() as files:
        metadata = files.enter_context(File(folder / METADATA))
        try:
            tensors, values = _Reading(metadata, folder, files).contents()
        except Unreadable as error:
            metadata.refuse(f"not sound metadata of torch.distributed.checkpoint: {error}"[:500])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            metadata.refuse(
                f"not sound metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}"[:500]
            )
        yield tensors, values


class _Reading:
    """One folder's metadata, doubted in everything."""

    def __init__(self, metadata: File, folder: Path, files: contextlib.ExitStack) -> None:
        if metadata.nbytes > _LARGEST_METADATA:
            raise Unreadable(f"they have {metadata.nbytes} bytes, at most {_LARGEST_METADATA} are read")
        self._fields = _fields(inert.read(metadata.read(0, metadata.nbytes), _KNOWN), "Metadata")
        self._folder = folder
        self._files = files
        self._open: dict[str, File] = {}

    def contents(self) -> tuple[dict[str, Source], dict[str, Place]]:
        """Tensors and plain values."""
        places = {}
        for index, info in self._fields["storage_data"].items():
            about = _fields(index, "MetadataIndex")
            offset = about.get("offset")
            places[about["fqn"], None if offset is None else _sizes(offset)] = self._place(info)
        tensors: dict[str, Source] = {}
        values: dict[str, Place] = {}
        for name, entry in self._fields["state_dict_metadata"].items():
            if isinstance(entry, Record) and entry.name == _OF + "BytesStorageMetadata":
                values[name] = places[name, None]
                continue
            about = _fields(entry, "TensorStorageMetadata")
            shape, dtype = _sizes(about["size"]), _dtype(name, about["properties"])
            chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in about["chunks"]]
            parts = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
            if not exact(shape, parts):
                raise Unreadable(f"the chunks of {name!r} do not cover its shape {shape} once")
            held = [(box, places[name, box[0]]) for box in parts if math.prod(box[1])]
            tensors[name] = Source(shape, dtype, partial(_Chunked(name, dtype, held).fill, shape))
        return tensors, values

    def _place(self, info: Any) -> Place:
        if not isinstance(info, Record) or info.name != _PLACE:
            raise Unreadable("a place is no place")
        name, offset, nbytes = (info.state[field] for field in ("relative_path", "offset", "length"))
        if info.state.get("transform_descriptors"):
            raise Unreadable(f"{name!r} is written by an extension of torch.distributed.checkpoint")
        if not plain_name(name):
            raise Unreadable(f"{name!r} is no name of a file beside them")
        if name not in self._open:
            self._open[name] = self._files.enter_context(File(self._folder / name))
        file = self._open[name]
        if _count(offset) + _count(nbytes) > file.nbytes:
            file.refuse(f"{nbytes} bytes at {offset} reach beyond its {file.nbytes}: is it truncated?")
        return Place(file, offset, nbytes)


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, Record) or record.name != _OF + kind or not isinstance(record.state, dict):
        raise Unreadable(f"there is no {kind} where one must be")
    return record.state


def _dtype(name: str, properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) else None
    kind = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(kind, Name) or kind.text not in _DTYPES:
        raise Unreadable(f"{name!r} has no dtype that is read ({', '.join(_DTYPES)})")
    return _DTYPES[kind.text]


def _sizes(given: Any) -> tuple[int, ...]:
    sizes = given.arguments[0] if isinstance(given, Record) and given.name == "torch.Size" else given
    if not isinstance(sizes, tuple) or len(sizes) > 64:
        raise Unreadable("a shape is no torch.Size")
    if math.prod(_count(size) for size in sizes) > _LARGEST:
        raise Unreadable("a shape is absurd")
    return sizes


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise Unreadable(f"{str(value)[:100]} is no count")
    return value

"""Weights in the layout of Hugging Face: model.safetensors, or shards of it with an index.

    model.safetensors                      everything, where it fits one file
    model-00001-of-00003.safetensors ...   else shards, filled in order of the parameters
    model.safetensors.index.json           then, and only then: which tensor is in which shard

A tied parameter is stored once, under the name it has first; its other names are in the metadata, {other: stored},
where huggingface_hub and safetensors' own load_model look for them.

Reading invariants:
1. Every name, size and offset of every header is checked before the first tensor is read. Tensors fill a file's data
   without gap or overlap, as the format demands; nothing in it is ever executed.
2. A shard is a plain name in the folder of its index. What the index and the shards say differently is
   named, all of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiered.checkpoint import beside
from tiered.checkpoint.foreign import File, plain_name
from tiered.checkpoint.slices import NAMES, Entry, Writer
from tiered.checkpoint.state import Source, State, a_window
from tiered.errors import CorruptDataError, StorageError, UsageError

OWN = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors|model\.safetensors\.index\.json")
"""Names of files that `write` makes."""
INDEX = "model.safetensors.index.json"
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_LARGEST_HEADER = 100_000_000  # bytes, also of an index: the limit of the safetensors library
_LARGEST, _DIMENSIONS = 1 << 53, 64  # elements or bytes; torch's own limit


# --- out ---


def write(folder: Path, state: State, shard_bytes: int) -> None:
    """Write weights to an empty folder, in files of at most `shard_bytes` of data (a larger tensor has its own)."""
    if "__metadata__" in state.weights:
        raise UsageError("a tensor cannot be named '__metadata__' in a safetensors file: give it another name (names)")
    shards: list[dict[str, Source]] = [{}]
    filled = 0
    for name, source in state.weights.items():
        if shards[-1] and filled + source.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = source
        filled += source.nbytes
    count = len(shards)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    )
    window = a_window()
    for file, shard in zip(names, shards, strict=True):
        aliases = {alias: name for alias, name in state.aliases.items() if name in shard}
        entries = [Entry(name, source.dtype, source.shape) for name, source in shard.items()]
        with Writer(beside.create(folder / file), folder, file, entries, aliases) as writer:
            for source in shard.values():
                writer.write(source.pieces(window))
            writer.finish()
    if count > 1:
        total = sum(source.nbytes for source in state.weights.values())
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total, **state.aliases}, "weight_map": weight_map}
        with os.fdopen(beside.create(folder / INDEX), "w") as out:
            json.dump(index, out, indent=2)
            out.flush()
            os.fsync(out.fileno())


# --- in ---


@contextlib.contextmanager
def opened(path: Path) -> Iterator[State]:
    """The weights in a safetensors file, or in a folder of one or of shards, to be read inside.

    Raises StorageError for what is missing, CorruptDataError for what is not sound, UsageError for a dtype that this
    package does not have; each names the file.
    """
    with contextlib.ExitStack() as files:
        file = path if path.is_file() else _only_file(path)
        if file.name.endswith(".json"):
            weights, metadata = _shards(file, files)
        else:
            weights, metadata = header(files.enter_context(File(file)))
        aliases = {alias: name for alias, name in metadata.items() if name in weights and alias not in weights}
        yield State(weights, aliases=aliases)


def _only_file(folder: Path) -> Path:
    """What a folder holds its weights in."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        number = error.errno or 0
        raise StorageError(number, f"cannot be read: {os.strerror(number)}", str(folder)) from error
    if "model.safetensors" in names:
        return folder / "model.safetensors"
    for ending in (".safetensors.index.json", ".safetensors"):
        found = sorted(name for name in names if name.endswith(ending))
        if len(found) == 1:
            return folder / found[0]
        if found:
            raise StorageError(0, f"several files could be meant ({', '.join(found)}): give one", str(folder))
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        raise StorageError(
            0,
            f"no safetensors there; {pickles[0]!r} is a pickle, which is not read: save it as safetensors",
            str(folder),
        )
    raise StorageError(0, "no safetensors there: expected model.safetensors, or its index and shards", str(folder))


def _shards(index: Path, files: contextlib.ExitStack) -> tuple[dict[str, Source], dict[str, str]]:
    with File(index) as file:
        body = _json(file, 0, file.nbytes)
        weight_map = body.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            file.refuse("not a sound index: it has no weight_map")
        bad = sorted({str(name) for name in weight_map.values() if not plain_name(name)})
        if bad:
            file.refuse(f"not a sound index: {bad[0]!r} is no name of a file beside it")
        about = body.get("metadata")
        metadata = {k: v for k, v in about.items() if isinstance(v, str)} if isinstance(about, dict) else {}
    there: dict[str, dict[str, Source]] = {}
    for name in sorted(set(weight_map.values())):
        there[name], more = header(files.enter_context(File(index.parent / name)))
        metadata |= more
    missing = [f"{name} in {file}" for name, file in weight_map.items() if name not in there[file]]
    unexpected = [
        f"{name} in {file}" for file, found in there.items() for name in found if weight_map.get(name) != file
    ]
    if missing or unexpected:
        told = [
            f"{len(m)} {what} ({', '.join(m)})"
            for m, what in ((missing, "missing"), (unexpected, "not in the index"))
            if m
        ]
        raise CorruptDataError(0, f"the index and its shards differ: {'; '.join(told)}", str(index))
    return {name: there[file][name] for name, file in weight_map.items()}, metadata


def header(file: File) -> tuple[dict[str, Source], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata. Raises CorruptDataError, UsageError."""
    length = int.from_bytes(file.read(0, 8), "little") if file.nbytes >= 8 else -1
    if not 2 <= length <= min(_LARGEST_HEADER, file.nbytes - 8):
        file.refuse(f"not a sound safetensors file: {file.nbytes} bytes with a header of {length}: is it truncated?")
    body = _json(file, 8, length)
    metadata = body.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        file.refuse("not a sound safetensors file: its metadata are no texts")
    found = {name: _entry(file, name, entry) for name, entry in body.items()}
    end = 0
    for name, (_, _, begin, stop) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != end:
            file.refuse(f"not a sound safetensors file: {name!r} begins at {begin}, the one before ends at {end}")
        end = stop
    if 8 + length + end != file.nbytes:
        file.refuse(f"not a sound safetensors file: {file.nbytes} bytes, expected {8 + length + end}: is it truncated?")
    return {
        name: Source(shape, dtype, partial(_fill, file, 8 + length + begin))
        for name, (shape, dtype, begin, _) in found.items()
    }, metadata


def _fill(file: File, offset: int, out: torch.Tensor, start: int) -> None:
    file.fill(out, offset + start * out.dtype.itemsize)


def _entry(file: File, name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    """Shape, dtype, and the bytes [begin, stop) of the data."""
    if not isinstance(entry, Mapping) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        file.refuse(f"not a sound safetensors file: {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UsageError(f"'{name}' of {file.path} has dtype {dtype!r}, expected one of {', '.join(sorted(_DTYPES))}")
    sizes = [*shape, *span] if isinstance(shape, list) and isinstance(span, list) and len(span) == 2 else [-1]
    if len(sizes) > _DIMENSIONS + 2 or not all(type(size) is int and 0 <= size <= _LARGEST for size in sizes):
        file.refuse(f"not a sound safetensors file: {name!r} has shape {shape!r} and offsets {span!r}"[:500])
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if span[1] - span[0] != nbytes:
        file.refuse(f"not a sound safetensors file: {name!r} has {span[1] - span[0]} bytes, expected {nbytes}"[:500])
    return tuple(shape), _DTYPES[dtype], span[0], span[1]


def _json(file: File, offset: int, length: int) -> dict[str, Any]:
    if length > _LARGEST_HEADER:
        file.refuse(f"{length} bytes of JSON, at most {_LARGEST_HEADER} are read")
    try:
        body = json.loads(file.read(offset, length), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        file.refuse(f"not sound JSON: {error}"[:500])
    if not isinstance(body, dict):
        file.refuse("not sound JSON: it is no object")
    return body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names come once each; the last one would win silently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found

"""Folders of torch.distributed.checkpoint, out and in a piece at a time, in one process and without a process group.

    __0_0.distcp   one after the other what torch.save makes of each chunk of a tensor, or of a plain value
    .metadata      a pickle: which tensors there are, of which chunks, and where each chunk is

Names are those of FSDP2's users: dcp.load({"model": get_model_state_dict(m), "optim": get_optimizer_state_dict(m, o)}).
Both beginnings may be others; the optimizer's state may also be flattened, which differs in the names of settings only:
they go out under both. The only importer of torch.distributed.checkpoint, and only to write: the classes that the
metadata are made of.

Invariants:
1. A tensor goes out in chunks of at most CHUNK_BYTES; whoever loads it takes what falls into his shard.
2. A tied parameter has all its names, and one copy of its bytes. A parameter in a group that was never updated has
   zeros of no size, as an optimizer that loads expects something of every parameter.
Leaves to `chunks` what a folder holds, and how little of it is to be trusted.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from tiered.checkpoint import adamw, beside, chunks
from tiered.checkpoint.boxes import Box, boxes, position
from tiered.checkpoint.chunks import METADATA, Place
from tiered.checkpoint.spans import PIECE_BYTES
from tiered.checkpoint.state import Source, State
from tiered.errors import UsageError
from tiered.zero.model import STATE_KINDS

CHUNK_BYTES = 2 * PIECE_BYTES
_DATA = "__0_0.distcp"
OWN = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")
"""Names of files that such folders have."""
Keys = tuple[str, str | None]
"""Under which names the model and the optimizer are; "" for names without a beginning, None for no optimizer."""


# --- out ---


class _Out:
    """A data file, as torch.save wants one."""

    def __init__(self, path: Path) -> None:
        self._descriptor = beside.create(path)
        self.at = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                count = os.write(self._descriptor, left)
            except OSError as error:
                self.failure = error  # torch.save says something of its own
                raise
            left, self.at = left[count:], self.at + count
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def __enter__(self) -> _Out:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class _Writing:
    """What a folder will say of its data."""

    def __init__(self, out: _Out) -> None:
        from torch.distributed.checkpoint import metadata
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        self._out = out
        self._of_torch = metadata
        self._info = _StorageInfo
        self.entries: dict[str, Any] = {}
        self.places: dict[Any, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self._zeros: dict[tuple[int, ...], Any] = {}

    def tensor(self, paths: Sequence[tuple[str, ...]], source: Source) -> None:
        """Write a tensor that has each of the names."""
        limit = CHUNK_BYTES // source.dtype.itemsize
        whole: Box = (tuple(0 for _ in source.shape), source.shape)
        written = []
        for box in _chunks(source.shape, limit):
            values = torch.empty(math.prod(box[1]), dtype=source.dtype, device="cpu")
            if values.numel():
                source.fill(values, position(box, whole))
            written.append((box, self._save(values.view(box[1]))))
        self._enter(paths, source.dtype, source.shape, written)

    def zeros(self, path: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """A tensor of zeros, fp32: one element, seen everywhere."""
        if shape not in self._zeros:
            one = torch.zeros((), dtype=torch.float32, device="cpu")
            self._zeros[shape] = self._save(one.expand(shape))
        box = (tuple(0 for _ in shape), shape)
        self._enter([path], torch.float32, shape, [(box, self._zeros[shape])])

    def value(self, paths: Iterable[tuple[str | int, ...]], value: Any) -> None:
        """Write a plain value that has each of the names not taken before."""
        place = self._save(value)
        for path in paths:
            name = _joined(path)
            if name not in self.entries:
                self.entries[name] = self._of_torch.BytesStorageMetadata()
                self.places[self._of_torch.MetadataIndex(name)] = place
                self.paths[name] = path

    def _save(self, value: Any) -> Any:
        at = self._out.at
        try:
            torch.save(value, cast(IO[bytes], self._out))
        except RuntimeError:
            if self._out.failure is not None:
                raise self._out.failure from None
            raise
        return self._info(_DATA, at, self._out.at - at)

    def _enter(
        self,
        paths: Sequence[tuple[str, ...]],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        written: Sequence[tuple[Box, Any]],
    ) -> None:
        of = self._of_torch
        pieces = [of.ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1])) for box, _ in written]
        for path in paths:
            name = _joined(path)
            self.entries[name] = of.TensorStorageMetadata(of.TensorProperties(dtype=dtype), torch.Size(shape), pieces)
            for number, (box, place) in enumerate(written):
                self.places[of.MetadataIndex(name, box[0], number)] = place
            self.paths[name] = path

    def metadata(self) -> bytes:
        made = self._of_torch.Metadata(self.entries, planner_data=self.paths, storage_data=self.places)
        return pickle.dumps(made, protocol=4)


def write(folder: Path, state: State, keys: Keys) -> None:
    """Write weights, and the optimizer's state where there is one, to an empty folder."""
    model, optimizer = keys
    if optimizer is not None and not _apart(model, optimizer):
        raise UsageError(f"keys={keys!r}: names of the model and of the optimizer could not be told apart: give others")
    names: dict[str, list[str]] = {name: [name] for name in state.weights}
    for alias, name in state.aliases.items():
        names[name].append(alias)
    with _Out(folder / _DATA) as out:
        writing = _Writing(out)
        for name, source in state.weights.items():
            writing.tensor([(*_path(model), each) for each in names[name]], source)
        if optimizer is not None and state.groups is not None:
            _write_optimizer(writing, state, _path(optimizer))
    with os.fdopen(beside.create(folder / METADATA), "wb") as file:
        file.write(writing.metadata())
        file.flush()
        os.fsync(file.fileno())


def _apart(model: str, optimizer: str) -> bool:
    """Whether no name begins as the model's do and as the optimizer's."""
    one, other = f"{model}.", f"{optimizer}."
    return optimizer != "" and (model == "" or not (one.startswith(other) or other.startswith(one)))


def _write_optimizer(writing: _Writing, state: State, begin: tuple[str, ...]) -> None:
    groups = adamw.torch_groups(state)
    for name in (name for group in groups for name in group["params"]):
        moments = state.moments.get(name)
        writing.tensor([(*begin, "state", name, "step")], adamw.step_of(moments))
        for number, kind in enumerate(STATE_KINDS):
            if moments is None:
                writing.zeros((*begin, "state", name, kind), state.weights[name].shape)
            else:
                writing.tensor([(*begin, "state", name, kind)], moments.items()[number][1])
    for number, group in enumerate(groups):
        for setting, value in group.items():
            writing.value([(*begin, "param_groups", number, setting)], value)
    for group in groups:  # flattened: of each parameter
        for setting, value in group.items():
            if setting != "params":
                writing.value(((*begin, "param_groups", name, setting) for name in group["params"]), value)


def _chunks(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """A tensor as boxes of at most `limit` elements, whole rows where they fit; an empty one is one box."""
    numel = math.prod(shape)
    if numel <= limit:
        yield tuple(0 for _ in shape), shape
        return
    row = numel
    for size in shape:
        if row <= limit:
            break
        row //= size
    step = limit // row * row
    for start in range(0, numel, step):
        yield from boxes(shape, start, min(start + step, numel))


def _path(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()


def _joined(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


# --- in ---


@contextlib.contextmanager
def opened(folder: Path, keys: Keys) -> Iterator[State]:
    """The state in such a folder, to be read inside. Raises as `chunks.opened`, and UsageError where there is nothing
    under the names given or it is no model's."""
    with chunks.opened(folder) as (tensors, values):
        yield _state(tensors, values, keys, str(folder))


def _state(tensors: Mapping[str, Source], values: Mapping[str, Place], keys: Keys, where: str) -> State:
    model, optimizer = keys
    outside = None if optimizer is None else f"{optimizer}."
    begin = f"{model}." if model else ""
    ours = [name for name in (*tensors, *values) if name.startswith(begin)]
    ours = [name for name in ours if model or outside is None or not name.startswith(outside)]
    weights = {name[len(begin) :]: tensors[name] for name in ours if name in tensors}
    if not weights:
        firsts = sorted({name.split(".")[0] for name in (*tensors, *values)})
        raise UsageError(
            f"{where} has no tensors under {model!r}: its names begin with {', '.join(firsts)}; say which (model_key)"
        )
    if plain := [name for name in ours if name in values and model]:
        raise UsageError(f"{where} has under {model!r} what is no tensor: {', '.join(plain)}")
    if outside is None or not any(name.startswith(outside) for name in (*tensors, *values)):
        return State(weights)
    states: dict[Any, dict[str, Any]] = {}
    for name in (*tensors, *values):
        if name.startswith(f"{outside}state."):
            of, _, kind = name.removeprefix(f"{outside}state.").rpartition(".")
            states.setdefault(of, {})[kind] = tensors[name] if name in tensors else values[name].read()
    groups = [adamw.taken_group(group, where) for group in _groups(tensors, values, f"{outside}param_groups", where)]
    return State(weights, moments=adamw.taken_moments(states, where), groups=groups)


def _groups(
    tensors: Mapping[str, Source], values: Mapping[str, Place], begin: str, where: str
) -> list[Mapping[str, Any]]:
    """Parameter groups, from the list that an optimizer has or from settings flattened by parameter."""
    if begin in values:  # as torch before 2.4 kept the list
        whole = values[begin].read()
        if not isinstance(whole, list) or not all(isinstance(group, dict) and "params" in group for group in whole):
            values[begin].file.refuse(f"{begin!r} is no list of parameter groups")
        return whole
    found: dict[str, dict[str, Any]] = {}
    for name in (*tensors, *values):
        if name.startswith(begin + "."):
            of, _, setting = name.removeprefix(begin + ".").rpartition(".")
            found.setdefault(of, {})[setting] = tensors[name] if name in tensors else values[name].read()
    if listed := [of for of, settings in found.items() if "params" in settings]:  # and maybe flattened beside
        return [found[number] for number in sorted(listed, key=lambda text: (len(text), text))]
    flat: dict[str, dict[str, Any]] = {}
    for of, settings in found.items():
        plain = {k: v.whole().item() if isinstance(v, Source) and v.numel == 1 else v for k, v in settings.items()}
        flat.setdefault(repr(sorted(plain.items(), key=str)), {**plain, "params": []})["params"].append(of)
    return list(flat.values())

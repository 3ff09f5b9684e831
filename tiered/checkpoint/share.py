"""Share: what one rank writes of a checkpoint, and how the shares of all ranks become one manifest.

    taken at one instant, between two steps -> written, on any one thread -> put together, by rank 0

Taking copies what is small and goes on changing; states are read when they are written (`store.snapshot`), so until
then nothing may change them. Invariant: what `write` gives is plain JSON.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiered.checkpoint.common import names_of_parameters
from tiered.checkpoint.manifest import DTYPES, Kind, Lone, Manifest, Part, Stored
from tiered.checkpoint.slices import Entry, Writer
from tiered.errors import UsageError
from tiered.optim.adamw import AdamW
from tiered.store.block import Block
from tiered.store.snapshot import Snapshot
from tiered.zero.model import STATE_KINDS, ShardedModel
from tiered.zero.partition import overlap

Written = dict[str, Any]
"""What one rank says of its file."""


class _State(NamedTuple):
    """Elements [start, stop) of one kind of a parameter, and where they begin in their block."""

    name: str
    kind: str
    dtype: torch.dtype
    start: int
    stop: int
    block: Block
    base: int  # bytes

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


class Share:
    """See the file's contract."""

    def __init__(self, sharded: ShardedModel, optimizer: AdamW | None, lone: Sequence[torch.Tensor]) -> None:
        """`lone`: tensors on the host, beside the states. Raises StorageError where a drive fails."""
        runtime = sharded.runtime
        self._lone = lone
        self._states = list(_owned(sharded, optimizer))
        # the weights themselves compute there: a forward that edits them asks nobody
        bare = [g for g in sharded.groups if not g.nbytes and "master" not in g.blocks]
        self._bare = [(home.name, home.param) for home in sharded.homes if home.group in bare]
        self._versions = self._seen()
        self._snapshot = Snapshot(runtime.store, runtime.device, runtime.meter, (state.block for state in self._states))

    def write(
        self, descriptor: int, folder: Path, name: str, *, alive: Callable[[], None], read: Callable[[], None]
    ) -> Written:
        """Write the file `name` of `folder`, open as `descriptor`, and bring it to the drive. alive: called again and
        again; read: called once the states may change. Raises UsageError where they have changed before."""
        entries = [Entry(f"{s.name}:{s.kind}:{s.start}", s.dtype, (s.stop - s.start,)) for s in self._states]
        entries += [Entry(f"tensor:{n}", torch.uint8, (t.nbytes,)) for n, t in enumerate(self._lone)]
        parts, lone = [], []
        with Writer(descriptor, str(folder / name), entries) as writer:
            for s in self._states:
                offset, hashes = writer.write(self._snapshot.read(s.block, s.base, s.base + s.nbytes))
                parts.append((s.name, s.kind, _name(s.dtype), offset, s.start, s.stop, hashes))
                alive()
            self._check()
            read()
            for tensor in self._lone:
                offset, hashes = writer.write([tensor.reshape(-1).view(torch.uint8).numpy().data])
                lone.append((tuple(tensor.shape), _name(tensor.dtype), offset, tensor.nbytes, hashes))
            return {"file": name, "bytes": writer.finish(), "parts": parts, "tensors": lone}

    def close(self) -> None:
        """It is written, or is not going to be. Idempotent."""
        self._snapshot.close()
        self._states, self._lone, self._bare = [], [], []

    def _seen(self) -> list[int]:
        return [param._version for _, param in self._bare]

    def _check(self) -> None:
        """Raise UsageError where weights have been edited where they compute."""
        changed = [b[0] for b, old, new in zip(self._bare, self._versions, self._seen(), strict=True) if old != new]
        if changed:
            raise UsageError(
                f"parameter '{changed[0]}' was edited in place, inside a forward or a gather(), while it was being "
                f"saved: edit it in gather(..., modify=True), or save without background=True"
            )


def _owned(sharded: ShardedModel, optimizer: AdamW | None) -> Iterator[_State]:
    """What this rank owns, block by block, so that each is read once and from its start to its end."""
    rank = sharded.runtime.ranks.rank
    for group in sharded.groups:
        homes = [group_home for group_home in sharded.homes if group_home.group is group]
        for kind in ("value", *(STATE_KINDS if optimizer is not None else ())):
            block = kind if kind != "value" else "master" if "master" in group.blocks else "param"
            dtype = group.dtype if block == "param" else torch.float32
            for home in homes:
                if kind == "value" or (optimizer is not None and optimizer.updates_of(home)):
                    low, high = overlap(home.slot, *group.spec.shard(rank))
                    base = (low - group.span(block)[0]) * dtype.itemsize
                    start = home.slot.start
                    yield _State(home.name, kind, dtype, low - start, high - start, group.blocks[block], base)


def outline(sharded: ShardedModel, optimizer: AdamW | None, step: int, buffers: Sequence[str]) -> Manifest:
    """The manifest of a checkpoint of the present state, without where anything is. buffers: the names of rank 0's
    first lone tensors."""
    names = names_of_parameters(sharded)
    parameters: dict[str, Stored] = {}
    for home in sharded.homes:
        updates = optimizer.updates_of(home) if optimizer is not None else 0
        parameters[home.name] = Stored(tuple(home.slot.shape), tuple(names[id(home.param)]), updates, {})
    groups, scaler = optimizer.progress() if optimizer is not None else (None, None)
    return Manifest(
        step=step,
        ranks=sharded.runtime.ranks.size,
        files={},
        parameters=parameters,
        groups=groups,
        scaler=scaler,
        extras={},
        tensors=[],
        buffers={name: number for number, name in enumerate(buffers)},
        about=_about(sharded),
    )


def put_together(made: Manifest, extras: Sequence[Any], written: Sequence[Written]) -> Manifest:
    """An outline with what every rank has written; extras: of each rank, its tensors numbered from 0."""
    tensors: list[Lone] = []
    by_rank: dict[str, Any] = {}
    parts: dict[str, dict[str, list[tuple[str, Part]]]] = {}
    for rank, one in enumerate(written):
        first = len(tensors) + (len(made.buffers) if rank == 0 else 0)
        for shape, dtype, offset, nbytes, hashes in one["tensors"]:
            part = Part(one["file"], offset, 0, nbytes, tuple(hashes))
            tensors.append(Lone(tuple(shape), getattr(torch, dtype), part))
        by_rank[str(rank)] = _shifted(extras[rank], first)
        for name, kind, dtype, offset, start, stop, hashes in one["parts"]:
            part = Part(one["file"], offset, start, stop, tuple(hashes))
            parts.setdefault(name, {}).setdefault(kind, []).append((dtype, part))
    parameters = {}
    for name, stored in made.parameters.items():
        kinds = {
            kind: Kind(DTYPES[found[0][0]], tuple(p for _, p in found if p.start < p.stop))
            for kind, found in parts[name].items()
        }
        parameters[name] = dataclasses.replace(stored, kinds=kinds)
    files = {one["file"]: one["bytes"] for one in written}
    return dataclasses.replace(made, files=files, parameters=parameters, extras=by_rank, tensors=tensors)


def _shifted(value: Any, by: int) -> Any:
    """An extra whose tensors are numbered from `by` on."""
    if isinstance(value, list):
        return [_shifted(each, by) for each in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return {"tensor": value["tensor"] + by}
        return {"dict": {k: _shifted(v, by) for k, v in value["dict"].items()}} if "dict" in value else value
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _about(sharded: ShardedModel) -> dict[str, Any]:
    config = {f.name: str(getattr(sharded.config, f.name)) for f in dataclasses.fields(sharded.config)}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "tiered": version("tiered")}
    return {"versions": versions, "config": config}

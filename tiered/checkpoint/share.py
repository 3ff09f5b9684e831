"""Share: what one rank writes of a checkpoint, and how the shares of all ranks become one manifest.

    taken at one instant, between two steps -> written, on any one thread -> put together, by rank 0

Taking copies what is small and goes on changing; states are read when they are written (`store.snapshot`), so until
then nothing may change them. A file has them as the store does, so that a drive's can be linked instead of read:

    header, spaces | pad | parameter | pad | parameter | ... | pad || the next kind of the group ... || buffers, extra
    0              | this rank's shard of one kind of a group      ||
                   `- from a multiple of ALIGN to a multiple of ALIGN

Invariants:
1. What `write` gives is plain JSON.
2. The file is the same to the last byte whether states were linked or read; what differs is how it is checked.
3. Linked is only where there is room for each later write to blocks that are shared then: such a write takes new ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiered.checkpoint.common import names_of_parameters
from tiered.checkpoint.manifest import DTYPES, Kind, Lone, Manifest, Part, Stored
from tiered.checkpoint.slices import Entry, Writer, pad
from tiered.checkpoint.spans import Span
from tiered.errors import UsageError
from tiered.optim.adamw import AdamW
from tiered.store.block import Block
from tiered.store.snapshot import ALIGN, Linked, Snapshot
from tiered.zero.about import about
from tiered.zero.model import STATE_KINDS, ShardedModel
from tiered.zero.partition import overlap

Written = dict[str, Any]
"""What one rank says of its file."""


class _State(NamedTuple):
    """Elements [start, stop) of one kind of a parameter, and where they begin in this rank's shard."""

    name: str
    kind: str
    dtype: torch.dtype
    start: int
    stop: int
    at: int  # bytes

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


class _Shard(NamedTuple):
    """What this rank owns of one kind of a group: bytes of a block, from `start` on; and what is saved of it."""

    block: Block
    start: int
    nbytes: int
    states: list[_State]  # in order; some may be of no elements

    @property
    def empty(self) -> bool:
        return not any(state.nbytes for state in self.states)

    @property
    def rest(self) -> int:
        """Bytes from its end to the next shard in the file."""
        return -self.nbytes % ALIGN

    def entries(self, pads: Iterator[int]) -> Iterator[Entry]:
        at = 0
        for s in self.states:
            if s.nbytes:
                if s.at > at:
                    yield pad(next(pads), s.at - at)
                yield Entry(f"{s.name}:{s.kind}:{s.start}", s.dtype, (s.stop - s.start,))
                at = s.at + s.nbytes
        if at < self.nbytes + self.rest:
            yield pad(next(pads), self.nbytes + self.rest - at)

    def read(self, snapshot: Snapshot, alive: Callable[[], None]) -> Iterator[memoryview]:
        for piece in snapshot.read(self.block, self.start, self.start + self.nbytes):
            yield piece
            alive()
        yield memoryview(bytes(self.rest))

    def link(self, snapshot: Snapshot, descriptor: int, offset: int) -> Linked | None:
        whole = self.nbytes == self.block.nbytes
        return snapshot.link(self.block, descriptor, offset) if whole else None


class Share:
    """See the file's contract."""

    def __init__(self, sharded: ShardedModel, optimizer: AdamW | None, lone: Sequence[torch.Tensor]) -> None:
        """`lone`: tensors on the host, beside the states. Raises StorageError where a drive fails."""
        runtime = sharded.runtime
        self._lone = lone
        self._ranks = runtime.ranks.size
        self._shards = list(_owned(sharded, optimizer))
        # the weights themselves compute there: a forward that edits them asks nobody
        bare = [g for g in sharded.groups if not g.nbytes and "master" not in g.blocks]
        self._bare = [(home.name, home.param) for home in sharded.homes if home.group in bare]
        self._versions = self._seen()
        self._snapshot = Snapshot(runtime.store, runtime.device, runtime.meter, (shard.block for shard in self._shards))

    def write(
        self, descriptor: int, folder: Path, name: str, *, alive: Callable[[], None], read: Callable[[], None]
    ) -> Written:
        """Write the file `name` of `folder`, open as `descriptor`, and bring it to the drive. alive: called again and
        again; read: called once the states may change. Raises UsageError where they have changed before."""
        shards, pads = [shard for shard in self._shards if not shard.empty], itertools.count()
        entries = [entry for shard in shards for entry in shard.entries(pads)]
        entries += [Entry(f"tensor:{n}", torch.uint8, (t.nbytes,)) for n, t in enumerate(self._lone)]
        spans: list[Span] = []
        with Writer(descriptor, folder, name, entries, align=ALIGN) as writer:
            room = self._room(descriptor)
            for shard in shards:
                link = partial(shard.link, self._snapshot)
                linked = writer.link(shard.nbytes + shard.rest, link) if room else None
                spans.append(linked or writer.write(shard.read(self._snapshot, alive)))
                alive()
            self._check()
            read()
            spans += [writer.write([t.reshape(-1).view(torch.uint8).numpy().data]) for t in self._lone]
            nbytes = writer.finish()
        of = {id(shard): number for number, shard in enumerate(shards)}
        parts = [
            (s.name, s.kind, _name(s.dtype), of.get(id(shard), 0), s.at, s.start, s.stop)
            for shard in self._shards
            for s in shard.states
        ]
        lone = [(tuple(t.shape), _name(t.dtype), len(shards) + n, t.nbytes) for n, t in enumerate(self._lone)]
        told = [dataclasses.astuple(span) for span in spans]
        return {"file": name, "bytes": nbytes, "spans": told, "parts": parts, "tensors": lone}

    def close(self) -> None:
        """It is written, or is not going to be. Idempotent."""
        self._snapshot.close()
        self._shards, self._lone, self._bare = [], [], []

    def _room(self, descriptor: int) -> bool:
        """There is room on the file's drive for invariant 3: for what every rank saves, in both its slots."""
        there = os.fstatvfs(descriptor)
        return there.f_bavail * there.f_frsize >= 2 * self._ranks * sum(shard.nbytes for shard in self._shards)

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


def _owned(sharded: ShardedModel, optimizer: AdamW | None) -> Iterator[_Shard]:
    """What this rank owns, block by block, so that each is read once and from its start to its end."""
    rank = sharded.runtime.ranks.rank
    for group in sharded.groups:
        homes = [group_home for group_home in sharded.homes if group_home.group is group]
        first, last = group.spec.shard(rank)
        for kind in ("value", *(STATE_KINDS if optimizer is not None else ())):
            block = kind if kind != "value" else "master" if "master" in group.blocks else "param"
            dtype = group.dtype if block == "param" else torch.float32
            states = []
            for home in homes:
                if kind == "value" or (optimizer is not None and optimizer.updates_of(home)):
                    low, high = overlap(home.slot, first, last)
                    start = home.slot.start
                    states.append(
                        _State(home.name, kind, dtype, low - start, high - start, (low - first) * dtype.itemsize)
                    )
            if states:
                nbytes = (last - first) * dtype.itemsize
                yield _Shard(group.blocks[block], group.base(block) * dtype.itemsize, nbytes, states)


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
        about=about(sharded),
        calls=(optimizer.calls, optimizer.skipped_steps) if optimizer is not None else None,
    )


def put_together(made: Manifest, extras: Sequence[Any], written: Sequence[Written]) -> Manifest:
    """An outline with what every rank has written; extras: of each rank, its tensors numbered from 0."""
    tensors: list[Lone] = []
    by_rank: dict[str, Any] = {}
    parts: dict[str, dict[str, tuple[torch.dtype, list[Part]]]] = {}
    for rank, one in enumerate(written):
        first = len(tensors) + (len(made.buffers) if rank == 0 else 0)
        spans = [Span(*given) for given in one["spans"]]
        for shape, dtype, number, nbytes in one["tensors"]:
            tensors.append(Lone(tuple(shape), getattr(torch, dtype), Part(spans[number], 0, 0, nbytes)))
        by_rank[str(rank)] = _shifted(extras[rank], first)
        for name, kind, dtype, number, at, start, stop in one["parts"]:
            whole = parts.setdefault(name, {}).setdefault(kind, (DTYPES[dtype], []))
            if start < stop:
                whole[1].append(Part(spans[number], at, start, stop))
    parameters = {}
    for name, stored in made.parameters.items():
        kinds = {kind: Kind(dtype, tuple(found)) for kind, (dtype, found) in parts[name].items()}
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

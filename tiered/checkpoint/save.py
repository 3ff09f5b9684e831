"""tiered.save: the training state of a sharded model as a checkpoint.

Each rank writes what it owns, by parameter: its elements of every value and moment, through one window. Then rank 0
collects where everything is and commits the manifest.

Invariants:
1. Nothing of the live run changes: it goes on bit for bit as without the save.
2. A save that fails on any rank raises on every rank, leaves the checkpoint that was there, and the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiered.checkpoint import extra as extras
from tiered.checkpoint.common import names_of_parameters, on_every_rank
from tiered.checkpoint.folder import Folder, newest_first
from tiered.checkpoint.manifest import DTYPES, Kind, Lone, Manifest, Part, Stored
from tiered.checkpoint.slices import Entry, Writer
from tiered.errors import UsageError
from tiered.optim.adamw import AdamW
from tiered.zero.buffers import persistent_buffers
from tiered.zero.group import ParamGroup
from tiered.zero.model import STATE_KINDS, ShardedModel
from tiered.zero.module import sharded_model
from tiered.zero.partition import overlap

Written = dict[str, Any]
"""What one rank tells the others of its file."""


def save(
    model: nn.Module,
    optimizer: AdamW | None,
    path: str | os.PathLike[str],
    extra: Any = None,
    *,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint of `model` and `optimizer` (None: weights only) to the folder `path`; returns its folder.

    It replaces what was there at one instant: killed at any moment, `path` holds the old checkpoint or the new one.
    With `keep`, `path` holds several: the new one goes to `path`/step-<updates>, and all but the newest `keep` are
    removed. extra: what else is to be kept (numbers, strings, None, tensors, lists and dictionaries of them); each
    rank's own. Every rank calls it. Gradients are not saved: call it between `step` and the next backward.

    Raises UsageError for what cannot be saved, StorageError where the folder cannot be written, RankError where other
    ranks do not save, or failed to.
    """
    sharded = sharded_model(model)
    _check(sharded, optimizer, keep)
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> int:
        tensors.append(tensor.detach().cpu().contiguous())
        return len(tensors) - 1

    step = optimizer.updates if optimizer is not None else 0
    target = Path(os.path.abspath(os.fspath(path)))
    folder = Folder(target if keep is None else target / f"step-{step:09d}")
    saving = _Saving(sharded, optimizer, folder)
    told = saving.together(lambda: {"extra": extras.encode(extra, add), "id": saving.begin()})
    drawn = told[0]["id"]
    with saving.undone(drawn):
        buffers = persistent_buffers(model) if saving.rank == 0 else {}
        lone = [buffer.detach().cpu().contiguous() for buffer in buffers.values()]
        written = saving.together(lambda: saving.write(drawn, [*lone, *tensors]))
        made = saving.manifest(step, [one["extra"] for one in told], written, list(buffers))
        saving.together(lambda: saving.commit(drawn, made))
    if keep is not None and saving.rank == 0:
        _keep(target, keep, folder.path.name)
    return folder.path


class _State(NamedTuple):
    """Elements [start, stop) of one kind of a parameter, which one rank writes."""

    name: str
    kind: str
    dtype: torch.dtype
    start: int
    stop: int
    fill: Callable[[torch.Tensor, int], None]  # see `Writer.write`


class _Saving:
    """One save on one rank."""

    def __init__(self, sharded: ShardedModel, optimizer: AdamW | None, folder: Folder) -> None:
        self.sharded = sharded
        self.optimizer = optimizer
        self.folder = folder
        self.ranks = sharded.runtime.ranks
        self.rank = self.ranks.rank

    def together(self, part: Callable[[], Written]) -> list[Written]:
        return on_every_rank(self.sharded, "save()", part, lambda: self.folder.path)

    def begin(self) -> str:
        for group in self.sharded.groups:
            group.absorb()
        return self.folder.begin() if self.rank == 0 else ""

    @contextlib.contextmanager
    def undone(self, drawn: str) -> Iterator[None]:
        """Where the save fails, its data goes."""
        try:
            yield
        except BaseException:
            if self.rank == 0:
                self.folder.drop(drawn)
            raise

    def write(self, drawn: str, tensors: Sequence[torch.Tensor]) -> Written:
        """Write this rank's file."""
        states = list(self._states())
        entries = [Entry(f"{s.name}:{s.kind}:{s.start}", s.dtype, (s.stop - s.start,)) for s in states]
        entries += [Entry(f"tensor:{n}", torch.uint8, (t.nbytes,)) for n, t in enumerate(tensors)]
        name, descriptor = self.folder.file(drawn, self.rank)
        parts, lone = [], []
        with Writer(descriptor, str(self.folder.path / name), entries) as writer:
            for s in states:
                offset, hashes = writer.write((s.stop - s.start) * s.dtype.itemsize, s.fill)
                parts.append((s.name, s.kind, _name(s.dtype), offset, s.start, s.stop, hashes))
                self.sharded.alive("save()")
            for tensor in tensors:
                offset, hashes = writer.write(tensor.nbytes, functools.partial(_copy, tensor))
                lone.append((tuple(tensor.shape), _name(tensor.dtype), offset, tensor.nbytes, hashes))
            return {"file": name, "bytes": writer.finish(), "parts": parts, "tensors": lone}

    def _states(self) -> Iterator[_State]:
        """What this rank owns."""
        for home in self.sharded.homes:
            group, slot = home.group, home.slot
            low, high = overlap(slot, *group.spec.shard(self.rank))
            kinds = {"value": "master" if "master" in group.blocks else "param"}
            if self.optimizer is not None and self.optimizer.updates_of(home):
                kinds |= {kind: kind for kind in STATE_KINDS}
            for kind, block in kinds.items():
                dtype = group.dtype if block == "param" else torch.float32
                base = (low - group.span(block)[0]) * dtype.itemsize
                fill = functools.partial(_load, group, block, base)
                yield _State(home.name, kind, dtype, low - slot.start, high - slot.start, fill)

    def manifest(self, step: int, extra: Sequence[Any], written: Sequence[Written], buffers: Sequence[str]) -> Manifest:
        """What all ranks have written, as one."""
        tensors: list[Lone] = []
        by_rank: dict[str, Any] = {}
        parts: dict[str, dict[str, list[tuple[str, Part]]]] = {}
        for rank, one in enumerate(written):
            first = len(tensors) + (len(buffers) if rank == 0 else 0)
            for shape, dtype, offset, nbytes, hashes in one["tensors"]:
                part = Part(one["file"], offset, 0, nbytes, tuple(hashes))
                tensors.append(Lone(tuple(shape), getattr(torch, dtype), part))
            by_rank[str(rank)] = _shifted(extra[rank], first)
            for name, kind, dtype, offset, start, stop, hashes in one["parts"]:
                part = Part(one["file"], offset, start, stop, tuple(hashes))
                parts.setdefault(name, {}).setdefault(kind, []).append((dtype, part))
        parameters: dict[str, Stored] = {}
        names = names_of_parameters(self.sharded)
        for home in self.sharded.homes:
            kinds = {
                kind: Kind(DTYPES[found[0][0]], tuple(p for _, p in found if p.start < p.stop))
                for kind, found in parts[home.name].items()
            }
            updates = self.optimizer.updates_of(home) if self.optimizer is not None else 0
            parameters[home.name] = Stored(tuple(home.slot.shape), tuple(names[id(home.param)]), updates, kinds)
        groups, scaler = self.optimizer.progress() if self.optimizer is not None else (None, None)
        return Manifest(
            step=step,
            ranks=self.ranks.size,
            files={one["file"]: one["bytes"] for one in written},
            parameters=parameters,
            groups=groups,
            scaler=scaler,
            extras=by_rank,
            tensors=tensors,
            buffers={name: number for number, name in enumerate(buffers)},
            about=_about(self.sharded),
            calls=(self.optimizer.calls, self.optimizer.skipped_steps) if self.optimizer is not None else None,
        )

    def commit(self, drawn: str, made: Manifest) -> Written:
        if self.rank == 0:
            self.folder.commit(drawn, made)
        return {}


def _check(sharded: ShardedModel, optimizer: AdamW | None, keep: int | None) -> None:
    if optimizer is not None and (not isinstance(optimizer, AdamW) or optimizer.model is not sharded):
        raise UsageError("save(): the optimizer is not a tiered.AdamW of this model: give its own, or None for weights")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise UsageError(f"save(keep={keep!r}): give how many checkpoints to keep, 1 or more, or None for one folder")
    if sharded.failure is not None:
        raise UsageError(
            f"save() after a step or load that failed half way ({sharded.failure}): the weights are torn; load "
            f"the last checkpoint"
        )
    for name, module in sharded.module.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"save(): '{name}' has get_extra_state(), which a checkpoint without pickle cannot hold: save it "
                f"yourself, for instance in extra="
            )


def _shifted(value: Any, by: int) -> Any:
    """An extra whose tensors are numbered from `by` on."""
    if isinstance(value, list):
        return [_shifted(each, by) for each in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return {"tensor": value["tensor"] + by}
        return {"dict": {k: _shifted(v, by) for k, v in value["dict"].items()}} if "dict" in value else value
    return value


def _keep(parent: Path, count: int, newest: str) -> None:
    """Remove all checkpoints but the newest `count`. What cannot be removed now is by a later save."""
    for path in newest_first(parent)[count:]:
        if path.name != newest:
            Folder(path).remove()


def _load(group: ParamGroup, block: str, base: int, out: torch.Tensor, at: int) -> None:
    group.runtime.store.load(group.blocks[block], out, base + at)


def _copy(tensor: torch.Tensor, out: torch.Tensor, at: int) -> None:
    out.copy_(tensor.reshape(-1).view(torch.uint8)[at : at + out.numel()])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _about(sharded: ShardedModel) -> dict[str, Any]:
    config = {f.name: str(getattr(sharded.config, f.name)) for f in dataclasses.fields(sharded.config)}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "tiered": version("tiered")}
    return {"versions": versions, "config": config}

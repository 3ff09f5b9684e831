"""tiered.load: a checkpoint into a sharded model, whatever wrote it.

Each rank reads what it owns, or has whole, from whichever files hold it, through one window.

    look    every rank reads the manifest and compares names and shapes        an error here changes nothing
    take    every rank overwrites its values and moments, piece by piece       an error here leaves the model torn
    go on   step counts, hyperparameters, loss scale, buffers; copies on the device are renewed

Invariants:
1. What does not fit is found before anything is touched, and named.
2. After a failure half way no step is taken and nothing is saved, until another load succeeds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiered.checkpoint import extra as extras
from tiered.checkpoint.common import names_of_parameters, on_every_rank
from tiered.checkpoint.folder import Folder, find
from tiered.checkpoint.manifest import Lone, Manifest, Stored
from tiered.checkpoint.slices import Reader
from tiered.errors import UsageError
from tiered.optim.adamw import AdamW
from tiered.zero.buffers import persistent_buffers
from tiered.zero.home import ParamHome
from tiered.zero.model import STATE_KINDS, ShardedModel
from tiered.zero.module import sharded_model
from tiered.zero.partition import overlap

_LOGGER = logging.getLogger("tiered")
_SHOWN = 8  # names in a message


def load(
    model: nn.Module,
    optimizer: AdamW | None,
    path: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
) -> Any:
    """Load a checkpoint, of any number of ranks, stage, tiers, budgets and precision; returns its `extra`.

    path: the folder given to `save`; where it holds several (`keep`), the one committed last. optimizer: None takes the
    values alone. names: for parameters and buffers that are called otherwise in the checkpoint, name here -> name
    there. strict: raise UsageError where a name is missing there or is not used here; without it they are logged, and
    what is missing stays as it is. A trained parameter without moments in the checkpoint begins with fresh ones.

    Every rank calls it; extra is what this rank saved, or rank 0 where there was no such rank. Gradients stay as
    they are. Raises UsageError where names or shapes differ, StorageError where there is no checkpoint or another rank
    failed to load it, CorruptDataError where its bytes are not those written, RankError where other ranks do not load.
    """
    sharded = sharded_model(model)
    if optimizer is not None and (not isinstance(optimizer, AdamW) or optimizer.model is not sharded):
        raise UsageError("load(): the optimizer is not a tiered.AdamW of this model: give its own, or None for weights")
    sharded.check_left("load()")
    sharded.end_saving()
    loading = _Loading(sharded, optimizer, names or {}, strict)
    loading.together("load(), looking", lambda: loading.look(path))
    loading.together("load()", sharded.before_step, closes=True)  # nobody is given values that are half old
    sharded.failure = UsageError("a load() that did not end")
    try:
        loading.together("load()", loading.take)
    finally:
        sharded.reloaded()
    sharded.failure = None
    loading.go_on()
    if optimizer is not None:
        optimizer.keep()
    return loading.extra()


class _Loading:
    """One load on one rank."""

    def __init__(self, sharded: ShardedModel, optimizer: AdamW | None, names: Mapping[str, str], strict: bool) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._names = names
        self._strict = strict
        self._folder = Folder("")
        self._made: Manifest | None = None
        self._found: list[tuple[ParamHome, Stored]] = []
        self._buffers: list[tuple[torch.Tensor, Lone]] = []
        self._lone: dict[int, torch.Tensor] = {}  # tensors read, by number

    def together(self, doing: str, part: Callable[[], None], *, closes: bool = False) -> None:
        on_every_rank(self._sharded, doing, part, lambda: self._folder.path, closes=closes)

    # --- look ---

    def look(self, path: str | os.PathLike[str]) -> None:
        self._folder = find(path)
        self._made = made = self._folder.read()
        by_alias = {alias: stored for name, stored in made.parameters.items() for alias in (name, *stored.aliases)}
        names = names_of_parameters(self._sharded)
        missing: list[str] = []
        used: set[int] = set()
        for home in self._sharded.homes:
            theirs = [self._names.get(name, name) for name in names[id(home.param)]]
            found = [by_alias[name] for name in theirs if name in by_alias]
            if not found:
                missing.append(home.name)
                continue
            stored = max(found, key=lambda each: len(each.kinds))  # of two names moments may have one alone
            used |= {id(other) for other in found if self._same(stored, other)}
            if stored.shape != tuple(home.slot.shape):
                raise UsageError(
                    f"load(): parameter '{home.name}' has shape {tuple(home.slot.shape)}, but {stored.shape} in the "
                    f"checkpoint {self._folder.path}"
                )
            self._found.append((home, stored))
        buffers = persistent_buffers(self._sharded.module)
        called = {name: self._names.get(name, name) for name in buffers}
        missing += [name for name, there in called.items() if there not in made.buffers]
        taken = {name for name, stored in made.parameters.items() if id(stored) in used} | set(called.values())
        # what was imported may be listed as both, a parameter and a buffer: either use is one
        self._judge(missing, [name for name in {**made.parameters, **made.buffers} if name not in taken])
        for name, there in called.items():
            if there in made.buffers:
                lone = made.tensors[made.buffers[there]]
                if lone.shape != tuple(buffers[name].shape):
                    raise UsageError(
                        f"load(): buffer '{name}' has shape {tuple(buffers[name].shape)}, but {lone.shape} in the "
                        f"checkpoint {self._folder.path}"
                    )
                self._buffers.append((buffers[name], lone))

    def _same(self, one: Stored, other: Stored) -> bool:
        """Whether two parameters have the same values, to the bit."""
        a, b = one.kinds["value"], other.kinds["value"]
        if (one.shape, a.dtype) != (other.shape, b.dtype) or a.parts == b.parts:
            return (one.shape, a) == (other.shape, b)
        with Reader(self._folder) as reader:
            for start, values in reader.windows(a.parts, a.dtype, 0, one.numel):
                for at, same in reader.windows(b.parts, a.dtype, start, start + values.numel()):
                    mine = values[at - start : at - start + same.numel()]
                    if not torch.equal(mine.view(torch.uint8), same.view(torch.uint8)):
                        return False
        return True

    def _judge(self, missing: list[str], unexpected: list[str]) -> None:
        told = [
            f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
            for names, what in ((missing, "missing in the checkpoint"), (unexpected, "of the checkpoint not used"))
            if names
        ]
        if told and self._strict:
            raise UsageError(
                f"load(): {'; '.join(told)}: give names={{name here: name there}} for what was renamed, or strict=False"
            )
        if told:
            _LOGGER.warning("load(): %s", "; ".join(told))

    # --- take ---

    def take(self) -> None:
        """Overwrite values and moments."""
        for group in self._sharded.groups:
            group.absorb()
        with Reader(self._folder) as reader:
            for home, stored in self._found:
                self._value(reader, home, stored)
                if self._moments_of(home, stored):
                    for kind in STATE_KINDS:
                        self._fill(reader, home, stored, kind, kind)
                self._sharded.alive("load()")
            for _, lone in self._buffers:
                self._read(reader, lone)
            extras.decode(self._extra, lambda number: self._read(reader, self._tensors[number]))

    def _value(self, reader: Reader, home: ParamHome, stored: Stored) -> None:
        for block in ("param", "master"):
            if block in home.group.blocks:
                self._fill(reader, home, stored, "value", block)

    def _fill(self, reader: Reader, home: ParamHome, stored: Stored, kind: str, block: str) -> None:
        """Overwrite what this rank has of one parameter in a block."""
        group, slot = home.group, home.slot
        base, end = group.span(block)
        low, high = overlap(slot, base, end)
        dtype = group.dtype if block == "param" else torch.float32
        source = stored.kinds[kind]
        for start, values in reader.windows(source.parts, source.dtype, low - slot.start, high - slot.start):
            data = values.to(dtype).contiguous().view(torch.uint8)
            group.runtime.store.patch(group.blocks[block], data, (slot.start + start - base) * dtype.itemsize)
            if block == "param" and group.runtime.in_place and group.nbytes and group.present:  # a copy that stays
                group.buffer.write(data, (slot.start + start) * dtype.itemsize)

    def _moments_of(self, home: ParamHome, stored: Stored) -> bool:
        kinds = set(STATE_KINDS)
        return self._optimizer is not None and kinds <= stored.kinds.keys() and kinds <= home.group.blocks.keys()

    @property
    def _tensors(self) -> Sequence[Lone]:
        return self._made.tensors if self._made is not None else ()

    def _read(self, reader: Reader, lone: Lone) -> torch.Tensor:
        if id(lone) not in self._lone:
            out = torch.empty(lone.part.stop, dtype=torch.uint8, device="cpu")
            for start, piece in reader.windows([lone.part], torch.uint8, 0, lone.part.stop):
                out[start : start + piece.numel()] = piece
            self._lone[id(lone)] = out.view(lone.dtype).view(lone.shape)
        return self._lone[id(lone)]

    # --- go on ---

    def go_on(self) -> None:
        """Everything but the bytes of parameters."""
        with torch.no_grad():
            for buffer, lone in self._buffers:
                buffer.copy_(self._lone[id(lone)])
        if self._optimizer is not None and self._made is not None:
            updates = {id(home.param): stored.step for home, stored in self._found if self._moments_of(home, stored)}
            groups = self._made.groups
            here = {alias: home.name for home, stored in self._found for alias in stored.aliases}
            mine = None if groups is None else self._optimizer.arranged(groups, here)
            for number in [number for number, group in enumerate(mine or ()) if group is None]:
                _LOGGER.warning(
                    "load(): the parameters of group %d of this optimizer are in several groups of the checkpoint, or "
                    "in none: its hyperparameters stay",
                    number,
                )
            self._optimizer.take_up(updates, mine, self._made.scaler, self._made.calls or (self._made.step, 0))
            if fresh := [home.name for home, stored in self._found if not self._moments_of(home, stored)]:
                _LOGGER.info("load(): moments are fresh for %d parameters (%s, ...)", len(fresh), fresh[0])
        with torch._C.DisableTorchFunctionSubclass():
            for home, _ in self._found:
                torch.autograd.graph.increment_version(home.param)

    def extra(self) -> Any:
        return extras.decode(self._extra, lambda number: self._lone[id(self._tensors[number])])

    @property
    def _extra(self) -> Any:
        """What this rank has saved, or rank 0 where there was no such rank."""
        saved = self._made.extras if self._made is not None else {}
        return saved.get(str(self._sharded.runtime.ranks.rank), saved.get("0"))

"""tiered.save: the training state of a sharded model as a checkpoint.

Each rank writes what it owns: its elements of every value and moment, through one window, or without moving them where
a file system can share blocks. Then rank 0 collects where everything is and commits the manifest.

    every rank begins (a call of all) -> each writes its share -> rank 0 commits       in the foreground: calls of all
                                         `---------- on threads: see `background` -----------'   in the background

Invariants:
1. Nothing of the live run changes: it goes on bit for bit as without the save.
2. A save that fails on any rank raises on every rank, leaves the checkpoint that was there, and the run goes on.
3. It holds the state of the moment of the call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiered.checkpoint import extra as extras
from tiered.checkpoint.background import Background
from tiered.checkpoint.common import on_every_rank
from tiered.checkpoint.folder import Folder, newest_first
from tiered.checkpoint.manifest import Manifest
from tiered.checkpoint.share import Share, Written, outline, put_together
from tiered.checkpoint.sidecar import Sidecars
from tiered.device.interrupt import uninterrupted
from tiered.errors import UsageError
from tiered.optim.adamw import AdamW
from tiered.zero.agreement import COMPUTING_FACTOR
from tiered.zero.buffers import persistent_buffers
from tiered.zero.model import ShardedModel
from tiered.zero.module import sharded_model


def save(
    model: nn.Module,
    optimizer: AdamW | None,
    path: str | os.PathLike[str],
    extra: Any = None,
    *,
    keep: int | None = None,
    background: bool = False,
) -> Path:
    """Write a checkpoint of `model` and `optimizer` (None: weights only) to the folder `path`; returns its folder.

    It replaces what was there at one instant: killed at any moment, `path` holds the old checkpoint or the new one.
    With `keep`, `path` holds several: the new one goes to `path`/step-<updates>, and all but the newest `keep` are
    removed. extra: what else is to be kept (numbers, strings, None, tensors, lists and dictionaries of them); each
    rank's own. Every rank calls it. Gradients are not saved: call it between `step` and the next backward. What lives
    on a drive is not moved where `path` is on a file system that can share its blocks (XFS, btrfs).

    background: return as soon as what is small has been copied, and write on a thread while training goes on. The next
    change of states (a step, an edit of parameters) waits until they have been read; the next `save`, `load` and
    `close` wait until the checkpoint is there, and raise what it failed of, as `saving` does. Edits of weights through
    a tensor from `.data` or `.detach()` that was taken before cannot be waited for: make none meanwhile.

    Raises UsageError for what cannot be saved, StorageError where the folder cannot be written, RankError where other
    ranks do not save, or failed to; and what the last save in the background failed of, before anything is written.
    """
    sharded = sharded_model(model)
    _check(sharded, optimizer, keep)
    sharded.check_left("save()")
    sharded.end_saving()
    step = optimizer.updates if optimizer is not None else 0
    target = Path(os.path.abspath(os.fspath(path)))
    saving = _Saving(sharded, Folder(target if keep is None else target / f"step-{step:09d}"), target, keep)
    saving.begin(extra, copied=background)
    with saving.undone():
        saving.take(optimizer, step, copied=background)
        if background:
            saving.in_background()
        else:
            saving.here()
    return saving.folder.path


def saving(model: nn.Module, *, wait: bool = False) -> bool:
    """Whether `save(..., background=True)` still goes on; `wait`: until it does not. With several ranks each asks for
    itself. Raises what it failed of, once: StorageError, RankError where a rank was lost, UsageError where weights were
    edited while they were read. The checkpoint before it is whole then."""
    sharded = sharded_model(model)
    if not wait and sharded.saving is not None and not sharded.saving.over:
        return True
    sharded.end_saving()
    return False


class _Saving:
    """One save on one rank; see `background.Job`."""

    def __init__(self, sharded: ShardedModel, folder: Folder, target: Path, keep: int | None) -> None:
        self.sharded = sharded
        self.folder = folder
        self.where = str(folder.path)
        self.rank = sharded.runtime.ranks.rank
        self._target = target
        self._keep = keep
        self._lone: list[torch.Tensor] = []
        self._extras: list[Any] = []  # of every rank
        self._drawn = ""
        self._outline: Manifest
        self._share: Share | None = None
        self._file: tuple[str, int] | None = None  # name and descriptor, until it is written
        self._handed_over = False  # to a thread

    def together(self, part: Any) -> list[Any]:
        return on_every_rank(self.sharded, "save()", part, lambda: self.folder.path)

    # --- every rank begins ---

    def begin(self, extra: Any, *, copied: bool) -> None:
        """Draw an id, and tell all ranks of each other's extras."""

        def add(tensor: torch.Tensor) -> int:
            self._lone.append(_on_host(tensor, copied))
            return len(self._lone) - 1

        def part() -> Any:
            told = extras.encode(extra, add)
            for group in self.sharded.groups:
                group.absorb()
            return {"extra": told, "id": self.folder.begin() if self.rank == 0 else ""}

        told = self.together(part)
        self._drawn = told[0]["id"]
        self._extras = [one["extra"] for one in told]

    def take(self, optimizer: AdamW | None, step: int, *, copied: bool) -> None:
        """Everything as it is now; the states are read when they are written."""

        def part() -> None:
            buffers = persistent_buffers(self.sharded.module) if self.rank == 0 else {}
            self._lone = [*(_on_host(buffer, copied) for buffer in buffers.values()), *self._lone]
            self._outline = outline(self.sharded, optimizer, step, list(buffers))
            self._file = self.folder.file(self._drawn, self.rank)
            self._share = Share(self.sharded, optimizer, self._lone)

        self.together(part)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Where the save fails, its data goes."""
        try:
            yield
        except BaseException:
            if not self._handed_over:
                self.close()
                if self.rank == 0:
                    self.drop()
            raise

    # --- and goes on ---

    def here(self) -> None:
        written = self.together(lambda: self.write(alive=lambda: self.sharded.alive("save()"), read=bool))
        self.close()
        self.together(lambda: self.commit(written) if self.rank == 0 else None)

    def in_background(self) -> None:
        patience_s = COMPUTING_FACTOR * self.sharded.config.rank_timeout_s
        check = self.sharded.runtime.check
        sidecars = Sidecars(self.folder, self._drawn, self.rank, check=check, patience_s=patience_s)
        with uninterrupted():
            self._handed_over = True
            Background(self.sharded, self, sidecars).start()

    def write(self, *, alive: Any, read: Any) -> Written:
        if self._share is None or self._file is None:
            raise RuntimeError("nothing has been taken")
        (name, descriptor), self._file = self._file, None
        return self._share.write(descriptor, self.folder.path, name, alive=alive, read=read)

    def commit(self, written: Sequence[Written]) -> None:
        self.folder.commit(self._drawn, put_together(self._outline, self._extras, written))
        if self._keep is not None:
            _remove_old(self._target, self._keep, self.folder.path.name)

    def drop(self) -> None:
        self.folder.drop(self._drawn)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
        if self._share is not None:
            self._share.close()
        self._file, self._share, self._lone = None, None, []


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


def _on_host(tensor: torch.Tensor, copied: bool) -> torch.Tensor:
    """`tensor` as it is written: its values on the host, `copied` where it may be changed before."""
    host = tensor.detach().cpu().contiguous()
    return host.clone() if copied and host.data_ptr() == tensor.data_ptr() else host


def _remove_old(parent: Path, count: int, newest: str) -> None:
    """Remove all checkpoints but the newest `count`. What cannot be removed now is by a later save."""
    for path in newest_first(parent)[count:]:
        if path.name != newest:
            Folder(path).remove()

"""tiered.resume: go on from what a run that ended before its time has left on its drives.

Nothing is copied: the swap directory was taken over when the model was sharded, and what it had committed is there
still, beside the values the model was built with.

Invariants:
1. What does not fit is found before anything is changed, and named.
2. After a failure half way no step is taken and nothing is saved, until a load succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tiered.checkpoint.common import on_every_rank
from tiered.errors import UsageError
from tiered.optim import generation
from tiered.optim.adamw import AdamW
from tiered.zero import truth
from tiered.zero.buffers import persistent_buffers
from tiered.zero.model import ShardedModel
from tiered.zero.module import sharded_model


def resume(model: nn.Module, optimizer: AdamW) -> int:
    """Go on from the last step that a run which was killed, or ended by an error, has left in the swap directory.

    Returns how many times `optimizer.step()` had been called, before a checkpoint that was loaded too; 0 where there is
    nothing to go on from. Every rank calls it, before the first step; the run must have been of the same model, ranks,
    stage and swap directories, with all states on the drives. Values, moments, hyperparameters, loss scale and buffers
    are as they were after that step; gradients, random number generators and the place in the data are not part of it.

    Raises UsageError where nothing of this run would outlast it either (one slot, states in RAM), or where a run of
    this model was laid out otherwise; StorageError or CorruptDataError where it cannot be read.
    """
    sharded = sharded_model(model)
    if not isinstance(optimizer, AdamW) or optimizer.model is not sharded:
        raise UsageError("resume(): the optimizer is not a tiered.AdamW of this model: give its own")
    resuming = _Resuming(sharded, optimizer)

    def together(part: Callable[[], None], *, closes: bool = False) -> None:
        on_every_rank(sharded, "resume()", part, lambda: resuming.path, closes=closes)

    together(resuming.look)
    if resuming.progress is None:
        return 0
    together(sharded.before_step, closes=True)  # nobody is given values that are half old
    sharded.failure = UsageError("a resume() that did not end")
    try:
        together(resuming.take)
    finally:
        sharded.reloaded()
    sharded.failure = None
    return resuming.go_on(resuming.progress)


class _Resuming:
    """One rank's part."""

    def __init__(self, sharded: ShardedModel, optimizer: AdamW) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._store = sharded.runtime.store
        self.progress: generation.Progress | None = None

    @property
    def path(self) -> Path:
        generations = self._store.generations
        return Path("" if generations is None else generations.path)

    def look(self) -> None:
        generations = self._store.generations
        if self._sharded.ephemeral is not None or generations is None:
            raise UsageError(f"resume(): this run leaves nothing to go on from: {self._sharded.ephemeral}")
        if self._optimizer.calls:
            raise UsageError("resume() after a step: call it before the first one")
        if generations.protected is not None:
            progress = generation.read(generations.protected, generations.path)
            groups = len(self._optimizer.param_groups)
            generation.check(progress, self._sharded.module, groups, generations.path)
            if None in self._optimizer.arranged(progress.groups):
                raise UsageError(
                    f"resume(): parameters are in other groups of the optimizer than in {generations.path}: make the "
                    f"groups as they were, or load a checkpoint"
                )
            self.progress = progress
        elif generations.strangers:
            raise UsageError(
                f"resume(): a run of this model has left its last step, but was laid out otherwise: "
                f"{'; '.join(generations.strangers)}. Go on with the same ranks, stage, tiers and directories, load a "
                f"checkpoint, or remove that directory"
            )

    def take(self) -> None:
        self._store.revert()
        for group in self._sharded.groups:
            runtime = group.runtime
            if "master" in group.blocks and not group.blocks["param"].lasts:
                truth.derive_param(group)
            elif runtime.in_place and group.nbytes and group.present:  # the buffer is the truth's own copy
                self._store.load(group.blocks["param"], group.buffer.bytes, 0)
            group.edited = False
            self._sharded.alive("resume()")

    def go_on(self, progress: generation.Progress) -> int:
        """Everything but the bytes of parameters."""
        by_name = {home.name: id(home.param) for home in self._sharded.homes}
        updates = {by_name[name]: count for name, count in progress.updates.items() if name in by_name}
        groups = self._optimizer.arranged(progress.groups)
        self._optimizer.take_up(updates, groups, progress.scaler, (progress.calls, progress.skipped))
        with torch.no_grad():
            for name, buffer in persistent_buffers(self._sharded.module).items():
                buffer.copy_(progress.buffers[name])
        with torch._C.DisableTorchFunctionSubclass():
            for home in self._sharded.homes:
                torch.autograd.graph.increment_version(home.param)
        return progress.calls

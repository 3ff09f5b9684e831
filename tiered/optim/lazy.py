"""LazyUpdate: the update of a step that is decided, each group of it computed when it is first needed.

    decided --step() returns--> lazy --compute(group), as groups are used--> all computed --> written, committed: over
                                 |--finish: for whoever changes states, saves, steps again, closes--^
                                 `--an error--> failed: whatever needs what was not updated raises it, for ever

Norm, clip factor, hyperparameters and gradients are those of the step, so when a group is computed makes no difference
to what it becomes. Forward computes on one group while drives read what the next ones need and write what is done.

Invariants:
1. Nobody sees a block of a group before its update is computed and nothing of it is on its way back: `Block.check`
   asks `settle` first. A group's own parameters are up to date once it is computed.
2. Groups are computed in their order, on the thread that needs one; staging is held until all are.
3. What has begun is finished or has failed: nothing is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tiered.device.buffer import Buffer
from tiered.device.interrupt import uninterrupted
from tiered.errors import StorageError, UsageError
from tiered.optim import pipeline
from tiered.optim.slots import Chunk, Slots, Work
from tiered.store.block import Block
from tiered.store.tier import Tier
from tiered.zero.group import ParamGroup
from tiered.zero.model import ShardedModel


def waits(group: ParamGroup) -> bool:
    """Whether a group is better updated when it is needed: there is something to move for it, or a device computes
    beside; and nobody holds a view of its values, who would see them change later than they should."""
    if group.runtime.several or group.resident or group.buffer.exported():
        return False
    return not group.runtime.in_place or on_a_drive(group)


def on_a_drive(group: ParamGroup) -> bool:
    """Something of the group has its home there."""
    return any(block.home is Tier.NVME for block in group.blocks.values())


class LazyUpdate:
    """See the file's contract; `ParamGroup.lazy` and `ShardedModel.lazy` while it lasts."""

    def __init__(
        self,
        model: ShardedModel,
        work: Sequence[Work],
        update: pipeline.Update,
        updated: pipeline.Updated,
        *,
        kept: Sequence[ParamGroup] = (),
        slots: Slots | None = None,
    ) -> None:
        """kept: groups that are computed already, and may be on their way back in `slots`.
        Raises BudgetError where staging has no room; nothing has changed then."""
        self._model = model
        self._update = update
        self._waiting: dict[int, ParamGroup] = {}  # by index: not computed yet
        self._settling: dict[int, ParamGroup] = {}  # likewise: may be on its way back
        self._into: tuple[int, Buffer] | None = None  # of the group that is being computed: where it is wanted
        self._inside = False
        self._failure: BaseException | None = None
        self._over: Callable[[], object] = bool
        self._told = updated
        runtime = model.runtime
        self._run = pipeline.Run(runtime.store, runtime.meter, work, self._change, self._updated, slots=slots)
        for group, _ in work:
            if group.spec.shard_numel:
                self._waiting[group.index] = self._settling[group.index] = group
        self._kept = list(kept)
        self._unused = {group.index for group in kept}  # since the step

    def begin(self, over: Callable[[], object]) -> None:
        """From now on it happens when it is needed; `over`: called once when all is written."""
        self._over = over
        self._model.lazy = self
        self._settling |= {group.index: group for group in self._kept}
        for group in self._waiting.values():
            group.lazy = self
        for group in self._settling.values():
            for kind, block in group.blocks.items():
                if kind != "grad" or group.index in self._waiting:  # else nobody needs gradients any more
                    block.update = functools.partial(self.settle, group, block)
        self._go(self._run.read_ahead)

    def compute(self, group: ParamGroup, into: Buffer | None = None) -> None:
        """The group's parameters are up to date on return, and copied to `into` as well if it is given."""
        if self._inside:
            return
        self._check()
        if group.index not in self._waiting:
            return
        self._into = None if into is None else (group.index, into)
        try:
            while group.index in self._waiting:
                self._go(self._run.advance)
        finally:
            self._into = None
        if not self._waiting:
            self.finish()

    def settle(self, group: ParamGroup, block: Block) -> None:
        """The block is up to date on return, wherever it lives."""
        if self._inside:
            return
        self.compute(group)
        if block.update is not None:
            self._go(functools.partial(self._run.written, block))
            self._model.runtime.store.updated(block)
        self._unused.discard(group.index)
        if not self._waiting and not self._unused:
            self.finish()

    def finish(self) -> None:
        """All of it is computed, written and committed on return."""
        if self._inside or self._model.lazy is not self:
            return
        self._check()
        with uninterrupted():  # what is written is committed
            self._go(self._run.finish)
            self._end()
            self._over()

    @property
    def computed(self) -> bool:
        """All of it is; it may be on its way back."""
        return not self._waiting

    def relieve(self) -> bool:
        """Finish, so that staging comes back; False while a chunk is computed."""
        if self._inside or self._failure is not None:
            return False
        self.finish()
        return True

    def abandon(self) -> None:
        """Nobody wants what it would give. Waits for what is in flight."""
        self._inside = True
        self._run.close()
        self._inside = False
        self._end()

    # --- inside ---

    def _check(self) -> None:
        """Raise what it failed of."""
        cause = self._failure
        if isinstance(cause, StorageError):  # the same kind again, with its errno and file
            raise type(cause)(cause.errno, f"the last step was lost: {cause.strerror}", cause.filename) from cause
        if cause is not None:
            raise UsageError(
                f"the last step failed half way ({cause}): load the last checkpoint, or call tiered.close(model, "
                f"keep_weights=False)"
            ) from cause

    def _go(self, part: Callable[[], object]) -> None:
        with uninterrupted():  # a chunk happens as a whole, and Ctrl-C is no failure of it
            self._inside = True
            try:
                part()
            except BaseException as error:
                self._failure = self._model.failure = error
                raise
            finally:
                self._inside = False

    def _change(self, chunk: Chunk, tensors: dict[str, torch.Tensor]) -> None:
        self._update(chunk, tensors)
        if self._into is not None and self._into[0] == chunk.group.index:
            size = chunk.group.dtype.itemsize
            values = tensors["param"].view(torch.uint8)
            self._into[1].bytes[chunk.start * size : chunk.stop * size].copy_(values)

    def _updated(self, group: ParamGroup) -> None:
        self._waiting.pop(group.index, None)
        group.lazy = None
        self._told(group)

    def _end(self) -> None:
        self._model.lazy = None
        for group in self._settling.values():
            group.lazy = None
            for block in group.blocks.values():
                self._model.runtime.store.updated(block)

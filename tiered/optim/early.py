"""EarlyUpdate: updates computed during backward, as candidates; the step keeps those that are what it would compute.

    group's last gradient --arrived--> queued --pump: read, compute, write beside--> candidate
    candidate --keep: same gradients, settings, clip factor, states--> the group is updated
              `--anything else--> forgotten: the old states were never touched

A step needs the norm of all gradients, but where the clip factor can be expected (nothing was clipped last time, or
clipping is off) an update can be computed before it, while the drive would idle in backward. A candidate is written
beside what is committed, so that keeping it names other slots and moves nothing. (The idea of speculating on the norm:
SuperOffload, ASPLOS 2026; there it is rolled back, and off where clipping is on.)

Invariants:
1. A hint: nothing waits for it, evicts for it or fails of it, and no value depends on it.
2. A group is kept only where its update was computed from the gradients, states, settings and factor of the step.
3. After `keep`, `forget` and an error nothing is in flight but what the lazy update has taken over.
4. One of a model has candidates at a time: the last that was made, or has stepped.
Which gradient is a group's last is learnt from the step before, whatever backwards it was made of. Where expected
factors fail, it pauses, longer each time; whether it pays is measured (`schedule.choice`).
Leaves to whom: one rank, a device whose memory is the host's, states on drives that are committed: others go without.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from tiered.device.interrupt import uninterrupted
from tiered.errors import StorageError
from tiered.optim import pipeline, update
from tiered.optim.kernels import Segment
from tiered.optim.plan import Member, StepPlan, by_group, plan_group, within
from tiered.optim.slots import Chunk, Slots, Work
from tiered.schedule.choice import Balance, Choice
from tiered.store.block import Block
from tiered.zero.group import ParamGroup
from tiered.zero.home import ParamHome
from tiered.zero.model import ShardedModel

_LOGGER = logging.getLogger("tiered")
_LONGEST_PAUSE = 64  # steps


class Stepping(Protocol):
    """The optimizer whose steps are expected."""

    param_groups: list[dict[str, Any]]

    def updates_of(self, home: ParamHome) -> int:
        """Updates taken of one parameter."""

    def expected_scale(self) -> float | None:
        """What the next step is likely to multiply gradients by; None: nobody knows."""


class EarlyUpdate:
    """See the file's contract; `ShardedModel.early`, and `GroupGrads.follower` of the groups it may be for."""

    def __init__(self, model: ShardedModel, optimizer: Stepping, homes: Mapping[int, ParamHome]) -> None:
        """optimizer: not held. homes: of its parameters, by their id."""
        self._model = model
        self._store = model.runtime.store
        self._optimizer = weakref.ref(optimizer)
        self._homes = homes
        self._choice = Choice(True if model.config.overlap == "backward" else None)
        self._balance = Balance()
        self._members: dict[int, list[Member]] = {}  # of each group, in this step
        self._groups: dict[int, ParamGroup] = {}
        self._whole = 0  # elements of all of them
        self._arrivals: collections.Counter[int] = collections.Counter()  # gradients by group, since the last step
        self._last: Mapping[int, int] = {}  # likewise, in the step before
        self._run: pipeline.Run | None = None
        self._planned: dict[int, list[Segment]] = {}  # of the groups that were queued
        self._computed: set[int] = set()  # of them
        self._touched: set[int] = set()  # of them: gradients have changed since
        self._by: float | None = None  # the factor expected in this step
        self._closed = False  # for this step
        self._busy = False
        self._pause = self._paused = 0
        self._elements = 0  # of the groups that were queued
        self._stepped = time.perf_counter()
        self._waited = self._stalled()
        self._forward: float | None = None  # seconds waited up to the first gradient
        self._kept = self._total = 0  # groups, in this step and in all
        self._look()

    def _look(self) -> None:
        """Groups may have begun to train, or another optimizer have come and gone."""
        self._model.follow(self)
        for group in self._model.groups:
            if self._possible(group):
                self._groups[group.index] = group
                self._model.grads[group.index].follower = self
        self._whole = sum(group.spec.shard_numel for group in self._groups.values())

    def _possible(self, group: ParamGroup) -> bool:
        written = _written(group)
        there = len(written) > 1 and all(block.lasts for block in written)
        return there and group.spec.shard_numel > 0 and "grad" in group.blocks

    # --- backward ---

    def touched(self, group: ParamGroup) -> None:
        """The group's gradients change, or may: somebody has a view. Nothing reads them on return."""
        self._touched.add(group.index)
        if group.index in self._planned and group.index not in self._computed and not self._busy:
            self.forget()

    def arrived(self, group: ParamGroup) -> None:
        """One more of the group's gradients is complete."""
        self._arrivals[group.index] += 1
        if self._forward is None:
            self._forward = self._stalled()
        if self._closed or self._busy or not self._choice.on or self._paused:
            return
        with uninterrupted():
            self._busy = True
            try:
                if self._arrivals[group.index] == self._last.get(group.index):
                    self._queue(group)
                self._pump()
            except (StorageError, MemoryError):  # whoever needs those states, or memory, is told
                self.forget()
            except Exception:
                _LOGGER.warning("an update could not be computed before its step", exc_info=True)
                self.forget()
            finally:
                self._busy = False

    def _queue(self, group: ParamGroup) -> None:
        model = self._model
        if model.lazy is not None and model.lazy.computed:
            model.lazy.finish()
        if model.failure is not None or group.index in self._planned or not self._fit(group):
            return
        if self._elements + group.spec.shard_numel > self._balance.share * self._whole:
            return
        if self._run is None and not self._begin():
            self._closed = True
            return
        if self._run is not None:
            self._touched.discard(group.index)
            self._elements += group.spec.shard_numel
            self._planned[group.index] = self._plan(group)
            self._run.add(group, update.arrays(group, model.grads[group.index].dtype), beside=True)

    def _begin(self) -> bool:
        model = self._model
        optimizer = self._optimizer()
        self._by = None if optimizer is None else optimizer.expected_scale()
        if optimizer is None or self._by is None or model.lazy is not None:
            return False
        if model.optimizers != 1 or model.ephemeral is not None:
            return False
        runtime = model.runtime
        slots = Slots(runtime.store, runtime.meter, work(model, self._groups.values()), hint=True)
        self._members = by_group(optimizer.param_groups, self._homes)
        try:
            self._run = pipeline.Run(runtime.store, runtime.meter, (), self._change, self._updated, slots=slots)
        except MemoryError:
            return False
        return True

    def _plan(self, group: ParamGroup) -> list[Segment]:
        optimizer = self._optimizer()
        return [] if optimizer is None else plan_group(self._members.get(group.index, ()), optimizer.updates_of)

    def _fit(self, group: ParamGroup) -> bool:
        """The group's states are those of the last commit, nobody holds a view of them or of a gradient, and its page,
        if it is here, can go."""
        model = self._model
        settled = all(self._store.settled(block) for block in _written(group))
        plain = not group.edited and not group.buffer.exported() and group.lazy is None
        return settled and plain and not model.grads[group.index].viewed()

    def _pump(self) -> None:
        """Go on, as far as nothing has to be waited for."""
        run = self._run
        if run is None:
            return
        run.read_ahead(wait=False)
        while run.ready:
            run.advance()

    def _change(self, chunk: Chunk, tensors: dict[str, torch.Tensor]) -> None:
        segments = within(self._planned[chunk.group.index], chunk.start, chunk.stop)
        with self._model.runtime.meter.span(f"early update {chunk.group.name}", "update"):
            update.on_host(segments, tensors, self._by or 0.0)

    def _updated(self, group: ParamGroup) -> None:
        self._computed.add(group.index)

    # --- the step ---

    @property
    def kept(self) -> int:
        """Groups whose candidates were taken, in all steps so far."""
        return self._total

    def keep(self, plan: StepPlan, grad_scale: float) -> tuple[list[ParamGroup], Slots | None]:
        """Take the candidates that are what `plan` with `grad_scale` gives: the groups that are updated, and the slots
        from which some of it is on its way. Raises what a drive has failed of."""
        run, self._run = self._run, None
        if run is None:
            return [], None
        kept: list[ParamGroup] = []
        slots = run.hand_over()
        with contextlib.ExitStack() as failing:
            failing.callback(slots.__exit__)
            for index, segments in self._planned.items():
                group = self._groups[index]
                same = index in self._computed and index not in self._touched and self._fit(group)
                same = same and grad_scale == self._by and plan.segments.get(index) == segments
                same = same and all(block.place.beside.all() for block in _written(group))
                if same and self._evict(group):
                    kept.append(group)
                else:
                    for block in _written(group):
                        slots.written(block)
            for group in kept:
                for block in _written(group):
                    self._store.take(block, 0, block.nbytes)
            failing.pop_all()
        self._kept = len(kept)
        self._total += self._kept
        return kept, slots

    def _evict(self, group: ParamGroup) -> bool:
        """Let go what is here of the group; False where it cannot."""
        if group.present and group.executor is not None:
            group.executor.evict(group)
        return not group.present

    def stepped(self, grad_scale: float | None) -> None:
        """A step has been taken with `grad_scale`; None: skipped."""
        tried, on = bool(self._planned), self._choice.on and not self._paused
        if tried and grad_scale != self._by:
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause + 1)
            self._paused = self._pause + 1
        elif self._kept:
            self._pause = 0
        self._paused = max(0, self._paused - 1)
        now, waited = time.perf_counter(), self._stalled()
        if tried == on and self._last:  # else the step is the first, or one of neither kind
            self._choice.took(now - self._stepped, on)
        if tried and self._forward is not None:
            self._balance.took(now - self._stepped, self._forward - self._waited, waited - self._forward)
        self._stepped, self._waited, self._forward = now, waited, None
        self._last, self._arrivals = self._arrivals, collections.Counter()
        self.forget()
        self._closed, self._kept = False, 0
        self._look()

    def forget(self) -> None:
        """States change, or memory is short: there are no candidates any more, until the next step."""
        run, self._run = self._run, None
        self._planned, self._computed, self._elements = {}, set(), 0
        self._touched.clear()
        if run is not None:
            self._closed = True
            run.close()

    def _stalled(self) -> float:
        return sum(self._model.runtime.meter.stalls.values())

    def relieve(self) -> bool:
        """Give memory back; False where there is none."""
        if self._run is None or self._busy:
            return False
        self.forget()
        return True


def _written(group: ParamGroup) -> list[Block]:
    """The blocks that an update writes."""
    return [block for kind, block in group.blocks.items() if kind != "grad"]


def expects(model: ShardedModel) -> bool:
    """Whether updates of a model may be computed before their step."""
    wanted = model.config.overlap in ("auto", "backward")
    return wanted and not model.runtime.several and model.runtime.in_place and model.ephemeral is None


def work(model: ShardedModel, groups: Iterable[ParamGroup]) -> list[Work]:
    """What is to move for the update of `groups`."""
    return [(g, update.arrays(g, model.grads[g.index].dtype)) for g in groups]

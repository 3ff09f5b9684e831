"""ShardedModel: one model's groups, units and parameters, from sharding to close.

Owns what is shared by the whole model: the way between the user's module and its groups, the end of a backward with
several ranks, and the part of a step that is lazy. Leaves the way back to a plain module to `closing`. Invariants:
1. The user's module and Parameter objects stay the same objects throughout.
2. `close` is idempotent, waits for what is in flight, and either restores a plain module or, before touching
   anything, says why it cannot.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

from tiered.config import Config
from tiered.device.memory import page_ceil
from tiered.errors import TieredError, UsageError
from tiered.schedule.execute import Executor
from tiered.schedule.limit import Recorder
from tiered.schedule.trace import Phase
from tiered.store.block import Block, BlockKey
from tiered.store.tier import Tier
from tiered.store.window import WINDOW_BYTES
from tiered.zero import buffers, closing, residence, statedict, truth
from tiered.zero.about import about_blocks
from tiered.zero.agreement import Call
from tiered.zero.departures import Departures
from tiered.zero.grads import GroupGrads, Kernels
from tiered.zero.group import ParamGroup
from tiered.zero.home import ParamHome
from tiered.zero.placing import Placement
from tiered.zero.reducer import Reducer
from tiered.zero.resident import ResidentGrads
from tiered.zero.room import DeviceRoom
from tiered.zero.runtime import Runtime
from tiered.zero.step import EarlyUpdate, LazyUpdate, SharedStep, Step
from tiered.zero.unit import Unit

MODEL_ATTRIBUTE = "_tiered_model"  # on the root module: its ShardedModel
STATE_KINDS = ("exp_avg", "exp_avg_sq")
_MARGIN = 1.25  # of the measured activations: left free when groups are promoted, for batches a little larger


class Saving(Protocol):
    """A save that goes on beside training."""

    failure: TieredError | None

    @property
    def over(self) -> bool:
        """It has ended, well or with `failure`."""

    def wait(self) -> None:
        """Return once it is over."""

    def hold(self) -> None:
        """Return once states may change."""


class ShardedModel:
    """See the file's contract."""

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        runtime: Runtime,
        groups: list[ParamGroup],
        placement: Placement,
        kernels: Kernels,
    ) -> None:
        self.module = module
        self.config = config
        self.runtime = runtime
        self.groups = groups
        self.kernels = kernels
        self.departures = Departures(runtime, kernels, placement.departing)
        self.grads: list[GroupGrads] = []
        self.homes: list[ParamHome] = []
        self.units: list[Unit] = []
        self.holders: list[nn.Module] = []  # modules that hold parameters directly
        self.reserve = placement.reserve  # bytes of the host budget that staging needs and that no state may take
        self.closed = False
        self.failure: BaseException | None = None  # of a step that could not be completed: the states are torn
        self.ephemeral: str | None = "it is being built"  # why no step of a killed run can be gone on from
        self.saving: Saving | None = None  # in the background, or what has become of it
        self.lazy: LazyUpdate | None = None  # the update of the last step, while it is not over
        self.early: EarlyUpdate | None = None
        self.recorder: Recorder | None = None
        self._class = type(module)
        self._promoted = False
        self.reducer: Reducer | None = None  # of several ranks
        self._settlements: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.room = DeviceRoom(runtime.device, runtime.budget, placement.window, given=config.device_budget is not None)
        if runtime.traffic is not None:
            self.reducer = Reducer(
                runtime.traffic.exchange, self.departures, module, runtime.stage, runtime.store, self.reserve
            )
        ahead = config.overlap != "none"
        self.executor = Executor(groups, self.room, runtime.meter, stale=not runtime.in_place, ahead=ahead)
        runtime.store.before_change = self._before_change
        runtime.store.on_pressure = self._settle_hints
        runtime.store.on_shortage = self._relieve
        for group in groups:
            group.executor = self.executor

    def _settle_hints(self) -> None:
        traffic = self.runtime.traffic
        if traffic is None or not traffic.exchange.aboard:  # there nobody can be waited for
            self.executor.settle()

    def _relieve(self) -> bool:
        """Host memory is short: wait for some to come back. False where none will."""
        traffic = self.runtime.traffic
        if traffic is not None and traffic.exchange.aboard:
            return False
        if self.lazy is not None and self.lazy.relieve():
            return True
        if self.early is not None and self.early.relieve():
            return True
        return self.departures.land_one() or (self.reducer is not None and self.reducer.relieve())

    # --- states ---

    def start_training(self, group: ParamGroup) -> None:
        """A parameter that may have been frozen when the model was sharded is to be trained: give its group the states
        it lacks. They go to the host while it has room, else to the drive.

        Raises BudgetError or SwapFullError, with nothing kept, where neither has room.
        """
        grad = self.grads[group.index].dtype
        dtypes = {"grad": grad, **dict.fromkeys(STATE_KINDS, torch.float32)}
        if group.dtype != torch.float32:
            dtypes["master"] = torch.float32
        missing = {kind: dtype for kind, dtype in dtypes.items() if kind not in group.blocks}
        if not missing:
            return
        store = self.runtime.store
        sizes = {kind: (group.span(kind)[1] - group.span(kind)[0]) * dtype.itemsize for kind, dtype in missing.items()}
        need = sum(page_ceil(nbytes) for nbytes in sizes.values())
        roomy = self.config.optimizer_tier != "nvme" and need <= store.room() - self.reserve
        roomy &= self.ephemeral is not None  # what lasts goes where it does
        tier = Tier.HOST if roomy or not self.config.directories else Tier.NVME
        made: dict[str, Block] = {}
        try:
            for kind, nbytes in sizes.items():
                made[kind] = store.create(BlockKey(group.index, kind), nbytes, tier)
        except BaseException:
            for block in made.values():
                store.remove(block)
            raise
        group.absorb()
        group.blocks |= made
        if "master" in made:
            truth.fill_master(group)

    def check_left(self, call: str) -> None:
        """Raise UsageError inside a forward or a gather(), where parameters are the user's: nothing else may change or
        take them."""
        if used := [group.name for group in self.groups if group.in_use]:
            raise UsageError(f"{call} inside a forward or a gather() of the model (group '{used[0]}'): leave it first")

    def follow(self, early: EarlyUpdate) -> None:
        """The candidates of one optimizer, and of no other, are those of the model."""
        if self.early is not None and self.early is not early:
            self.early.forget()
        self.early = early

    def begins_step(self) -> None:
        """The loop is at a step, and that before is over."""
        if self.recorder is not None:
            self.recorder.step()
        self.runtime.meter.at("step")

    def begin_step(self) -> None:
        """Wait for gradients on their way and who reads states, reduce what is not reduced, and bring in what the user
        edited."""
        self.finish_update()
        self.departures.drain()
        self._hold_savers()
        if self.reducer is not None:
            self.reducer.before_step()
        for group in self.groups:
            group.absorb()

    def changed(self, fresh: Collection[int] = ()) -> None:
        """A step has changed the truth of every group: stale copies go (`fresh`: of which groups they have gone), and
        what comes next is fetched."""
        if self.runtime.traffic is not None:
            self.runtime.traffic.exchange.open()
        for group in self.groups:
            if group.index not in fresh:
                group.refresh()
        self.room.stepped()
        self._promote()
        self.executor.stepped()

    def _promote(self) -> None:
        """Where a whole step has been measured, the first groups that fit beside it stay on the device for good."""
        config = self.config
        open_to = config.optimizer_tier == "auto" and config.param_tier in ("auto", "device")
        if not open_to or self.reducer is not None or self._promoted or not self.room.learnt:
            return
        self._promoted = True
        self.finish_update()
        for group in residence.fitting(self.groups, self.room.spare(_MARGIN)):
            if not residence.promote(group):
                return
            self.room.stays(sum(page_ceil(block.nbytes) for block in group.blocks.values()))
            before = self.grads[group.index]
            after = ResidentGrads(group, before.dtype, self.kernels, self.departures)
            after.present = before.present
            self.grads[group.index] = after
            for home in self.homes:
                if home.group is group:
                    home.grads = after

    def on_settle(self, settle: Callable[[], None]) -> None:
        """Call `settle`, a bound method whose object may go, before counters are read."""
        self._settlements.append(weakref.WeakMethod(settle))

    @functools.cached_property
    def about(self) -> str:
        """What a commit says of it, as JSON: written every step, and the same."""
        return json.dumps(about_blocks(self))

    @property
    def optimizers(self) -> int:
        """How many there are of this model."""
        return sum(reference() is not None for reference in self._settlements)

    def settle(self) -> None:
        """Bring the counters up to date with what the device has done."""
        for reference in self._settlements:
            if (settle := reference()) is not None:
                settle()

    # --- scopes ---

    @contextlib.contextmanager
    def gathered(self, homes: Iterable[ParamHome], modify: bool) -> Iterator[None]:
        """Full values inside, the parameters plain; see `tiered.gather`."""
        groups = list({h.group.index: h.group for h in homes}.values())
        if modify:
            self.runtime.store.before_change()
        with contextlib.ExitStack() as scope:
            for group in groups:
                scope.enter_context(group.computing(Phase.EVALUATION))
            before = [[p._version for p in g.params] for g in groups]
            yield
            edited = [before[i] != [p._version for p in g.params] for i, g in enumerate(groups)]
            if modify:
                for group in groups:
                    group.excuse_writes()
                    group.edited = True
                self.runtime.device.fence().wait()  # another thread reads the buffers
                names = f"gather(modify=True) of {[g.name for g in groups]}"
                detail = zlib.crc32(str([g.index for g in groups]).encode())
                self.runtime.together(Call.GATHER, names, lambda: self._spread(groups), detail=detail)
        for group in groups:
            group.absorb()
        if any(edited) and not modify:
            names = str([g.name for g, changed in zip(groups, edited, strict=True) if changed])
            raise UsageError(f"parameters of {names} were edited inside gather(): use gather(..., modify=True) to edit")

    def _spread(self, groups: Iterable[ParamGroup]) -> None:
        """Give every rank the values of rank 0, and let each keep what is its own of them; with all ranks."""
        ranks = self.runtime.ranks
        for group in groups:
            total = group.buffer.nbytes if ranks.size > 1 else 0
            for start in range(0, total, WINDOW_BYTES):
                part = torch.empty(min(WINDOW_BYTES, total - start), dtype=torch.uint8, device="cpu")
                group.buffer.read(part, start)
                ranks.broadcast(part)
                group.buffer.write(part, start)
            self.runtime.meter.communicated("broadcast", group.spec.numel if total else 0, total)
            group.absorb()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Other ranks are told that this one is in a step, and that it is over. Where it fails this rank leaves them:
        what it would give out is torn."""
        if self.reducer is None or self.runtime.traffic is None:
            yield
            return
        exchange = self.runtime.traffic.exchange
        try:
            with exchange.within("step()", computing=True):
                yield
        except BaseException:
            exchange.stop()
            raise
        self.reducer.stepped()

    @contextlib.contextmanager
    def computing(self, doing: str) -> Iterator[None]:
        """Other ranks are told that this one is busy inside."""
        traffic = self.runtime.traffic
        with traffic.exchange.within(doing, computing=True) if traffic is not None else contextlib.nullcontext():
            yield

    def reloaded(self) -> None:
        """The truth of every group has been replaced, on every rank: stale copies go."""
        if self.runtime.traffic is not None:
            self.runtime.traffic.exchange.open()
        for group in self.groups:
            group.refresh()

    def alive(self, doing: str) -> None:
        """Other ranks are told that `doing` goes on."""
        if self.runtime.traffic is not None:
            self.runtime.traffic.exchange.computing(doing)

    def new_step(self) -> Step:
        """A step begins."""
        traffic = self.runtime.traffic
        return Step() if traffic is None else SharedStep(traffic, self.runtime.store)

    def before_step(self) -> None:
        """Nothing fetched ahead reads what a step, or a load, is going to write; the last step is over."""
        if self.lazy is not None and self.failure is not None:
            self.lazy.abandon()
        self.finish_update()
        self.executor.settle()

    # --- the end ---

    def finish_update(self) -> None:
        """The update of the last step is over on return, everywhere. Raises what it fails of."""
        if self.lazy is not None:
            self.lazy.finish()

    def _end_update(self, keep_weights: bool) -> None:
        """The model is closed: the last step is made whole where its outcome is wanted, here or by a later run."""
        if keep_weights:
            self.finish_update()
        elif (generations := self.runtime.store.generations) is not None and generations.left:
            with contextlib.suppress(TieredError):
                self.finish_update()
        if self.lazy is not None:
            self.lazy.abandon()
        if self.early is not None:
            self.early.forget()

    def _before_change(self) -> None:
        """States change, gradients aside: the last step is whole, and who reads it is waited for."""
        self.finish_update()
        if self.early is not None:
            self.early.forget()
        self._hold_savers()

    def _hold_savers(self) -> None:
        """Who reads states as they are is waited for."""
        if self.saving is not None:
            self.saving.hold()

    def end_saving(self) -> None:
        """Wait until no save goes on in the background. Raises what it failed of, once."""
        if (saving := self.saving) is not None:
            saving.wait()
            self.saving = None
            if saving.failure is not None:
                raise saving.failure

    def close(self, *, keep_weights: bool) -> None:
        """Back to a plain module; see `tiered.close`."""
        if not self.closed:
            self.check_left("close()")
            if self.saving is not None:
                self.saving.wait()
            self._end_update(keep_weights)
            closing.to_plain(self, keep_weights=keep_weights)
        self.end_saving()  # what it failed of is no reason to stay open

    def release(self) -> None:
        """Give back memory, files and threads."""
        self.closed = True
        self.departures.close()
        for group in self.groups:
            group.disown()
        self.runtime.device.fence().wait()  # what computes still reads the buffers
        if self.runtime.traffic is not None:
            self.runtime.traffic.close()
        self.runtime.store.close()
        self.runtime.device.close()
        for group in self.groups:
            group.blocks.clear()
            if not group.buffer.exported():
                group.buffer.decommit()
        self.runtime.budget.refund(self.runtime.budget.used)  # every group's, and what of states was there
        self.room.leave()
        self.runtime.meter.close()

    def restore_modules(self) -> None:
        """The user's modules are of their own classes again."""
        buffers.move(self.module, torch.device("cpu"))
        for unit in self.units:
            unit.restore()
        for module in self.holders:
            statedict.restore(module)
        self.module.__class__ = self._class
        self.module.__dict__.pop(MODEL_ATTRIBUTE, None)

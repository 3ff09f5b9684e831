"""ShardedModel: one model's groups, units and parameters, from sharding to close.

Owns what is shared by the whole model: the way between the user's module and its groups, the end of a backward with
several ranks, and the way back to a plain module. Invariants:
1. The user's module and Parameter objects stay the same objects throughout.
2. `close` is idempotent, waits for what is in flight, and either restores a plain module or, before touching
   anything, says why it cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tiered.config import Config, format_size
from tiered.device.host import available_bytes
from tiered.errors import BudgetError, TieredError, UsageError
from tiered.schedule.execute import Executor
from tiered.schedule.trace import Phase
from tiered.store.block import BlockKey
from tiered.store.tier import Tier
from tiered.zero import statedict
from tiered.zero.grads import Departures, GroupGrads
from tiered.zero.group import ParamGroup
from tiered.zero.guard import ATTRIBUTE, unguard
from tiered.zero.home import ParamHome
from tiered.zero.runtime import Runtime
from tiered.zero.unit import Unit, refuse_copy

MODEL_ATTRIBUTE = "_tiered_model"  # on the root module: its ShardedModel
STATE_KINDS = ("exp_avg", "exp_avg_sq")


class ShardedModel:
    """See the file's contract."""

    def __init__(
        self, module: nn.Module, config: Config, runtime: Runtime, groups: list[ParamGroup], reserve: int
    ) -> None:
        """`reserve`: bytes of the host budget that staging needs and that no state may take."""
        self.module = module
        self.config = config
        self.runtime = runtime
        self.groups = groups
        self.departures = Departures(runtime)
        self.grads: list[GroupGrads] = []
        self.homes: list[ParamHome] = []
        self.units: list[Unit] = []
        self.reserve = reserve
        self.closed = False
        self.failure: BaseException | None = None  # of a step that could not be completed: the states are torn
        self._class = type(module)
        self._reducing: int | None = None  # the backward whose end is being waited for
        budget = runtime.budget  # what never moves is charged already
        ahead = runtime.ranks.size == 1
        self.executor = Executor(groups, budget.free, lambda: budget.free, runtime.meter, ahead=ahead)
        for group in groups:
            group.executor = self.executor

    # --- states ---

    def create_states(self, group: ParamGroup, homes: dict[str, Tier]) -> None:
        """Make the blocks of a group that trains: gradients, moments, and the master if it is not yet there."""
        grads = self.grads[group.index]
        sizes = {"grad": grads.dtype.itemsize, "exp_avg": 4, "exp_avg_sq": 4}
        for kind, itemsize in sizes.items():
            if kind not in group.blocks:
                key = BlockKey(group.index, kind)
                nbytes = group.spec.shard_numel * itemsize
                group.blocks[kind] = self.runtime.store.create(key, nbytes, homes[kind])
                group.blocks[kind].next_use = group.index

    def start_training(self, group: ParamGroup) -> None:
        """A parameter that was frozen when the model was sharded is to be trained: give its group its states.

        They go to the host while it has room, else to the drive. Raises BudgetError or SwapFullError otherwise.
        """
        store = self.runtime.store
        if all(kind in group.blocks for kind in ("grad", *STATE_KINDS)):
            return
        need = group.spec.shard_numel * (12 + self.grads[group.index].dtype.itemsize)
        roomy = self.config.optimizer_tier != "nvme" and need <= store.host.free - self.reserve
        tier = Tier.HOST if roomy or not self.config.directories else Tier.NVME
        self.create_states(group, dict.fromkeys(("grad", *STATE_KINDS), tier))
        if group.dtype != torch.float32 and "master" not in group.blocks:
            group.absorb()
            key = BlockKey(group.index, "master")
            group.blocks["master"] = store.create(key, group.spec.shard_numel * 4, tier)
            for slot in group.spec.slots:
                group.set_values(slot, "master", group.values(slot, "param"))

    def drain(self) -> None:
        """Wait for gradients on their way, and bring in what the user edited."""
        self.departures.drain()
        for group in self.groups:
            group.absorb()

    def changed(self) -> None:
        """The truth of every group has changed: stale copies go, saved graphs are marked as torch marks them."""
        for group in self.groups:
            group.refresh()

    # --- scopes ---

    @contextlib.contextmanager
    def gathered(self, homes: Iterable[ParamHome], modify: bool) -> Iterator[None]:
        """Full values inside, the parameters plain; see `tiered.gather`."""
        groups = list({h.group.index: h.group for h in homes}.values())
        with contextlib.ExitStack() as scope:
            for group in groups:
                scope.enter_context(group.computing(Phase.EVALUATION))
            before = [[p._version for p in g.params] for g in groups]
            yield
            edited = [before[i] != [p._version for p in g.params] for i, g in enumerate(groups)]
            if modify:
                for group in groups:
                    self.runtime.ranks.broadcast(group.buffer.view(group.dtype))
                    group.edited = True
        for group in groups:
            group.absorb()
        if any(edited) and not modify:
            names = [g.name for g, changed in zip(groups, edited, strict=True) if changed]
            raise UsageError(f"parameters of {names} were edited inside gather(): use gather(..., modify=True) to edit")

    # --- several ranks: the end of a backward ---

    def gradient_arrived(self) -> None:
        """A gradient has been collected: at the end of this backward, all ranks reduce what any of them has."""
        if self.runtime.ranks.size == 1:
            return
        task = torch._C._current_graph_task_id()
        if self._reducing != task:
            self._reducing = task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        flags = [flag for grads in self.grads for flag in grads.arrived]
        united = iter(self.runtime.ranks.any(flags))
        for grads in self.grads:
            arrived = [next(united) for _ in grads.arrived]
            if any(arrived):
                grads.reduce(arrived)
        for group in self.groups:
            group.let_go()

    # --- the end ---

    def close(self, *, keep_weights: bool) -> None:
        """Back to a plain module; see `tiered.close`."""
        if self.closed:
            return
        if keep_weights:
            self.drain()
        need = sum(g.spec.numel * g.dtype.itemsize for g in self.groups if g.nbytes)
        if keep_weights and need > available_bytes():
            raise BudgetError(
                f"close() would bring all weights into memory: {format_size(need)}, but "
                f"{format_size(available_bytes())} is available: save what you need, then call "
                "tiered.close(model, keep_weights=False)"
            )
        values = [home.exported() if keep_weights else _on_meta(home) for home in self.homes]
        self.closed = True
        for home, value in zip(self.homes, values, strict=True):
            self._free(home, value)
        self._restore_modules()
        self.release()

    def release(self) -> None:
        """Give back memory, files and threads."""
        self.closed = True
        self.departures.abandon()
        for group in self.groups:
            group.disown()
        self.runtime.store.close()
        self.runtime.device.close()
        for group in self.groups:
            if not group.buffer.exported():
                group.buffer.decommit()

    def _free(self, home: ParamHome, value: torch.Tensor) -> None:
        param = home.param
        home.release()
        unguard(param)
        del param.__dict__[ATTRIBUTE]
        if value.is_meta:
            _replace_with_meta(self.module, param, value)
        else:
            param.data = value

    def _restore_modules(self) -> None:
        for unit in self.units:
            unit.restore()
        for module in self.module.modules():
            statedict.restore(module)
        self.module.__class__ = self._class
        self.module.__dict__.pop(MODEL_ATTRIBUTE, None)


def _on_meta(home: ParamHome) -> torch.Tensor:
    return torch.empty(home.slot.shape, dtype=home.dtype, device="meta")


def _replace_with_meta(root: nn.Module, param: nn.Parameter, value: torch.Tensor) -> None:
    """A parameter's data cannot change device in place, so every module that holds it gets one new meta Parameter."""
    new = nn.Parameter(value, requires_grad=param.requires_grad)
    for module in root.modules():
        for name, held in module._parameters.items():
            if held is param:
                module._parameters[name] = new


class ShardedModule(nn.Module):
    """What the root module's class gains while it is sharded: `with`, and refusals by name."""

    def __enter__(self) -> ShardedModule:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        model: ShardedModel | None = self.__dict__.get(MODEL_ATTRIBUTE)
        if model is None:
            return
        try:
            model.close(keep_weights=True)
        except TieredError:
            if kind is None:
                raise
            model.close(keep_weights=False)  # the error on its way out matters more

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        raise UsageError(
            "to(), half(), float(), cuda() and the like would replace sharded parameters: choose device and dtype in "
            "tiered.Config, or call tiered.close(model) first"
        )

    __deepcopy__ = refuse_copy
    __reduce_ex__ = refuse_copy


def as_sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` with ShardedModule mixed in; same name, so that it prints as before."""
    return type(cls.__name__, (ShardedModule, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})

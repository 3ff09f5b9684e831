"""Building a ShardedModel: check the module, group its parameters, place and fill their states, take the module over.

Invariant: whatever is wrong with the module, the settings or the budgets is raised before the module is touched;
after that, one group at a time moves into the store and gives its own memory back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tiered.config import Config
from tiered.device.host import give_back_freed
from tiered.errors import UsageError
from tiered.store.tier import Tier
from tiered.store.window import WINDOW_BYTES
from tiered.zero import buffers, initial, residence, statedict
from tiered.zero.grads import GroupGrads, Kernels
from tiered.zero.group import ParamGroup
from tiered.zero.guard import ATTRIBUTE, GuardedParameter
from tiered.zero.home import ParamHome
from tiered.zero.model import MODEL_ATTRIBUTE, STATE_KINDS, ShardedModel
from tiered.zero.module import as_sharded_class
from tiered.zero.partition import ShardSpec, UnitPlan, find_units, layout
from tiered.zero.placing import GroupSizes, Placement
from tiered.zero.resident import ResidentGrads
from tiered.zero.runtime import Runtime, partitions
from tiered.zero.shared import PartitionedGrads, SharedGrads, WholeGrads
from tiered.zero.unit import Unit

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEEP_DTYPE = (
    nn.modules.batchnorm._NormBase,
)  # running statistics stay as they are, and so do the weights beside them


class GroupPlan:
    """A group before it exists: its parameters, their layout and dtypes."""

    def __init__(
        self, index: int, name: str, params: list[nn.Parameter], dtype: torch.dtype, config: Config, ranks: int
    ) -> None:
        self._stage, self._ranks = config.stage, ranks
        self.index = index
        self.name = name
        self.params = params
        self.spec: ShardSpec = layout([p.shape for p in params], ranks)
        self.trains = params[0].requires_grad
        self.dtype = dtype
        self.grad_dtype = config.precision.reduce_dtype or dtype

    def sizes(self) -> GroupSizes:
        """Bytes of every block."""
        blocks = {"param": self._numel("param") * self.dtype.itemsize}
        grad = self._numel("grad") * self.grad_dtype.itemsize
        if self.trains:
            blocks |= {"grad": grad, **{kind: self._numel(kind) * 4 for kind in STATE_KINDS}}
        if self.has_master:
            blocks["master"] = self._numel("master") * 4
        whole = frozenset(kind for kind in ("param", "grad") if self._ranks > 1 and not self._partitions(kind))
        return GroupSizes(
            index=self.index,
            gathered=self.spec.numel * self.dtype.itemsize,
            gradient=self.spec.numel * self.grad_dtype.itemsize,
            shard=blocks,
            numel=self.spec.shard_numel,
            whole=whole,
        )

    def _numel(self, kind: str) -> int:
        return self.spec.shard_numel if self._partitions(kind) else self.spec.numel

    def _partitions(self, kind: str) -> bool:
        return partitions(kind, self._stage, self._ranks)

    @property
    def has_master(self) -> bool:
        """A full-precision copy is kept: the group trains in 16 bits, or is fp32 that computes in 16 bits."""
        lowered = self.params[0].dtype == torch.float32 != self.dtype
        return self.dtype.is_floating_point and self.dtype != torch.float32 and (self.trains or lowered)


def plan_groups(module: nn.Module, config: Config, ranks: int) -> tuple[list[UnitPlan], list[GroupPlan]]:
    """The units of `module` and its groups, in order of first use in the module tree; raises UsageError by name."""
    if MODEL_ATTRIBUTE in module.__dict__:
        raise UsageError("this model is sharded already: call tiered.close(model) before sharding it again")
    for name, param in module.named_parameters():
        _check(name, param)
    _check_memory(module)
    units = find_units(module, config.groups)
    kept = {id(p) for m in module.modules() if isinstance(m, _KEEP_DTYPE) for p in m._parameters.values()}
    groups: list[GroupPlan] = []
    for unit in units:
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[nn.Parameter]] = {}
        for param in unit.params:
            lowers = param.is_floating_point() and id(param) not in kept
            dtype = (config.precision.param_dtype or param.dtype) if lowers else param.dtype
            kinds.setdefault((dtype, param.dtype, param.requires_grad), []).append(param)
        for (dtype, _, _), params in kinds.items():
            groups.append(GroupPlan(len(groups), unit.name or "root", params, dtype, config, ranks))
    if not groups:
        raise UsageError("the model has no parameters to shard")
    return units, groups


def gather_paths(module: nn.Module, units: list[UnitPlan], groups: list[GroupPlan]) -> list[list[int]]:
    """For each unit, the groups present at once while it computes: its own, borrowed, and those of units around it."""
    of_param = {id(p): g.index for g in groups for p in g.params}
    used = {id(u.module): [of_param[id(p)] for p in (*u.params, *u.borrowed)] for u in units}
    paths: list[list[int]] = []

    def walk(current: nn.Module, around: list[int]) -> None:
        here = around + used.get(id(current), [])
        if id(current) in used:
            paths.append(here)
        for child in current.children():
            walk(child, here)

    walk(module, [])
    return paths


def build(
    module: nn.Module,
    config: Config,
    runtime: Runtime,
    plans: tuple[list[UnitPlan], list[GroupPlan]],
    placement: Placement,
    kernels: Kernels,
    ready: Callable[[], None],
) -> ShardedModel:
    """Move the module's parameters into the store and take the module over. On failure nothing stays behind in the
    store; parameters already moved are given back, unless other ranks have their shards.

    ready: called when all there is to be taken of memory and drives has been, and the module is still untouched.
    """
    units, group_plans = plans
    groups = [ParamGroup(p.index, p.name, p.params, p.spec, runtime) for p in group_plans]
    for group, plan in zip(groups, group_plans, strict=True):
        home = placement.homes[plan.index, "param"]
        group.settle_in(plan.dtype, home, sticky=plan.index in placement.sticky)
        for kind, nbytes in plan.sizes().shard.items():
            if kind != "param":
                residence.add_block(group, kind, nbytes, placement.homes[plan.index, kind])
                group.blocks[kind].next_use = plan.index  # a step goes through the groups in order
    model = ShardedModel(module, config, runtime, groups, placement, kernels)
    model.grads = [_grads(model, g, p.grad_dtype) for g, p in zip(groups, group_plans, strict=True)]
    ready()
    try:
        if model.reducer is not None and runtime.traffic is not None:
            runtime.traffic.start(groups, model)
            model.reducer.start([grads for grads in model.grads if isinstance(grads, SharedGrads)])
            initial.equalize(module, groups, runtime, refuse=config.initial_values == "equal")
        _fill_and_take(model, group_plans)
        if runtime.traffic is not None:
            runtime.traffic.exchange.open()
        _install(model, units)
        for group in groups:
            if group.index in placement.sticky and group.nbytes:
                group.begin_fetch()
                model.executor.expect(group)
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what the user must see
            model.close(keep_weights=not runtime.several)
        raise
    return model


def _grads(model: ShardedModel, group: ParamGroup, dtype: torch.dtype) -> GroupGrads:
    if model.reducer is not None:
        shared = PartitionedGrads if model.runtime.partitions("grad") else WholeGrads
        return shared(group, dtype, model.kernels, model.departures, model.reducer)
    return (ResidentGrads if group.resident else GroupGrads)(group, dtype, model.kernels, model.departures)


def _check(name: str, param: nn.Parameter) -> None:
    if ATTRIBUTE in param.__dict__ and isinstance(param.__dict__[ATTRIBUTE], ParamHome):
        raise UsageError(
            f"parameter '{name}' belongs to a sharded model already: call tiered.close on that model first"
        )
    if type(param) not in (nn.Parameter, GuardedParameter):
        raise UsageError(
            f"parameter '{name}' is a {type(param).__name__}: only plain torch.nn.Parameter can be sharded"
        )
    if param.is_meta:
        raise UsageError(
            f"parameter '{name}' is on the meta device: build the model under tiered.deferred_init(config)"
        )
    if param.layout is not torch.strided:
        raise UsageError(f"parameter '{name}' has layout {param.layout}: only strided tensors can be sharded")
    if param.device.type != "cpu":
        raise UsageError(f"parameter '{name}' is on {param.device}: build the model on the CPU; tiered moves it")
    if (param.is_floating_point() and param.dtype not in _DTYPES) or param.is_complex():
        raise UsageError(f"parameter '{name}' is {param.dtype}: use float32, bfloat16 or float16 (masters are fp32)")


def _check_memory(module: nn.Module) -> None:
    """Two Parameters over the same memory would come apart, and one that repeats its memory would be made whole."""
    names = {name for name, _ in module.named_parameters()}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not param.numel() or param.layout is not torch.strided or param.is_meta:
            continue
        start = int(param.storage_offset())
        extent = 1 + int(sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)))
        if extent < param.numel() and isinstance(param, nn.Parameter):
            raise UsageError(
                f"parameter '{name}' repeats its memory (expanded?): give it memory of its own, clone() it"
            )
        with torch._C.DisableTorchFunctionSubclass():  # of those that are parked none but the viewed have any memory
            storage = param.untyped_storage()
        if storage.nbytes():
            spans.setdefault(storage._cdata, []).append((start, start + extent, name))
    for found in spans.values():
        found.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end and (first in names or second in names):
                raise UsageError(
                    f"parameters '{first}' and '{second}' share memory without being one Parameter: tie them by "
                    f"assigning the same Parameter object, or clone() one"
                )


def _fill_and_take(model: ShardedModel, plans: Sequence[GroupPlan]) -> None:
    names = {id(p): name for name, p in model.module.named_parameters()}
    for group, plan in zip(model.groups, plans, strict=True):
        if group.runtime.several:
            initial.take(group.params)
        dtypes = [p.dtype for p in group.params]
        for kind in ("param", "master"):
            if kind in group.blocks:
                _fill(group, kind, plan.dtype if kind == "param" else torch.float32)
        _take(model, group, dtypes, names)
        give_back_freed()


def _fill(group: ParamGroup, kind: str, dtype: torch.dtype) -> None:
    """Write what this rank has of one block from the parameters' own values, a window at a time."""
    store, block = group.runtime.store, group.blocks[kind]
    base, end = group.span(kind)
    step = WINDOW_BYTES // dtype.itemsize
    staging = store.staging(min(WINDOW_BYTES, block.nbytes), f"filling group '{group.name}'")
    try:
        for start in range(base, end, step):
            stop = min(start + step, end)
            _compose(group, staging.view(dtype, 0, stop - start), start)
            offset, nbytes = (start - base) * dtype.itemsize, (stop - start) * dtype.itemsize
            if block.home is Tier.DEVICE:
                store.patch(block, staging.bytes[:nbytes], offset)
            else:
                store.write(block, staging, offset=offset, nbytes=nbytes).wait()
    finally:
        store.unstage(staging)


@torch.no_grad()
def _compose(group: ParamGroup, window: torch.Tensor, start: int) -> None:
    """Fill `window` with the group's flat elements from `start` on: the parameters' values, zeros between them."""
    window.zero_()
    stop = start + window.numel()
    for param, slot in zip(group.params, group.spec.slots, strict=True):
        low, high = max(start, slot.start), min(stop, slot.stop)
        if low < high:
            window[low - start : high - start] = initial.flat(param)[low - slot.start : high - slot.start]


def _take(model: ShardedModel, group: ParamGroup, dtypes: Sequence[torch.dtype], names: dict[int, str]) -> None:
    for position, param in enumerate(group.params):
        parked: Any = param.__dict__.get(ATTRIBUTE)
        if parked is not None:
            parked.forget()
        home = ParamHome(names[id(param)], group, position, dtypes[position], model)
        param.__dict__[ATTRIBUTE] = home
        model.homes.append(home)
    pending: list[torch.Tensor | None] = []
    for param in group.params:
        pending.append(param.grad)
        param.grad = None
    with torch._C.DisableTorchFunctionSubclass():
        group.adopt()
    for home, grad in zip(model.homes[-len(group.params) :], pending, strict=True):
        home.trainable()
        if grad is not None:
            home.set_grad(grad)


def _install(model: ShardedModel, plans: list[UnitPlan]) -> None:
    of_param = {id(p): g for g in model.groups for p in g.params}
    device = model.runtime.device.torch_device
    for plan in plans:
        groups = {of_param[id(p)].index: of_param[id(p)] for p in (*plan.params, *plan.borrowed)}
        unit = Unit(plan.name, plan.module, list(groups.values()))
        unit.reducer = model.reducer
        if not plan.name:
            unit.input_dtype = model.config.precision.param_dtype if model.config.precision.cast_inputs else None
            unit.input_device = None if device.type == "cpu" else device
        unit.install()
        model.units.append(unit)
    for module in model.module.modules():
        if any(ATTRIBUTE in p.__dict__ for p in module._parameters.values() if p is not None):
            statedict.install(module)
            model.holders.append(module)
    buffers.move(model.module, device)
    model.module.__dict__[MODEL_ATTRIBUTE] = model
    model.module.__class__ = as_sharded_class(type(model.module))

"""The public verbs: deferred_init, shard, gather, stats, close.

Each assembles or asks a `ShardedModel`; the work is done in the layers below. Invariant: resources (threads, files,
memory) are acquired last, after everything that can be checked has been, and released if anything fails after that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from tiered.config import Config
from tiered.device import cuda
from tiered.device.base import Device
from tiered.device.cpu import CpuDevice
from tiered.device.emulated import EmulatedDevice
from tiered.device.host import available_bytes
from tiered.errors import ConfigError, UsageError
from tiered.io.swapfile import SwapSpace
from tiered.optim import kernels
from tiered.stats import Meter, Stats
from tiered.store.store import WINDOW_BYTES, TieredStore
from tiered.store.tier import Budget, Tier
from tiered.zero.build import build, gather_paths, plan_groups
from tiered.zero.collectives import Ranks
from tiered.zero.grads import Kernels
from tiered.zero.guard import home_of
from tiered.zero.home import ParamHome
from tiered.zero.init import Nursery
from tiered.zero.model import MODEL_ATTRIBUTE, ShardedModel
from tiered.zero.placing import place_groups
from tiered.zero.runtime import Runtime

M = TypeVar("M", bound=nn.Module)
_HOST_SHARE = 0.8  # of what is available, where no host_budget is given
_DEVICE_SHARE = 0.9  # of what a GPU has free, where no device_budget is given


@contextlib.contextmanager
def deferred_init(config: Config) -> Iterator[None]:
    """Build a model inside, with only part of it in memory at a time; its values are those of plain construction.

    Parameters that do not fit half the host budget are parked in the swap directory until `shard` takes them, or until
    they are touched again. Without a swap directory nothing is parked. Raises what opening the directory raises.
    """
    _check_config(config)
    if not config.directories:
        yield
        return
    limit = _host_limit(config) // 2
    store = TieredStore(Budget(Tier.HOST, max(limit, WINDOW_BYTES)), _open_space(config, 0), Meter())
    nursery = Nursery(store, limit // 2)
    with nursery.watching():
        yield


def shard(model: M, config: Config) -> M:
    """Partition `model` over ranks and tiers, in place; returns the same module, which now trains within the budgets.

    Use it as the plain module it was: the same Parameter objects, names, shapes and state_dict. As a context manager
    it closes itself. Raises ConfigError where the budgets cannot hold the model (with the bytes that would),
    UsageError for a module that is not supported, SwapDirectoryError or SwapFullError for the drive; the module is then
    as it was.
    """
    _check_config(config)
    if not isinstance(model, nn.Module):
        raise UsageError(f"shard() takes a torch.nn.Module, got {type(model).__name__}")
    kind = _device_name(config)
    ranks = Ranks("cuda" if kind == "cuda" else "cpu")
    plans = plan_groups(model, config, ranks.size)
    units, groups = plans
    host_limit = _host_limit(config)
    meter = Meter()
    with contextlib.ExitStack() as undo:
        device = _open_device(kind, config)
        undo.callback(device.close)
        if config.optimizer_tier == "device" and ranks.size > 1 and not device.in_place:
            raise ConfigError(
                f"optimizer_tier='device' with {ranks.size} ranks: this version keeps optimizer states on the device "
                f"for one rank only: use optimizer_tier='auto', 'host' or 'nvme'"
            )
        placement = place_groups(
            [g.sizes() for g in groups],
            gather_paths(model, units, groups),
            config,
            host_limit,
            in_place=device.in_place and ranks.size == 1,
            lone=ranks.size == 1,
            free=int(device.free_bytes() * _DEVICE_SHARE) if kind == "cuda" else None,
        )
        space = _open_space(config, ranks.rank) if config.directories else None
        if space is not None:
            undo.callback(space.close)
        store = TieredStore(Budget(Tier.HOST, host_limit), space, meter, device=device)
        budget = Budget(Tier.DEVICE, placement.device_limit)
        runtime = Runtime(device=device, store=store, budget=budget, meter=meter, ranks=ranks)
        build(model, config, runtime, plans, placement, Kernels(_accumulate, kernels.sum_of_squares))
        undo.pop_all()
    return model


def close(model: nn.Module, *, keep_weights: bool = True) -> None:
    """End sharding: the model is a plain module again, and memory, threads, descriptors and swap files are given back.

    keep_weights: bring the weights into ordinary memory. With False the parameters are left on the meta device, without
    values, for a model whose weights do not fit. Raises BudgetError, before anything is touched, where the weights do
    not fit the memory available. Idempotent; gradients and optimizer states end with it.
    """
    sharded = model.__dict__.get(MODEL_ATTRIBUTE)
    if sharded is not None:
        sharded.close(keep_weights=keep_weights)


@contextlib.contextmanager
def gather(module_or_params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Full values of a module's parameters (or of the parameters given) inside; plain Parameters, any torch code works.

    modify: edits reach every copy of the values, on every rank (those of rank 0). Without it an edit is kept, and
    named as an error at the end.
    Raises BudgetError where the parameters do not fit the device budget at once: gather fewer.
    """
    params: list[torch.Tensor]
    if isinstance(module_or_params, nn.Module):
        params = list(module_or_params.parameters())
    elif isinstance(module_or_params, torch.Tensor):
        params = [module_or_params]
    else:
        params = list(module_or_params)
    homes = [home for home in map(home_of, params) if isinstance(home, ParamHome)]
    with contextlib.ExitStack() as scope:
        for sharded in {id(h.model): h.model for h in homes}.values():
            scope.enter_context(sharded.gathered([h for h in homes if h.model is sharded], modify))
        yield


def stats(model: nn.Module) -> Stats:
    """A frozen snapshot of a sharded model's counters. Raises UsageError for a model that is not sharded."""
    sharded = _sharded(model)
    sharded.settle()
    sharded.executor.poll()
    runtime, meter = sharded.runtime, sharded.runtime.meter
    nvme = sum(b.nbytes for b in runtime.store.blocks() if b.home is Tier.NVME)
    allocated, most = runtime.device.allocated() or (0, 0)
    placement: dict[str, dict[str, int]] = {}
    for block in runtime.store.blocks():
        tiers = placement.setdefault(block.key.kind, {})
        tiers[block.home.value] = tiers.get(block.home.value, 0) + block.nbytes
    return Stats(
        steps=meter.steps,
        skipped_steps=meter.skipped_steps,
        read_bytes={tier.value: meter.read[tier.value] for tier in Tier},
        written_bytes={tier.value: meter.written[tier.value] for tier in Tier},
        resident_bytes={"device": runtime.budget.used, "host": runtime.store.host.used, "nvme": nvme},
        peak_bytes={"device": runtime.budget.peak, "host": runtime.store.host.peak, "nvme": nvme},
        staging_buffers=runtime.store.staged,
        stall_seconds=dict(meter.stalls),
        hit_rate=meter.hits / meter.uses if meter.uses else 1.0,
        placement=placement,
        pinned_bytes=runtime.device.pinned_bytes(),
        activation_bytes=sharded.room.activations,
        device_allocated_bytes=allocated,
        device_peak_allocated_bytes=most,
        device_fragmentation_bytes=runtime.device.fragmentation_bytes(),
    )


# --- inside ---


def _sharded(model: nn.Module) -> ShardedModel:
    sharded = model.__dict__.get(MODEL_ATTRIBUTE) if isinstance(model, nn.Module) else None
    if not isinstance(sharded, ShardedModel):
        raise UsageError("this model is not sharded: call tiered.shard(model, config) first")
    return sharded


def _check_config(config: Any) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: give a tiered.Config(...)")


def _host_limit(config: Config) -> int:
    if isinstance(config.host_budget, int):
        return config.host_budget
    return int(available_bytes() * _HOST_SHARE / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # torchrun's ranks here


def _open_space(config: Config, rank: int) -> SwapSpace:
    return SwapSpace(config.directories, rank=rank, threads=config.io_threads)


def _device_name(config: Config) -> str:
    return config.device or ("cuda" if cuda.available() else "cpu")


def _open_device(kind: str, config: Config) -> Device:
    if kind == "cpu":
        return CpuDevice()
    return EmulatedDevice(config.emulation) if kind == "emulated" else cuda.CudaDevice()


def _accumulate(dst: torch.Tensor, src: torch.Tensor, add: bool) -> float:
    return kernels.accumulate(dst, src, add=add)

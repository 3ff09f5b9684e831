"""The public verbs: deferred_init, shard, gather, no_sync, average, stats, close.

Each assembles or asks a `ShardedModel`; the work is done in the layers below. Invariant: resources (threads, files,
memory) are acquired last, after everything that can be checked has been, and released if anything fails after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tiered.config import Config, Emulation, format_size
from tiered.device import cuda
from tiered.device.base import Device
from tiered.device.cpu import CpuDevice
from tiered.device.emulated import EmulatedDevice
from tiered.device.host import available_bytes
from tiered.errors import ConfigError, UsageError
from tiered.io.commit import Identity
from tiered.io.generations import Durability
from tiered.io.swapfile import SwapSpace
from tiered.optim import kernels
from tiered.schedule.limit import DriveCount, Recorder
from tiered.stats import Meter, Stats
from tiered.store.store import TieredStore
from tiered.store.tier import Budget, Tier
from tiered.store.window import WINDOW_BYTES
from tiered.timeline import Timeline
from tiered.zero import lasting
from tiered.zero.agreement import Call
from tiered.zero.build import GroupPlan, build, gather_paths, plan_groups
from tiered.zero.collectives import Ranks
from tiered.zero.exchange import Exchange
from tiered.zero.grads import Kernels
from tiered.zero.guard import home_of
from tiered.zero.home import ParamHome
from tiered.zero.init import Nursery
from tiered.zero.joining import HOST_SHARE, Joining, joined
from tiered.zero.model import MODEL_ATTRIBUTE
from tiered.zero.module import sharded_model
from tiered.zero.partition import UnitPlan
from tiered.zero.parts import InMemory, Keep, Muster, OnDrive
from tiered.zero.placing import Placement, place_groups, serving_bytes
from tiered.zero.runtime import Runtime, partitions
from tiered.zero.traffic import Traffic

M = TypeVar("M", bound=nn.Module)
_LOGGER = logging.getLogger("tiered")
_DEVICE_SHARE = 0.9  # of what a GPU has free, where no device_budget is given


@contextlib.contextmanager
def deferred_init(config: Config) -> Iterator[None]:
    """Build a model inside, with only part of it in memory at a time; its values are those of plain construction.

    Parameters beyond a quarter of the host budget are parked until `shard` takes them, or until they are touched again:
    in the swap directory where there is one. With several ranks each keeps its part of a parked parameter, without a
    swap directory in RAM, within the host budget; with one rank and no swap directory nothing is parked.

    With several ranks all draw from rank 0's torch random stream inside, and must run the same program: parking a
    parameter, and touching a parked one, inside or before `shard`, are calls that all make. A rank that came with
    another stream gets its own back; values from elsewhere are rank 0's. Raises what opening the directory raises,
    BudgetError or SwapFullError where parked parameters do not fit, RankError where ranks do not do the same.
    """
    _check_config(config)
    ranks = _ranks(config)
    if ranks.size == 1 and not config.directories:
        yield
        return
    host = _host_limit(config)
    limit = host // 4  # of whole parameters
    with contextlib.ExitStack() as undo:
        with joined(ranks, "deferred_init()"):
            space = _open_space(config, ranks.rank, None) if config.directories else None
        if space is not None:
            undo.callback(space.close)
        muster = Muster(ranks, config.rank_timeout_s) if ranks.size > 1 else None
        if muster is not None:
            undo.callback(muster.close)
            limit = muster.begin(limit)
        keep: Keep = InMemory(host, limit)
        if space is not None:
            keep = OnDrive(TieredStore(Budget(Tier.HOST, max(host // 2, WINDOW_BYTES)), space, Meter()))
        undo.pop_all()
    drawing = muster.drawing() if muster is not None else contextlib.nullcontext()
    with drawing, Nursery(keep, limit, muster).watching():
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
    ranks = _ranks(config)
    with joined(ranks, "shard()") as run:
        plans = plan_groups(model, config, ranks.size)
        limits = run.compare(model, config, plans[1], available_bytes())
        host_limit = limits.host_bytes(config)
        with contextlib.ExitStack() as undo:
            undo.callback(ranks.close)
            _build(model, config, run, plans, host_limit, undo)
            undo.pop_all()
    return model


def _build(
    model: nn.Module,
    config: Config,
    run: Joining,
    plans: tuple[list[UnitPlan], list[GroupPlan]],
    host_limit: int,
    undo: contextlib.ExitStack,
) -> None:
    """Open the resources of a sharded model, and build it on them; `undo` gives them back."""
    units, groups = plans
    ranks, kind = run.ranks, _device_name(config)
    meter = Meter(_open_timeline(config, ranks))
    undo.callback(meter.close)
    device = _open_device(kind, config)
    undo.callback(device.close)
    sizes = [g.sizes() for g in groups]
    placement = place_groups(
        sizes,
        gather_paths(model, units, groups),
        config,
        host_limit,
        in_place=device.in_place and not partitions("param", config.stage, ranks.size),
        apart=not device.in_place,
        ranks=ranks.size,
        free=int(device.free_bytes() * _DEVICE_SHARE) if kind == "cuda" else None,
    )
    space, ephemeral = _open_lasting(model, config, run, groups, placement, undo)
    budget, host = Budget(Tier.DEVICE, placement.device_limit), Budget(Tier.HOST, host_limit)
    _watch(meter, groups, budget, host, space)
    store = TieredStore(host, space, meter, device=device)
    traffic = None
    if ranks.size > 1:
        exchange = Exchange(ranks, meter, len(groups), config.rank_timeout_s)
        serving = serving_bytes([s for s in sizes if placement.homes[s.index, "param"] is Tier.NVME])
        traffic = Traffic(exchange, device, store, meter, _average, serving)
        undo.callback(traffic.close)
    runtime = Runtime(
        device=device,
        store=store,
        budget=budget,
        meter=meter,
        ranks=ranks,
        stage=config.stage,
        traffic=traffic,
    )
    arithmetic = Kernels(_accumulate, kernels.sum_of_squares, _average)

    def ready() -> None:
        run.agree()
        ranks.connect()

    sharded = build(model, config, runtime, plans, placement, arithmetic, ready)
    sharded.ephemeral = ephemeral
    sharded.recorder = _recorder(config, runtime, space)


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


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside keeps this rank's gradients to itself: they are added up, whole, on the host, and averaged over
    ranks by the next backward outside, or by `step`. It costs the bytes of all gradients on every rank, and saves one
    reduction of them for each backward. With one rank it changes nothing. Stage 1 does so by itself.
    """
    reducer = sharded_model(model).reducer
    with reducer.deferring() if reducer is not None else contextlib.nullcontext():
        yield


def average(model: nn.Module, value: float) -> float:
    """The mean of `value` over ranks, as for a loss that is shown; every rank calls it. Raises RankError otherwise."""
    runtime = sharded_model(model).runtime
    if not runtime.several:
        return float(value)
    ranks, number = runtime.ranks, float(value)
    return runtime.together(Call.AVERAGE, "average()", lambda: ranks.sum([number])[0] / ranks.size)


def stats(model: nn.Module) -> Stats:
    """A frozen snapshot of a sharded model's counters. Raises UsageError for a model that is not sharded."""
    sharded = sharded_model(model)
    sharded.settle()
    sharded.executor.poll()
    runtime, meter = sharded.runtime, sharded.runtime.meter
    allocated, most = runtime.device.allocated() or (0, 0)
    drives = runtime.store.space.stats() if runtime.store.space is not None else None
    recorder, numel = sharded.recorder, sum(group.spec.numel for group in sharded.groups)
    nvme = sum(drive.file_bytes for drive in drives.drives) if drives else 0
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
        rank=runtime.ranks.rank,
        ranks=runtime.ranks.size,
        collective_elements=dict(meter.collective_elements),
        collective_bytes=dict(meter.collective_bytes),
        drive_retries=drives.retries if drives else 0,
        drive_stalls=drives.stalls if drives else 0,
        last_step=None if recorder is None else recorder.last,
        mean_step=None if recorder is None else recorder.mean(),
        bytes_per_parameter={} if recorder is None else {k: n / max(numel, 1) for k, n in recorder.moved().items()},
        drives=() if recorder is None else recorder.drives(),
    )


# --- inside ---


def _check_config(config: Any) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: give a tiered.Config(...)")


def _open_timeline(config: Config, ranks: Ranks) -> Timeline | None:
    """Raises ConfigError where its file cannot be made."""
    if config.trace is None:
        return None
    path = Path(config.trace)
    if ranks.size > 1:
        path = path.with_name(f"{path.stem}-r{ranks.rank}{path.suffix}")
    try:
        return Timeline(path, ranks.rank)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"trace='{path}' cannot be written: {reason}; give a file in a folder that is there"
        ) from error


def _watch(meter: Meter, groups: list[GroupPlan], device: Budget, host: Budget, space: SwapSpace | None) -> None:
    def occupancy() -> dict[str, int]:
        return {"device": device.used, "host": host.used, "nvme": 0 if space is None else space.file_bytes}

    meter.watch([group.name for group in groups], {"device": device.limit, "host": host.limit}, occupancy)


def _recorder(config: Config, runtime: Runtime, space: SwapSpace | None) -> Recorder:
    def drives() -> list[DriveCount]:
        counted = () if space is None else space.stats().drives
        return [DriveCount(d.path, d.bytes_read, d.bytes_written, d.busy_seconds) for d in counted]

    emulated = config.emulation if config.device == "emulated" else Emulation()
    speeds = {"to the device": emulated.h2d_bytes_per_s, "from the device": emulated.d2h_bytes_per_s}
    links = {name: speed for name, speed in speeds.items() if speed is not None}
    in_place = runtime.device.in_place
    return Recorder(runtime.meter, drives, in_place=in_place, links=links, endurance=config.endurance)


def _host_limit(config: Config) -> int:
    """Of what is built before `shard`: as far as one rank can know by itself."""
    if isinstance(config.host_budget, int) and config.budgets == "rank":
        return config.host_budget
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's ranks on this node
    return (config.host_budget if isinstance(config.host_budget, int) else int(available_bytes() * HOST_SHARE)) // here


def _ranks(config: Config) -> Ranks:
    return Ranks("cuda" if _device_name(config) == "cuda" else "cpu", config.rank_timeout_s)


def _open_lasting(
    model: nn.Module,
    config: Config,
    run: Joining,
    groups: list[GroupPlan],
    placement: Placement,
    undo: contextlib.ExitStack,
) -> tuple[SwapSpace | None, str | None]:
    """The swap space, if there is one, with what of a dead run is to be gone on from protected; and why nothing of this
    run can be gone on from, if so."""
    ranks = run.ranks
    ephemeral = lasting.ephemeral(groups, placement, config)
    space = None
    if config.directories:
        known = lasting.identity(model, groups, placement, config, ranks.rank, ranks.size)
        space = _open_space(config, ranks.rank, None if ephemeral else Identity(*known))
        undo.callback(space.close)
        need = lasting.bytes_needed(groups, placement)
        fresh = space.generations is not None and not space.generations.untouched
        if fresh and (free := space.free_bytes()) < need:
            space.close()
            ephemeral = (
                f"two slots of the states take {format_size(need)}, and the drives have {format_size(free)} free, so "
                f"there is one"
            )
            space = _open_space(config, ranks.rank, None)
            undo.callback(space.close)
    generations = None if space is None else space.generations
    chosen = run.choose([] if generations is None else generations.offers, ephemeral)
    if generations is not None:
        generations.choose(chosen.serial, chosen.run, chosen.after)
        if generations.protected is not None:
            _LOGGER.warning(
                "the swap directory has the last step of a run that ended before its time: tiered.resume(model, "
                "optimizer) goes on from it, and the first step taken without that takes its place"
            )
    if chosen.ephemeral is not None and config.directories and config.durability != "none":
        _LOGGER.warning("if this run is killed it can go on from a checkpoint only: %s", chosen.ephemeral)
    return space, chosen.ephemeral


def _open_space(config: Config, rank: int, identity: Identity | None) -> SwapSpace:
    durability: Durability = "power" if config.durability == "power" else "process"
    return SwapSpace(
        config.directories,
        rank=rank,
        threads=config.io_threads,
        timeout_s=config.drive_timeout_s,
        identity=identity,
        durability=durability,
    )


def _device_name(config: Config) -> str:
    return config.device or ("cuda" if cuda.available() else "cpu")


def _open_device(kind: str, config: Config) -> Device:
    if kind == "cpu":
        return CpuDevice()
    return EmulatedDevice(config.emulation) if kind == "emulated" else cuda.CudaDevice()


def _average(dst: torch.Tensor, sources: Sequence[torch.Tensor], divisor: int, add: bool) -> float:
    return float(kernels.average(dst, sources, divisor, add=add, threads=1))  # beside the computation


def _accumulate(dst: torch.Tensor, src: torch.Tensor, add: bool) -> float:
    return kernels.accumulate(dst, src, add=add)

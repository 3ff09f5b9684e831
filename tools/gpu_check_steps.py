"""Part of `tools/gpu_check`: whole training steps of a decoder with random weights, one place for its states at a time.

    python tools/gpu_check_steps.py resident|offload|nvme SETTINGS        run by tools/gpu_check

resident   everything on the device, beside plain torch in the same process, round for round
offload    parameters, gradients and optimizer states in RAM, at two sizes of the batch
nvme       optimizer states on a drive, as many blocks as the drive's measured speed allows in the time there is
Every variant clips the gradient norm to 1 and updates fp32 masters of bf16 parameters with AdamW.
"""

import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu_check_decoder import (
    Figures,
    Machine,
    Settings,
    batch,
    compute_seconds,
    decoder,
    emit,
    train_step,
)
from torch import Tensor, nn

import tiered
from tiered.cli.gpt import GPT, GPTShape

PRECISION = tiered.MixedPrecision(param_dtype=torch.bfloat16)
LR, CLIP = 1e-5, 1.0
STATE_BYTES = 12  # of a parameter: master and two moments
WARM_STEPS = 2  # the first learns the order of use
SLACK_BYTES = 8 << 30  # of RAM, for staging


def main() -> None:
    settings = Settings.given()
    machine = Machine(settings.device)
    {"resident": resident, "offload": offload, "nvme": nvme}[sys.argv[1]](settings, machine)


# --- everything on the device ---


class PlainMixed:
    """Plain torch's way with bf16 parameters: clip, copy gradients to fp32, fused AdamW on the masters, copy back."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.adam = torch.optim.AdamW(self.masters, lr=LR, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.params, CLIP)
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
        self.adam.step()
        torch._foreach_copy_(self.params, self.masters)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


RESIDENT = GPTShape(vocabulary=32768, hidden=2048, layers=24, heads=16)  # 1.34 B parameters
RESIDENT_SMALL = GPTShape(vocabulary=256, hidden=64, layers=3, heads=4)


def resident(settings: Settings, machine: Machine) -> None:
    """Rounds of steps of plain torch and of this project in turn; the ratio is the median of the rounds' ratios."""
    shape, tokens, context = (RESIDENT_SMALL, 64, 32) if settings.small else (RESIDENT, 16384, 2048)
    given = batch(shape, tokens, context, machine.device)
    steps, rounds = (1, 2) if settings.small else (3, 6)

    before = machine.allocated_bytes()
    plain = decoder(shape).to(machine.device)
    plain_optimizer = PlainMixed(plain)
    plain_peak, plain_loss = _warm(machine, plain, plain_optimizer, given, before)

    before = machine.allocated_bytes()
    config = tiered.Config(device=settings.device, param_tier="device", optimizer_tier="device", precision=PRECISION)
    with _sharded(shape, config) as (model, optimizer, built):
        ours_peak, ours_loss = _warm(machine, model, optimizer, given, before)
        if not math.isclose(ours_loss, plain_loss, rel_tol=1e-2):
            raise SystemExit(f"the first loss is {ours_loss}, in plain torch {plain_loss}: the step is wrong")
        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(rounds):
            for name, one, its in (("plain", plain, plain_optimizer), ("ours", model, optimizer)):
                seconds[name].append(machine.seconds(lambda m=one, o=its: train_step(m, o, given), steps))
            if settings.left_s() < 2 * sum(s[-1] for s in seconds.values()) * steps:
                break
        ratios = [mine / theirs for mine, theirs in zip(seconds["ours"], seconds["plain"], strict=True)]
        emit(
            resident={
                "parameters": shape.parameters,
                "tokens": tokens,
                "compared": PlainMixed.__doc__,
                "plain_step_s": statistics.median(seconds["plain"]),
                "ours_step_s": statistics.median(seconds["ours"]),
                "overhead_share": statistics.median(ratios) - 1,
                "overhead_shares": [ratio - 1 for ratio in ratios],
                "plain_peak_bytes": plain_peak,
                "ours_peak_bytes": ours_peak,
                "plain_first_loss": plain_loss,
                "ours_first_loss": ours_loss,
                **built,
                "stats": dataclasses.asdict(tiered.stats(model)),
            }
        )


def _warm(
    machine: Machine, model: nn.Module, optimizer: Any, given: Sequence[Tensor], before: int
) -> tuple[int, float]:
    """Two steps; the most bytes the variant had allocated in the second, and the loss of the first."""
    loss = train_step(model, optimizer, given).item()
    machine.forget_peak()
    train_step(model, optimizer, given)
    machine.synchronize()
    return machine.peak_allocated_bytes() - before, loss


# --- states in RAM ---

OFFLOAD = GPTShape(vocabulary=8192, hidden=4096, layers=30, heads=32, checkpoint_activations=True)  # 6.11 B
OFFLOAD_SMALL = GPTShape(vocabulary=256, hidden=64, layers=4, heads=4, checkpoint_activations=True)


def offload(settings: Settings, machine: Machine) -> None:
    """Steps at 32k tokens, for which the target stands, then at 8k, where the link or the update is the bound."""
    shape = OFFLOAD_SMALL if settings.small else fitting(OFFLOAD, settings.ram_bytes)
    sizes, context = ((64, 32), 32) if settings.small else ((32768, 8192), 2048)
    batches = [batch(shape, tokens, context, machine.device) for tokens in sizes]
    compute = [compute_seconds(machine, shape, given) for given in batches]
    config = tiered.Config(
        device=settings.device,
        device_budget="16MiB" if settings.small else "24GiB",
        host_budget=host_bytes(shape) + (32 << 20 if settings.small else SLACK_BYTES),
        param_tier=settings.tiers,
        optimizer_tier=settings.tiers,
        precision=PRECISION,
    )
    machine.forget_peak()
    with _sharded(shape, config) as (model, optimizer, built):
        construction = {"construction_peak_allocated_bytes": machine.peak_allocated_bytes()}
        emit(
            offload={
                "parameters": shape.parameters,
                "device_budget_bytes": config.device_budget,
                **built,
                **construction,
            }
        )
        for given, compute_s in zip(batches, compute, strict=True):
            if settings.left_s() < 5 * compute_s:
                return
            machine.forget_peak()
            found = measured_steps(settings, machine, model, optimizer, given)
            emit(**{f"offload_{given[0].numel()}": {"compute_s": compute_s, **found}})


def host_bytes(shape: GPTShape) -> int:
    """Bytes of RAM of a shape's states: bf16 parameter and gradient, fp32 master and moments."""
    return (2 + 2 + STATE_BYTES) * shape.parameters


def fitting(shape: GPTShape, ram_bytes: int) -> GPTShape:
    """`shape`, with as many blocks as RAM holds beside a bf16 copy while it is built and 10 GiB for everything else."""
    for layers in range(shape.layers, 0, -1):
        fewer = dataclasses.replace(shape, layers=layers)
        if host_bytes(fewer) + 2 * fewer.parameters + SLACK_BYTES + (10 << 30) <= ram_bytes:
            return fewer
    raise SystemExit(f"{ram_bytes / 2**30:.0f} GiB of RAM hold no block of this decoder")


# --- states on a drive ---

NVME = GPTShape(vocabulary=8192, hidden=3072, layers=26, heads=24, checkpoint_activations=True)  # 2.99 B
NVME_SMALL = GPTShape(vocabulary=256, hidden=64, layers=4, heads=4, checkpoint_activations=True)


def nvme(settings: Settings, machine: Machine) -> None:
    """Steps with optimizer states on a drive and the rest in RAM."""
    shape = NVME_SMALL if settings.small else writable(NVME, settings)
    tokens, context = (64, 32) if settings.small else (32768, 2048)
    given = batch(shape, tokens, context, machine.device)
    compute_s = compute_seconds(machine, shape, given)
    config = tiered.Config(
        device=settings.device,
        device_budget="16MiB" if settings.small else "24GiB",
        host_budget=4 * shape.parameters + (32 << 20 if settings.small else SLACK_BYTES),
        nvme=settings.swap,
        param_tier="host",
        optimizer_tier="nvme",
        precision=PRECISION,
    )
    machine.forget_peak()
    with _sharded(shape, config) as (model, optimizer, built):
        found = measured_steps(settings, machine, model, optimizer, given)
        emit(nvme={"compute_s": compute_s, **found, **built})


def writable(shape: GPTShape, settings: Settings) -> GPTShape:
    """`shape`, with as many blocks as its drive has room for and can fill, and step through three times, in time."""
    drive = settings.probes.get("drive", {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "mixed_bytes_per_s": 1e9})
    room = 0.8 * settings.free_swap_bytes()
    for layers in range(shape.layers, 1, -1):
        fewer = dataclasses.replace(shape, layers=layers)
        states = STATE_BYTES * fewer.parameters
        once = states / drive["write_bytes_per_s"]
        steps = 3 * max(2 * states / drive["mixed_bytes_per_s"], once, states / drive["read_bytes_per_s"])
        if states <= room and once + 1.3 * steps + 15 < settings.left_s():
            return fewer
    return dataclasses.replace(shape, layers=2)


# --- all of them ---


@contextlib.contextmanager
def _sharded(shape: GPTShape, config: tiered.Config) -> Iterator[tuple[GPT, Any, Figures]]:
    """A sharded decoder, its optimizer, and the seconds it took; closed at the end, without its weights."""
    start = time.perf_counter()
    model = decoder(shape)
    made = time.perf_counter()
    tiered.shard(model, config)
    ready = time.perf_counter()
    optimizer = tiered.AdamW(model.parameters(), lr=LR, max_grad_norm=CLIP)
    try:
        yield model, optimizer, {"build_s": made - start, "shard_s": ready - made}
    finally:
        tiered.close(model, keep_weights=False)


def measured_steps(
    settings: Settings, machine: Machine, model: GPT, optimizer: Any, given: Sequence[Tensor]
) -> Figures:
    """Seconds of a step, bytes moved in one, and the device's peak; as many steps as time allows."""
    warm = [machine.seconds(lambda: train_step(model, optimizer, given)) for _ in range(WARM_STEPS)]
    before = tiered.stats(model)
    seconds: list[float] = []
    loss = torch.zeros(())
    for _ in range(3):
        if seconds and settings.left_s() < 2 * seconds[-1]:
            break

        def step() -> None:
            nonlocal loss
            loss = train_step(model, optimizer, given)

        seconds.append(machine.seconds(step))
    if not math.isfinite(loss.item()):
        raise SystemExit(f"the loss is {loss.item()} after {len(seconds) + WARM_STEPS} steps: the step is wrong")
    after = tiered.stats(model)
    tokens = given[0].numel()
    step_s = statistics.median(seconds)
    moved = {
        f"moved_{name}_bytes": (getattr(after, way)[tier] - getattr(before, way)[tier]) // len(seconds)
        for name, way, tier in (
            ("h2d", "written_bytes", "device"),
            ("d2h", "read_bytes", "device"),
            ("read", "read_bytes", "nvme"),
            ("write", "written_bytes", "nvme"),
        )
    }
    stalls = {
        f"stall_{cause}_s": (seconds_ - before.stall_seconds.get(cause, 0.0)) / len(seconds)
        for cause, seconds_ in after.stall_seconds.items()
    }
    return {
        "parameters": model.shape.parameters,
        "tokens": tokens,
        "step_s": step_s,
        "steps_s": seconds,
        "warm_steps_s": warm,
        "tokens_per_s": tokens / step_s,
        "peak_allocated_bytes": machine.peak_allocated_bytes(),
        "loss": loss.item(),
        **moved,
        **needed_bytes(after),
        **stalls,
        "stats": dataclasses.asdict(after),
    }


def needed_bytes(stats: tiered.Stats) -> Figures:
    """Bytes that a step must move at least, from where each kind of state lives.

    Parameters that are away come twice, for forward and for backward (recomputation is part of it); gradients leave
    once. An update reads gradient, master and moments and writes master, moments and parameter: 28 bytes in all.
    """

    def homes(kind: str, *tiers: str) -> int:
        return sum(stats.placement.get(kind, {}).get(tier, 0) for tier in tiers)

    states = sum(homes(kind, "nvme") for kind in ("master", "exp_avg", "exp_avg_sq"))
    return {
        "needed_h2d_bytes": 2 * homes("param", "host", "nvme"),
        "needed_d2h_bytes": homes("grad", "host", "nvme"),
        "needed_read_bytes": states,
        "needed_write_bytes": states,
        "adam_bytes": 28 * homes("exp_avg", "host", "nvme") // 4,
    }


if __name__ == "__main__":
    main()

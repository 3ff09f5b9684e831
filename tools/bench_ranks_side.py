"""One rank of one side of `tools/bench_ranks`: trains the reference GPT and writes what it measured.

    python tools/bench_ranks_side.py SIDE --steps 4 --nvme FOLDER --out FOLDER [--small]

Started once per rank with the variables of torchrun (or by it). Writes RANK.json into the folder of --out.

1. Every side starts from the same weights, sees the same batches, clips the global norm to 1 and updates with AdamW.
2. A side differs from another in `SIDES` alone: how it wraps the model, and how it takes its step.
3. Memory is this rank's, above what it held before the model was built and after a tiny step had loaded what it needs:
   the peak as the kernel counts resident pages (VmHWM), in training alone, as every side builds the whole model first;
   what is kept between steps as the anonymous pages of /proc/self/smaps_rollup, which no other process shares, after
   the C library has given back what is free.
4. Elements on the wire are what the kernel counts as received by this process's TCP sockets, so they are nobody's own
   account: a whole tensor of E elements that N ranks gather or reduce brings each of them (N-1)/N E.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import tiered
from tiered.cli.gpt import GPT, GPTShape
from tiered.cli.memory import ResidentGrowth

BATCH, CONTEXT = 2, 128  # of all ranks together: as `tools/bench_step`
LR, CLIP = 1e-4, 1.0
NVME_HOST_BUDGET, NVME_HOST_BUDGET_SMALL = "320MiB", "32MiB"  # of a rank: a third of its states, or so
TCP_INFO_BYTES_RECEIVED = 128  # offset in struct tcp_info of linux/tcp.h, 8 bytes
Figures = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """A model that trains: `module` is called with tokens and targets, `step` follows its backward."""

    module: nn.Module
    step: Callable[[], None]
    zero_grad: Callable[[], None]
    sharded: bool  # by tiered, which then says what it keeps and gathers

    def counted_elements(self) -> dict[str, int]:
        """Elements of the whole tensors that tiered says it has gathered and reduced so far; of a peer nothing."""
        return dict(tiered.stats(self.module).collective_elements) if self.sharded else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--steps", type=int, required=True, help="steps to train, the first not counted")
    parser.add_argument("--nvme", type=Path, required=True, help="swap folder of the sides that use a drive")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures of every rank")
    parser.add_argument("--small", action="store_true", help="a model of 4 M parameters")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = measure(given.side, given.steps, given.nvme, small=given.small)
        (given.out / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def shape_of(*, small: bool) -> GPTShape:
    """The model that is trained."""
    return GPTShape(vocabulary=2048, hidden=256, layers=4, heads=4) if small else GPTShape()


def measure(name: str, steps: int, nvme: Path, *, small: bool) -> Figures:
    """Trains one side; returns this rank's figures."""
    warm_up()
    shape = shape_of(small=small)
    before, before_anonymous = ResidentGrowth(), kept_bytes()
    torch.manual_seed(0)
    side = SIDES[name](GPT(shape), nvme, small)
    gc.collect()
    kept_bytes()  # what building has freed is no part of training's peak
    training = ResidentGrowth()
    found = train(side, shape, steps)
    found["peak_bytes"] = training.start_bytes + training.peak_bytes() - before.start_bytes
    for kept in ("kept_bytes", "kept_with_gradients_bytes"):
        found[kept] -= before_anonymous
    if side.sharded:
        placement = tiered.stats(side.module).placement
        found["charged_bytes"] = {kind: sum(tiers.values()) for kind, tiers in placement.items()}
        tiered.close(side.module, keep_weights=False)
    return found


def warm_up() -> None:
    """A step of a tiny model on every rank: allocator, autograd, optimizer and connections exist from here on."""
    tiny = nn.Linear(64, 64)
    tiny(torch.ones(2, 64)).sum().backward()
    dist.all_reduce(tiny.weight.grad)
    torch.nn.utils.clip_grad_norm_(tiny.parameters(), CLIP)
    torch.optim.AdamW(tiny.parameters(), fused=True).step()


def train(side: Side, shape: GPTShape, steps: int) -> Figures:
    """Seconds and loss of every step, memory kept after the last one, elements communicated by all but the first."""
    random = torch.Generator().manual_seed(0)
    text = torch.randint(shape.vocabulary, (BATCH, CONTEXT + 1), generator=random)
    text = text.chunk(dist.get_world_size())[dist.get_rank()]
    seconds, losses = [], []
    received, elements, with_gradients = 0, {}, 0
    for step in range(steps):
        if step == 1:
            received, elements = received_bytes(), side.counted_elements()
        start = time.perf_counter()
        loss: Tensor = side.module(text[:, :-1], text[:, 1:])
        loss.backward()
        side.step()
        spent = time.perf_counter() - start
        if step == steps - 1:
            with_gradients = kept_bytes()
        start = time.perf_counter()
        side.zero_grad()
        seconds.append(round(spent + time.perf_counter() - start, 4))
        losses.append(loss.item())
        del loss
    received = received_bytes() - received
    dist.barrier()  # a rank that is through takes its end of the connections along, and the kernel's counts with them
    ranks = dist.get_world_size()
    counted = {kind: count - elements[kind] for kind, count in side.counted_elements().items()}
    return {
        "step_s": seconds,
        "losses": losses,
        "kept_with_gradients_bytes": with_gradients,
        "kept_bytes": kept_bytes(),
        "wire_elements_per_step": received / 4 * ranks / (ranks - 1) / (steps - 1),
        "counted_elements_per_step": {kind: count / (steps - 1) for kind, count in counted.items()},
    }


# --- the sides ---


def ddp(model: GPT, nvme: Path, small: bool) -> Side:
    """Everything on every rank; gradients are views of the buckets that are reduced, which saves their second copy."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_side(wrapped)


def fsdp2(model: GPT, nvme: Path, small: bool) -> Side:
    """fully_shard on every block and the root, fp32."""
    return fully_sharded(model, OffloadPolicy())


def fsdp2_offload(model: GPT, nvme: Path, small: bool) -> Side:
    """The same with CPU offload. Its pinned memory needs an accelerator and is refused without one; the shards are on
    the CPU either way, so the policy has nothing to move here."""
    return fully_sharded(model, CPUOffloadPolicy(pin_memory=False))


def fully_sharded(model: GPT, policy: OffloadPolicy) -> Side:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return torch_side(fully_shard(model, mesh=mesh, offload_policy=policy))


def torch_side(module: nn.Module) -> Side:
    """Clipping and the update as torch offers them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()

    return Side(module, step, optimizer.zero_grad, sharded=False)


def on_host(stage: int) -> Callable[[GPT, Path, bool], Side]:
    """tiered at one stage, all states on the host."""

    def build(model: GPT, nvme: Path, small: bool) -> Side:
        return tiered_side(model, tiered.Config(device="cpu", stage=stage, param_tier="host", optimizer_tier="host"))

    return build


def stage3_nvme(model: GPT, nvme: Path, small: bool) -> Side:
    """tiered at stage 3, all states on a drive."""
    budget = NVME_HOST_BUDGET_SMALL if small else NVME_HOST_BUDGET
    config = tiered.Config(device="cpu", nvme=nvme, host_budget=budget, param_tier="nvme", optimizer_tier="nvme")
    return tiered_side(model, config)


def tiered_side(model: GPT, config: tiered.Config) -> Side:
    tiered.shard(model, config)
    optimizer = tiered.AdamW(model.parameters(), lr=LR, max_grad_norm=CLIP)
    return Side(model, optimizer.step, optimizer.zero_grad, sharded=True)


SIDES: dict[str, Callable[[GPT, Path, bool], Side]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-offload": fsdp2_offload,
    "stage1": on_host(1),
    "stage2": on_host(2),
    "stage3": on_host(3),
    "stage3-nvme": stage3_nvme,
}


# --- what the operating system counts ---


def kept_bytes() -> int:
    """Anonymous resident bytes of this process, without what is free in the C library's heap."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no line 'Anonymous:': this benchmark needs Linux 5.4 or newer")


def received_bytes() -> int:
    """Bytes of payload that the TCP sockets of this process have received so far."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.stat(f"/proc/self/fd/{number}").st_mode)
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(number))) as found:
            if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_RECEIVED + 8)
                total += struct.unpack_from("Q", info, TCP_INFO_BYTES_RECEIVED)[0]
    return total


if __name__ == "__main__":
    main()

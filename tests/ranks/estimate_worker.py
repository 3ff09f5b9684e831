"""One rank, started by test_estimate.py: shards a model in every case and prints where its bytes are, as JSON.

Usage: estimate_worker.py SWAP. A case is a stage, a precision and a place. Its figures: the bytes of each kind by
`tiered.stats`, once as sharded and once after a step (in fp32 alone: 16-bit arithmetic is slow on some CPUs), and what
is then charged to the host's budget, the gradients still there.
"""

import itertools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tiered

WIDTH, LAYERS = 701, 3  # a multiple of nothing, and so large that padding (pages included) is little of a group
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
STAGES = (1, 2, 3)
DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {  # of the weights and of the gradients as they are kept
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, gradients in fp32": (torch.bfloat16, torch.float32),
}
PLACES = ("host", "nvme", "device")


def case(stage: int, dtypes: str, place: str) -> str:
    """The name of a case."""
    return f"stage {stage}, {dtypes}, {place}"


def measure(stage: int, dtypes: str, place: Any, swap: str) -> dict[str, Any]:
    weights, gradients = DTYPES[dtypes]
    precision = tiered.MixedPrecision(param_dtype=weights, reduce_dtype=gradients)
    tiers = {"param_tier": place, "optimizer_tier": place}
    nvme = swap if place == "nvme" else None
    device = "emulated" if place == "device" else "cpu"
    config = tiered.Config(device=device, stage=stage, precision=precision, host_budget="64MiB", nvme=nvme, **tiers)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    tiered.shard(model, config)
    found: dict[str, Any] = {"sharded": kinds(model)}
    if dtypes == "fp32":
        optimizer = tiered.AdamW(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        found |= {"trained": kinds(model), "charged": tiered.stats(model).resident_bytes["host"]}
    tiered.close(model, keep_weights=False)
    return found


def kinds(model: nn.Module) -> dict[str, int]:
    """Bytes of each kind on this rank, on all tiers together."""
    return {kind: sum(tiers.values()) for kind, tiers in tiered.stats(model).placement.items()}


def main(swap: str) -> None:
    torch.set_num_threads(1)
    found = {case(*each): measure(*each, swap) for each in itertools.product(STAGES, DTYPES, PLACES)}
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

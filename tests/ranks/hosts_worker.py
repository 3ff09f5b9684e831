"""One rank of a run over several hosts, started by torchrun for test_hosts.py; in the test itself, the one-rank run.

Usage: hosts_worker.py train|endless SWAP OUT. `train` trains at stages 3 and 1 and saves the losses and weights as
OUT/<rank>.pt. `endless` writes its process id to OUT/<rank>.started once it trains, and goes on until an error of
tiered, which it saves as OUT/<rank>.json.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tiered

BATCH, WIDTH, STEPS = 4, 16, 3
TIMEOUT_S = 5.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(5) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return (x[:, :5] + self.shift).square().mean()


def sharded(stage: int, swap: Path) -> tuple[Any, tiered.AdamW]:
    torch.manual_seed(3)
    places = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme": swap}
    config = tiered.Config(device="cpu", host_budget="16MiB", stage=stage, rank_timeout_s=TIMEOUT_S, **places)
    model = tiered.shard(Net(), config)
    return model, tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)


def step(model: Any, optimizer: tiered.AdamW, batch: Tensor) -> float:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(stage: int, swap: Path) -> dict[str, Any]:
    """This rank's part of the joined batches: mean losses, and the weights after them."""
    model, optimizer = sharded(stage, swap)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=data)
        losses.append(tiered.average(model, step(model, optimizer, batch.chunk(size)[rank])))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tiered.close(model, keep_weights=False)
    return {"losses": losses, "weights": weights}


def write(path: Path, text: str) -> None:
    """Make a file that is seen whole, or not at all."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def endless(swap: Path, out: Path) -> None:
    model, optimizer = sharded(3, swap)
    rank = dist.get_rank()
    try:
        for number in range(10**9):
            step(model, optimizer, torch.ones(2, WIDTH))
            if number == STEPS:
                write(out / f"{rank}.started", str(os.getpid()))
    except tiered.TieredError as error:
        tiered.close(model, keep_weights=False)
        seen = {"type": type(error).__name__, "message": str(error), "left": os.listdir(swap)}
        write(out / f"{rank}.json", json.dumps(seen))
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    task, swap, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if task == "endless":
        endless(swap, out)
    else:
        seen = {stage: train(stage, swap) for stage in (3, 1)}
        seen["host"] = socket.gethostname()
        torch.save(seen, out / f"{dist.get_rank()}.pt")
        dist.destroy_process_group()

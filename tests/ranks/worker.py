"""One rank of a run, started by test_two_ranks.py: trains as told and saves what it saw.

Usage: worker.py SCENARIO OUT SWAP. Without the variables of torchrun it is the one-rank reference on the joined batch.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tiered

BATCH, WIDTH, STEPS = 4, 16, 3


class Net(nn.Module):
    """Blocks, a parameter at the root, odd and 0-dim ones, and a branch that only some batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(3))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.extra = nn.Parameter(torch.randn(WIDTH) / 4)  # of the root's group: gathered whether used or not
        self.entry = nn.Parameter(torch.randn(WIDTH) / 4)  # used first: its gradient is the last to come
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        x = x + self.entry
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if branch:
            x = x * self.extra
        return (self.head(x) * self.scale + self.shift).square().mean()


def config(scenario: str, swap: str) -> Any:
    if scenario == "host":
        return tiered.Config(device="cpu", host_budget="8MiB")
    if scenario == "device":  # gathered and reduced in a device's own memory, as on several GPUs
        late = tiered.Emulation(max_delay_s=1e-2)
        return tiered.Config(device="emulated", host_budget="8MiB", device_budget="64KiB", nvme=swap, emulation=late)
    return tiered.Config(
        device="cpu", host_budget="1MiB", device_budget="64KiB", nvme=swap, param_tier="nvme", optimizer_tier="nvme"
    )


def train(scenario: str, swap: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Net()
    if scenario == "frozen":
        model.blocks[1].requires_grad_(False)
    with tiered.shard(model, config(scenario, swap)):
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        seen: list[Any] = []
        data = torch.Generator().manual_seed(5)
        for step in range(STEPS):
            batches = [torch.randn(BATCH, WIDTH, generator=data) for _ in range(2 if scenario == "accumulated" else 1)]
            for batch in batches:
                if scenario == "overflow" and step == 1:
                    batch[0, 0] = torch.inf  # in rank 0's half alone
                mine = batch.chunk(size)[rank]
                if scenario == "branch":  # rank 0's half of the joined batch takes the branch, the other does not
                    halves = [mine] if size > 1 else list(batch.chunk(2))
                    losses = [model(half, branch=(rank + i) == 0) for i, half in enumerate(halves)]
                    loss = sum(losses) / len(losses)
                else:
                    loss = model(mine)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(optimizer.grad_norm)
        if scenario == "edited":
            with tiered.gather(model.head, modify=True), torch.no_grad():
                model.head.weight.fill_(float(rank) + 0.25)  # rank 0's edit is everybody's
            model(torch.ones(2, WIDTH)).backward()
            optimizer.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        moments = optimizer.state_dict()["state"]
        moved = dict(tiered.stats(model).read_bytes)
    return {
        "norms": seen, "weights": weights, "moments": moments, "skipped": optimizer.skipped_steps, "moved": moved,
        "after close": {name: value.clone() for name, value in model.state_dict().items()},
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome = train(sys.argv[1], sys.argv[3])
    torch.save(outcome, Path(sys.argv[2]) / f"{os.environ.get('RANK', 'one')}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()

"""One rank of a job under torchrun: trains from where the swap directories are, and dies once where it is told to.

restarted_worker.py SWAP OUT STEPS DIES     DIES: rank 1 kills itself after so many steps of the first attempt
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import tiered

WIDTH = 32


def main(swap: str, out: str, steps: int, dies: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    rank, first = torch.distributed.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    places = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme": swap, "host_budget": "16MiB"}
    with tiered.shard(model, tiered.Config(device="cpu", **places)):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        start = tiered.resume(model, optimizer)
        for step in range(start, steps):
            if first and rank == 1 and step == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = hashlib.sha256()
        for values in (model.state_dict(), *optimizer.state_dict()["state"].values()):
            for name, value in values.items():
                found.update(f"{name}\n".encode() + value.detach().contiguous().numpy().tobytes())
    (Path(out) / f"rank-{rank}").write_text(f"{start} {found.hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

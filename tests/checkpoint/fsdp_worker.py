"""One rank of FSDP2: trains, and saves a folder of torch.distributed.checkpoint; or loads one, and says what it has.

    fsdp_worker.py save FOLDER [flat]   trains three steps, saves, then trains two more; the values go to FOLDER-want.pt
    fsdp_worker.py load FOLDER          loads into a fresh model and optimizer; the values go to FOLDER-got.pt

Owns the program; the test compares.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Tower(nn.Module):
    """Odd shapes, a tied weight, a scalar by its own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.gain
        return nn.functional.cross_entropy(self.head(x) * self.scale, tokens.roll(1))


def batch(seed: int) -> torch.Tensor:
    return torch.randint(11, (9,), generator=torch.Generator().manual_seed(seed))


def made(seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tower()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": decays}, {"params": rest, "weight_decay": 0.0}], lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        model(batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": get_model_state_dict(model, options=full),
        "optim": get_optimizer_state_dict(model, optimizer, options=full),
    }


def main(what: str, folder: str, *form: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    flat = StateDictOptions(flatten_optimizer_state_dict="flat" in form)
    model, optimizer = made(0, 1e-2) if what == "save" else made(9, 1.0)
    if what == "save":
        train(model, optimizer, range(3))
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=flat),
        }
        dcp.save({**state, "progress": 7}, checkpoint_id=folder)
        after = whole(model, optimizer)
        train(model, optimizer, range(3, 5))
        after["later"] = whole(model, optimizer)["model"]
    else:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        after = whole(model, optimizer)
        train(model, optimizer, range(3, 5))
        after["later"] = whole(model, optimizer)["model"]
    if dist.get_rank() == 0:
        torch.save(after, f"{folder}-{'want' if what == 'save' else 'got'}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

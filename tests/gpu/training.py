"""Trains on the GPU in plain torch and in tiered, and brings what was observed to the CPU to be compared.

Owns: the placements on a GPU, sessions there, `observe`. Leaves to `parity.harness` the reference optimizer, the
comparison and the budgets, which are far below what they hold, so that what should move does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import Batch, Case
from parity.harness import ADAM, SEED, Placement, PlainAdamW, Session, budgets
from torch import Tensor, nn

import tiered
from tiered.cli.gpt import GPT, GPTShape

HOST = Placement(name="cuda-host", device="cuda")
NVME = Placement(name="cuda-nvme", device="cuda", param="nvme", optimizer="nvme")
BUDGETED = Placement(name="cuda-budgeted", device="cuda", param="auto")  # some groups stay, the others move
RESIDENT = Placement(name="cuda-resident", device="cuda", param="device", optimizer="device")
MOVED = (HOST, NVME, BUDGETED)  # updated by the host's kernel, so bit-equal to each other

Wrap = Callable[[nn.Module], object]


def config_of(build: Callable[[], nn.Module], place: Placement, swap: Path, **settings: Any) -> tiered.Config:
    """The settings of a placement for one architecture."""
    device_budget, host_budget = budgets(build, place)
    if place is RESIDENT:
        device_budget = None
    return tiered.Config(
        **{"device": "cuda", "device_budget": device_budget, "host_budget": host_budget, "nvme": swap, **settings},
        param_tier=place.param,
        optimizer_tier=place.optimizer,
    )


@contextmanager
def sharded(
    case: Case, place: Placement, swap: Path, *, prepare: Wrap | None = None, **settings: Any
) -> Iterator[Session]:
    """A session in tiered; the swap directory is empty again afterwards."""
    config = config_of(case.build, place, swap, **settings)
    torch.manual_seed(SEED)
    model = case.build()
    if prepare is not None:
        prepare(model)
    with tiered.shard(model, config):
        yield Session(case, model, tiered.AdamW(model.parameters(), **ADAM), config)
    assert not list(swap.iterdir()), "close() left something in the swap directory"


@contextmanager
def plain(case: Case, dtype: torch.dtype | None = None, *, prepare: Wrap | None = None) -> Iterator[Session]:
    """A session in plain torch on the GPU, the model in `dtype` where one is given."""
    torch.manual_seed(SEED)
    model = case.build()
    if prepare is not None:
        prepare(model)
    model.to("cuda", dtype)
    yield Session(case, model, PlainAdamW(model.parameters(), **ADAM), None)


def on_gpu(case: Case) -> Case:
    """The same architecture, its batches on the GPU."""

    def make(seed: int) -> Batch:
        return tuple(part.to("cuda") if isinstance(part, Tensor) else part for part in case.make_batch(seed))

    return replace(case, make_batch=make)


def observe(session: Session, steps: int = 4) -> dict[str, Any]:
    """Losses, norms, weights and moments after some steps."""
    seen = session.train_on(range(steps))
    return on_cpu({"losses": seen, "weights": session.weights(), "moments": session.moments()})


def on_cpu(value: Any) -> Any:
    """Nested containers with every tensor brought to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [on_cpu(entry) for entry in value]
    return value


def decoder_batch(shape: GPTShape, sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens on the GPU, int64 (sequences, context) each."""
    text = torch.randint(shape.vocabulary, (sequences, context + 1), generator=torch.Generator().manual_seed(SEED))
    text = text.to("cuda")
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def decoder(shape: GPTShape, dtype: torch.dtype) -> GPT:
    """A GPT on the CPU with random values drawn on the GPU: drawing 10**9 of them on a CPU takes many seconds."""
    with torch.device("meta"):
        model = GPT(shape).to(dtype)
    model.to_empty(device="cpu")
    generator = torch.Generator("cuda").manual_seed(SEED)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:
                param.copy_(torch.randn(param.shape, device="cuda", generator=generator) * 0.02)
            else:
                param.fill_(float("norm.weight" in name))
    return model


@contextmanager
def sharded_decoder(shape: GPTShape, config: tiered.Config) -> Iterator[tuple[GPT, tiered.AdamW]]:
    """A sharded GPT, built in the dtype it computes in, and its optimizer; closed without its weights.

    The allocator's peak counts from its sharding on.
    """
    model = decoder(shape, config.precision.param_dtype or torch.float32)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tiered.shard(model, config)
    try:
        yield model, tiered.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    finally:
        tiered.close(model, keep_weights=False)


def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One whole training step; returns the loss, on the GPU and not waited for."""
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

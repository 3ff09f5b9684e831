"""16-bit parameters, autocast, flash attention and compiled blocks on a GPU; a captured graph is refused."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.training import HOST, NVME, RESIDENT, observe, on_cpu, on_gpu, plain, sharded
from models import SHORT_GPT, Case
from parity.harness import Placement, Session, same
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiered
from tiered.cli.gpt import GPT, GPTShape

SHORT = on_gpu(SHORT_GPT)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
PLACES = pytest.mark.parametrize("place", [HOST, NVME, RESIDENT], ids=lambda place: place.name)


def scaled_losses(session: Session, steps: int = 3) -> list[float]:
    """Losses of steps whose loss is scaled as fp16 needs; in other dtypes the scale is 1."""
    losses = []
    for seed in range(steps):
        loss = session.model(*session.batch(seed))
        session.optimizer.scale_loss(loss).backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@HALVES
def test_16_bit_training_is_bit_equal_across_tiers(dtype: torch.dtype, swap: Path, exact: None) -> None:
    seen = []
    for place in (HOST, NVME):
        with sharded(SHORT, place, swap, precision=tiered.MixedPrecision(param_dtype=dtype)) as session:
            seen.append(on_cpu({"losses": scaled_losses(session), "weights": session.weights()}))
    same(seen[1], seen[0], exact=True, where=NVME.name)


@HALVES
@PLACES
def test_16_bit_parameters_compute_what_a_16_bit_model_does(
    dtype: torch.dtype, place: Placement, swap: Path, exact: None
) -> None:
    with plain(SHORT, dtype) as session:
        want = session.model(*session.batch(0)).item()
    with sharded(SHORT, place, swap, precision=tiered.MixedPrecision(param_dtype=dtype)) as session:
        losses = scaled_losses(session)
        skipped = session.optimizer.skipped_steps
    assert losses[0] == pytest.approx(
        want, rel=2e-2
    )  # 16 bits, and where a weight lies decides which product kernel is chosen
    assert all(map(math.isfinite, losses))
    assert skipped < len(losses)


class Autocast(nn.Module):
    """A model whose forward runs under autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: torch.Tensor = self.inner(*batch)
        return loss


@PLACES
def test_autocast_follows_plain_torch(place: Placement, swap: Path, exact: None) -> None:
    case = Case("autocast", lambda: Autocast(SHORT_GPT.build()), SHORT.make_batch)
    with plain(case) as session:
        want = observe(session, 2)["losses"]
    with sharded(case, place, swap) as session:
        got = observe(session, 2)["losses"]
    assert got[0][0] == pytest.approx(want[0][0], rel=1e-3)
    same(got, want, exact=False, rtol=1e-2, where="losses and norms")


def flash_decoder() -> GPT:
    return GPT(GPTShape(vocabulary=128, hidden=128, layers=3, heads=2, checkpoint_activations=True))


@PLACES
def test_flash_attention_follows_plain_torch(place: Placement, swap: Path) -> None:
    def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(128, (2, 65), generator=torch.Generator().manual_seed(seed)).to("cuda")
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    case = Case("flash", flash_decoder, tokens)
    precision = tiered.MixedPrecision(param_dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with plain(case, torch.bfloat16) as session:
            want = session.model(*session.batch(0)).item()
        with sharded(case, place, swap, precision=precision) as session:
            losses = scaled_losses(session)
    assert losses[0] == pytest.approx(want, rel=1e-3)
    assert all(map(math.isfinite, losses))


def compile_blocks(model: nn.Module, backend: str) -> None:
    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend)


@pytest.mark.filterwarnings("ignore")  # the compiler's own doing warns
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@PLACES
def test_compiled_blocks_follow_the_same_blocks_in_plain_torch(backend: str, place: Placement, swap: Path) -> None:
    torch.compiler.reset()
    prepare = partial(compile_blocks, backend=backend)
    with plain(SHORT, prepare=prepare) as session:
        want = observe(session, 3)["losses"]
    torch.compiler.reset()
    with sharded(SHORT, place, swap, prepare=prepare) as session:
        got = observe(session, 3)["losses"]
    same(got, want, exact=False, rtol=1e-3, atol=1e-4, where="losses and norms")


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_captured_around_sharded_blocks_is_refused_by_name(swap: Path) -> None:
    with sharded(SHORT, HOST, swap) as session:
        session.train(0)
        batch = session.batch(1)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(tiered.UsageError, match="CUDA graph"), torch.cuda.graph(graph):
            session.model(*batch)
        assert math.isfinite(session.train(2)[0]), "the model trains on after a refusal"

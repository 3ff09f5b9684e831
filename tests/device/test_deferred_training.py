"""Training whose kernels run late gives the bits of training at once, for every architecture and optimizer."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import deferred
import pytest
import torch
import torch.nn.functional as F
from models import CASES, CONV, GPT, MIXED, Case, Gpt, token_batch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

DELAY_S = 2e-3


pytestmark = pytest.mark.usefixtures("one_thread")


class Dropped(nn.Module):
    """Dropout, a batch norm in evaluation, operations in place, a view that is written, and a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24).eval()
        self.down = nn.Linear(24, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 16), (batch,) float32
        hidden = F.dropout(self.norm(self.up(x)), 0.5).mul_(2).add_(1)
        hidden[:, :3].copy_(hidden[:, 3:6] * 2)
        hidden = torch.cat([hidden[:, ::2], hidden[:, 1::2].clamp(min=0.1)], 1).relu_()
        return F.mse_loss(self.down(hidden).squeeze(1), y)


EVERY_CASE = (
    *CASES,
    MIXED,
    Case("dropped", Dropped, MIXED.make_batch),
    Case("reentrant", partial(Gpt, 2, checkpointing="reentrant"), token_batch),
    Case("non-reentrant", partial(Gpt, 2, checkpointing="non-reentrant"), token_batch),
)


def train(case: Case, optimizer: Callable[..., Any], stream: deferred.LateStream | None) -> list[Any]:
    """Losses, gradients, and at the end weights, buffers and moments of two steps; on the device if there is one."""
    torch.manual_seed(3)
    model = case.build()
    for tensor in (*model.parameters(), *model.buffers()):
        if stream is not None:
            stream.took_tensor(tensor.data)
    steps = optimizer(model.parameters())
    seen: list[Any] = []
    for step in range(2):
        loss = model(*case.make_batch(step))
        loss.backward()
        seen.append([loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        steps.zero_grad()
    return [*seen, dict(model.state_dict()), steps.state_dict()["state"]]


def same_bits(got: Any, want: Any) -> None:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for one, other in pairs:
        if isinstance(other, Tensor):
            bits = other.detach().contiguous().view(-1).view(torch.uint8)
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert one.detach().contiguous().view(-1).view(torch.uint8).equal(bits)
        else:
            assert one == other


OPTIMIZERS = {
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "single": partial(torch.optim.AdamW, foreach=False),
    "fused": partial(torch.optim.AdamW, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_training_late_gives_the_bits_of_training_at_once(case: Case) -> None:
    want = train(case, OPTIMIZERS["foreach"], None)
    with deferred.compute(DELAY_S, seed=1) as stream:
        got = train(case, OPTIMIZERS["foreach"], stream)
    same_bits(got, want)
    assert stream.deferred.total() > 50


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_kind_of_optimizer_steps_late_with_the_same_bits(kind: str) -> None:
    want = train(CONV, OPTIMIZERS[kind], None)
    with deferred.compute(DELAY_S, seed=2) as stream:
        got = train(CONV, OPTIMIZERS[kind], stream)
    same_bits(got, want)


@pytest.mark.parametrize("case", [GPT, CONV, MIXED, EVERY_CASE[-1], EVERY_CASE[-2]], ids=lambda case: case.name)
def test_a_whole_step_without_reads_is_given_while_nothing_runs(case: Case) -> None:
    """Forward, backward and optimizer, all of it given before the first kernel has run."""
    with deferred.compute() as stream:
        rehearsal = train(case, OPTIMIZERS["fused"], stream)
        stream.sync()
        with stream.held():
            got = train(case, OPTIMIZERS["fused"], stream)
            assert all(math.isnan(deferred.now(loss)) for loss in (got[0][0], got[1][0]))
            assert not stream.idle
    same_bits(got, rehearsal)
    assert not stream.at_once
    assert stream.deferred.keys() >= {"aten.addmm.default", "aten._fused_adamw_.default"}
    assert any("backward" in name for name in stream.deferred)


def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    def draw(x: Tensor) -> list[Tensor]:
        torch.manual_seed(7)
        return [F.dropout(x, 0.3), torch.rand(3), torch.rand_like(x), x.clone().uniform_(), torch.randn(2) + x[:2]]

    want = draw(torch.ones(64))
    with deferred.compute(DELAY_S, seed=3) as stream:
        x = torch.ones(64)
        stream.took_tensor(x)
        got = draw(x)
    same_bits(got, want)

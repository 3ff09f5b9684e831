"""The order of use is never assumed: evaluation, generation, branches, repeats, exceptions, several models.

A learnt order of use is a hint, so each scenario breaks it in a way that a user's loop does and must still equal plain
torch. Exceptions must leave a model that trains on as if the failed attempt had not been made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    CONV,
    ENCODER_DECODER,
    GPT,
    LAYER_DROP,
    MOE,
    ORDERS,
    SIAMESE,
    Batch,
    Block,
    Case,
    EncoderDecoder,
    Gpt,
    class_batch,
    token_batch,
)
from parity.harness import (
    Placement,
    Session,
    agree,
    copied,
    variant,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_between_steps_changes_nothing(guard: Callable[[], Any], placement: Placement, swap: Path) -> None:
    """Before the first step, between backward and step, between steps; in eval and in train mode."""

    def scenario(session: Session) -> Any:
        seen = []

        def evaluate(mode: bool) -> None:
            session.model.train(mode)
            with guard():
                seen.append(session.model(*session.batch(90)).item())
            session.model.train()

        evaluate(False)
        for step in range(3):
            seen.append(session.backward(2 * step))
            evaluate(True)
            seen.append(session.backward(2 * step + 1))
            evaluate(False)
            session.optimizer.step()
            evaluate(True)
            session.optimizer.zero_grad()
        return [seen, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


def test_evaluation_between_forward_and_backward_changes_nothing(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            loss = session.model(*session.batch(step))
            with torch.no_grad():
                seen.append(session.model(*session.batch(90 + step)).item())
            loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [seen, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


def test_evaluation_by_torchs_fused_transformer_path_reads_true_weights(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(2):
            session.model.eval()
            with torch.no_grad():
                seen.append(session.model(*session.batch(50 + step)).item())
            session.model.train()
            session.backward(step)
            session.optimizer.step()
            session.optimizer.zero_grad()
        return seen

    case = variant(ENCODER_DECODER, "biased", partial(EncoderDecoder, bias=True))
    agree(scenario, case, placement, swap)


def test_a_forward_whose_graph_is_dropped_changes_nothing(placement: Placement, swap: Path) -> None:
    """A loss computed with gradients on, and never sent backward, as old log-probabilities are."""

    def scenario(session: Session) -> Any:
        kept = []
        for step in range(3):
            session.model(*session.batch(90 + step))
            kept.append(session.model(*session.batch(80 + step)))  # stays alive over steps, no backward
            session.train(step)
        return [[loss.item() for loss in kept], session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


def test_greedy_generation_between_steps_yields_torchs_tokens(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        written = []
        for step in range(3):
            session.train(step)
            tokens = torch.tensor([[1, 2]])
            session.model.eval()
            with torch.no_grad():
                for _ in range(6):
                    logits = session.model(tokens)[:, -1]
                    tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
            session.model.train()
            written.append(tokens.tolist())
        return [written, session.weights()]

    agree(scenario, GPT, placement, swap)


@pytest.mark.parametrize("case", [LAYER_DROP, MOE], ids=lambda case: case.name)
def test_a_path_that_changes_at_every_step_stays_right(case: Case, placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        losses = session.train_on(range(2 * len(ORDERS)))
        losses += [session.train(seed) for seed in (4, 4, 0, 3, 1, 1)]
        return [losses, session.weights(), session.moments()]

    agree(scenario, case, placement, swap)


def test_a_child_may_be_called_by_itself_at_any_time(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            session.train(step)
            hidden = session.model.embed(torch.tensor([[1, 5, 2]]))
            value = session.model.blocks[5](session.model.blocks[2](hidden)).pow(2).mean()
            seen.append(value.item())
            value.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [seen, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


def test_functional_use_of_a_weight_without_its_modules_forward_is_right(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            block = session.model.blocks[step]
            x = torch.ones(2, block.up.in_features)
            value = F.linear(x, block.up.weight, block.up.bias).pow(2).mean() + session.model.norm.weight.sum() * 0.01
            value.backward()
            seen.append(value.item())
            session.train(step)
        return [seen, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


def test_one_module_used_many_times_in_a_pass_adds_its_gradients(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        losses = []
        for step in range(3):
            left, right, label = session.batch(step)
            for again in range(3):
                loss = session.model(left + again, right, label)
                loss = loss + session.model.encode(left).mean() + session.model.encode(right).pow(2).mean()
                loss.backward()
                losses.append(loss.item())
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [losses, session.weights(), session.moments()]

    agree(scenario, SIAMESE, placement, swap)


class SharedBlock(nn.Module):
    """One transformer block applied three times, each application checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.gpt = Gpt(layers=3)
        self.gpt.blocks[2] = self.gpt.blocks[0]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.gpt.embed(tokens)
        for block in (*self.gpt.blocks, self.gpt.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.gpt.head(self.gpt.norm(x)).flatten(0, 1), targets.flatten())


def shared_reentrant() -> SharedBlock:
    return SharedBlock(True)


def shared_non_reentrant() -> SharedBlock:
    return SharedBlock(False)


@pytest.mark.parametrize("build", [shared_reentrant, shared_non_reentrant])
def test_a_shared_block_under_checkpointing_adds_its_gradients(
    build: Callable[[], nn.Module], placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        losses = [session.backward(seed) for seed in range(2)]
        session.optimizer.step()
        session.optimizer.zero_grad()
        return [losses, session.train_on(range(2, 5)), session.weights(), session.moments()]

    agree(scenario, Case(build.__name__, build, token_batch), placement, swap)


@dataclass
class Answer:
    """An output that no search through tuples and lists finds a tensor in."""

    extra: dict[str, Any]


class OddOutputs(nn.Module):
    """Blocks exchange dataclasses and dicts, take keyword arguments, and one input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        answer = Answer({"state": x})
        for stage in self.stages:
            answer = stage(answer=answer, bonus={"unused": None})
        return F.cross_entropy(self.head(answer.extra["state"]), y)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, *, answer: Answer, bonus: dict[str, Any]) -> Answer:
        return Answer({"state": answer.extra["state"] + self.linear(answer.extra["state"]).tanh(), **bonus})


class Delegating(nn.Module):
    """Looks every missing attribute up in its child, as adapter wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gpt(layers=2)
        self.outer = nn.Parameter(torch.ones(32))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) * self.outer
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "case",
    [Case("odd_outputs", OddOutputs, class_batch), Case("delegating", Delegating, token_batch)],
    ids=lambda case: case.name,
)
def test_odd_module_interfaces_train_as_in_torch(case: Case, placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(4)), session.weights(), session.moments()]

    agree(scenario, case, placement, swap, max_grad_norm=0.5)


def test_batch_statistics_are_torchs_and_stay_float32(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        losses = [session.backward(seed) for seed in range(2)]
        session.optimizer.step()
        session.optimizer.zero_grad()
        losses += session.train_on(range(2, 4))
        session.model.eval()
        with torch.no_grad():
            losses.append(session.model(*session.batch(9)).item())
        return [losses, {name: copied(buffer) for name, buffer in session.model.named_buffers()}, session.weights()]

    agree(scenario, CONV, placement, swap)


class WidthByBatch(nn.Module):
    """Batches of any length, empty ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(32, 2) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, 32)
        return self.layers(x).pow(2).sum()


def width_batch(seed: int) -> Batch:
    rows = (3, 0, 1, 5)[seed % 4]
    return (torch.randn(rows, 1 + seed % 3, 32, generator=torch.Generator().manual_seed(seed)),)


def test_batches_of_changing_and_of_zero_size_train_as_in_torch(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(5)), session.weights(), session.moments()]

    agree(scenario, Case("width", WidthByBatch, width_batch), placement, swap, max_grad_norm=1.0)

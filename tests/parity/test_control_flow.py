"""The order of use is never assumed: evaluation, generation, branches, repeats, exceptions, several models.

A learnt order of use is a hint, so each scenario breaks it in a way that a user's loop does and must still equal plain
torch. Exceptions must leave a model that trains on as if the failed attempt had not been made.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CONV, GPT, LAYER_DROP, MOE, ORDERS, SIAMESE, Batch, Block, Case, Gpt, class_batch, token_batch
from parity.harness import (
    ADAM,
    EMULATED,
    HOST,
    SEED,
    Placement,
    Session,
    agree,
    config_for,
    copied,
    plain_session,
    same,
    tiered_session,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered


def train_on(session: Session, seeds: range) -> list[tuple[float, float]]:
    return [session.train(seed) for seed in seeds]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_between_steps_changes_nothing(
    guard: Callable[[], Any], placement: Placement, swap: Path
) -> None:
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
        losses = train_on(session, range(2 * len(ORDERS)))
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
        return [losses, train_on(session, range(2, 5)), session.weights(), session.moments()]

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
        return [train_on(session, range(4)), session.weights(), session.moments()]

    agree(scenario, case, placement, swap, max_grad_norm=0.5)


def test_batch_statistics_are_torchs_and_stay_float32(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        losses = [session.backward(seed) for seed in range(2)]
        session.optimizer.step()
        session.optimizer.zero_grad()
        losses += train_on(session, range(2, 4))
        session.model.eval()
        with torch.no_grad():
            losses.append(session.model(*session.batch(9)).item())
        return [losses, {name: copied(buffer) for name, buffer in session.model.named_buffers()}, session.weights()]

    agree(scenario, CONV, placement, swap)


class Fault(Exception):
    """Raised on purpose by a test."""


def fail(*_: Any) -> None:
    raise Fault


@pytest.mark.parametrize("where", ["embed", "blocks.0", "blocks.4.up", "norm"])
@pytest.mark.parametrize("attempt", [0, 2])
def test_an_exception_in_forward_then_a_retry_trains_as_if_it_had_not_happened(
    where: str, attempt: int, placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        losses = []
        for step in range(4):
            if step == attempt:
                hook = session.model.get_submodule(where).register_forward_pre_hook(fail)
                with pytest.raises(Fault):
                    session.model(*session.batch(step))
                hook.remove()
            losses.append(session.train(step))
        return [losses, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap, max_grad_norm=0.5)


@pytest.mark.parametrize("where", ["blocks.0", "blocks.4.up", "norm"])
@pytest.mark.parametrize("attempt", [0, 2])
def test_an_exception_in_backward_then_a_retry_trains_as_if_it_had_not_happened(
    where: str, attempt: int, placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        losses = []
        for step in range(4):
            if step == attempt:

                def poison(module: nn.Module, inputs: Any, output: Tensor) -> None:
                    output.register_hook(fail)

                hook = session.model.get_submodule(where).register_forward_hook(poison)
                loss = session.model(*session.batch(step))
                with pytest.raises(Fault):
                    loss.backward()
                hook.remove()
                session.optimizer.zero_grad()
            losses.append(session.train(step))
        return [losses, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap, max_grad_norm=0.5)


def test_gradients_already_accumulated_survive_an_exception_in_the_next_forward(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        session.backward(0)
        hook = session.model.blocks[3].register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            session.backward(1)
        hook.remove()
        session.backward(2)
        session.optimizer.step()
        return [session.weights(), session.moments(), session.optimizer.grad_norm]

    agree(scenario, GPT, placement, swap)


def test_many_failures_in_a_row_use_up_nothing(swap: Path) -> None:
    """More failed attempts than any pool has buffers, then a step that must still find all of them."""

    def scenario(session: Session) -> Any:
        for attempt in range(30):
            with_fault = session.model.blocks[attempt % 8].register_forward_hook(fail)
            with pytest.raises(Fault):
                session.model(*session.batch(attempt))
            with_fault.remove()
        return [train_on(session, range(3)), session.weights()]

    agree(scenario, GPT, EMULATED, swap)


@pytest.mark.parametrize("outer", [HOST, EMULATED], ids=lambda place: place.name)
def test_two_models_in_one_process_train_side_by_side_on_one_directory(outer: Placement, swap: Path) -> None:
    alone = []
    for case in (GPT, LAYER_DROP):
        with plain_session(case) as session:
            alone.append([train_on(session, range(4)), session.weights()])
    together: list[list[Any]] = [[], []]
    config_a, config_b = config_for(GPT.build, outer, swap), config_for(LAYER_DROP.build, EMULATED, swap)
    torch.manual_seed(SEED)
    model_a = tiered.shard(GPT.build(), config_a)
    torch.manual_seed(SEED)
    model_b = tiered.shard(LAYER_DROP.build(), config_b)
    a = Session(GPT, model_a, tiered.AdamW(model_a.parameters(), **ADAM), config_a)
    b = Session(LAYER_DROP, model_b, tiered.AdamW(model_b.parameters(), **ADAM), config_b)
    for step in range(4):
        together[0].append(a.train(step))
        together[1].append(b.train(step))
    weights_a, weights_b = a.weights(), b.weights()
    tiered.close(model_a)
    b.train(9)  # closing one leaves the other working
    tiered.close(model_b)
    same([together[0], weights_a], alone[0], exact=False)
    same([together[1], weights_b], alone[1], exact=False)
    assert not list(swap.iterdir())


def policy_and_reference(policy: Session, reference: nn.Module) -> list[Any]:
    """A policy pulled to a fixed reference model, whose forward runs between the policy's forward and backward."""
    losses = []
    for step in range(3):
        tokens, _ = policy.batch(step)
        logits = policy.model(tokens)
        with torch.no_grad():
            target = reference(tokens).softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
        loss.backward()
        policy.optimizer.step()
        policy.optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, policy.weights()]


def test_a_policy_trains_against_a_frozen_sharded_reference(placement: Placement, swap: Path) -> None:
    def build_reference() -> nn.Module:
        torch.manual_seed(77)
        return Gpt(layers=3).requires_grad_(False).eval()

    with plain_session(GPT) as session:
        want = policy_and_reference(session, build_reference())
    config = config_for(build_reference, placement, swap)
    reference = tiered.shard(build_reference(), config)
    (swap / "policy").mkdir()
    with tiered_session(GPT, placement, swap / "policy") as session:
        got = policy_and_reference(session, reference)
    tiered.close(reference)
    same(copied(reference.state_dict()), copied(build_reference().state_dict()), exact=True)
    same(got, want, exact=False)


def test_a_forward_on_another_thread_is_right(placement: Placement, swap: Path) -> None:
    """A data or evaluation thread may use the model while the training thread waits for it."""

    def scenario(session: Session) -> Any:
        seen: list[Any] = []
        for step in range(2):
            session.train(step)
            worker = threading.Thread(target=lambda: seen.append(session.backward(50)))
            worker.start()
            worker.join()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [seen, session.weights()]

    agree(scenario, GPT, placement, swap)


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
        return [train_on(session, range(5)), session.weights(), session.moments()]

    agree(scenario, Case("width", WidthByBatch, width_batch), placement, swap, max_grad_norm=1.0)

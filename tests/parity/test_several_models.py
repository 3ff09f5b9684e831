"""Several models, or several threads, in one process: nothing is shared that one could take from the other.

Two models train side by side on one swap directory, a policy trains against a frozen reference, and a second thread
uses a model while the training thread waits for it.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, LAYER_DROP, Gpt
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
from torch import nn

import tiered


@pytest.mark.parametrize("outer", [HOST, EMULATED], ids=lambda place: place.name)
def test_two_models_in_one_process_train_side_by_side_on_one_directory(outer: Placement, swap: Path) -> None:
    alone = []
    for case in (GPT, LAYER_DROP):
        with plain_session(case) as session:
            alone.append([session.train_on(range(4)), session.weights()])
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

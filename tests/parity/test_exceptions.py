"""An exception anywhere in a step leaves a model that trains on as if the failed attempt had not been made.

Raised in forward, in backward, over and over, and between accumulated gradients. Leaves what a closed scope gives back
to `test_leaks`.
"""

from pathlib import Path
from typing import Any

import pytest
from models import GPT
from parity.harness import (
    EMULATED,
    Placement,
    Session,
    agree,
)
from torch import Tensor, nn


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
        return [session.train_on(range(3)), session.weights()]

    agree(scenario, GPT, EMULATED, swap)

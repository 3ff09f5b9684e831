"""The rest of autograd: hooks on parameters, `autograd.grad`, double backward, gradients of inputs, stale graphs.

What `backward()` adds up is `test_gradients`' matter; here, that the graph which runs through parameters that come and
go is torch's own, and refuses what torch refuses.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, ODD, SIAMESE
from parity.harness import Placement, Session, agree, copied
from torch import Tensor, nn

from tiered.errors import TieredError


def grads(session: Session) -> dict[str, Any]:
    """Every parameter's gradient by name; None where there is none."""
    return {name: copied(p.grad) for name, p in session.model.named_parameters()}


def observe(session: Session) -> list[Any]:
    return [session.optimizer.grad_norm, session.weights(), session.moments()]


def test_gradient_hooks_on_parameters_run_once_a_backward_and_change_the_gradient(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        calls = []

        def double(grad: Tensor) -> Tensor:
            calls.append(float(grad.abs().sum()))
            return grad * 2

        removable = [p.register_hook(double) for p in session.model.parameters()]
        session.backward(0)
        session.backward(1)
        doubled = grads(session)
        for hook in removable:
            hook.remove()
        session.backward(2)
        session.optimizer.step()
        return [len(calls), sorted(calls), doubled, observe(session)]

    agree(scenario, SIAMESE, placement, swap)


def test_a_post_accumulate_hook_sees_its_parameters_gradient(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen: dict[str, float] = {}
        hooks = []
        for name, p in session.model.named_parameters():

            def record(param: nn.Parameter, name: str = name) -> None:
                seen[name] = seen.get(name, 0.0) + float(param.grad.abs().sum())

            hooks.append(p.register_post_accumulate_grad_hook(record))
        session.backward(0)
        session.backward(1)
        for hook in hooks:
            hook.remove()
        session.optimizer.step()
        return [dict(sorted(seen.items())), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_autograd_grad_returns_gradients_and_leaves_no_trace(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        params = dict(session.model.named_parameters())
        chosen = [params["blocks.3.up.weight"], params["position"], params["embed.weight"], params["norm.bias"]]
        some = torch.autograd.grad(session.model(*session.batch(1)), chosen)
        everything = torch.autograd.grad(session.model(*session.batch(2)), list(params.values()))
        nothing = grads(session)
        session.train(3)
        return [some, everything, nothing, observe(session)]

    agree(scenario, GPT, placement, swap)


def test_backward_with_named_inputs_fills_only_those(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        params = dict(session.model.named_parameters())
        session.model(*session.batch(0)).backward(inputs=[params["blocks.2.down.weight"], params["embed.weight"]])
        filled = grads(session)
        session.optimizer.step()
        return [filled, sorted(session.moments()), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_a_gradient_penalty_is_right_or_refused_by_name(placement: Placement, swap: Path) -> None:
    """Double backward reads weights again while gradients are being differentiated."""

    def scenario(session: Session) -> Any:
        seen = []
        for step in range(2):
            loss = session.model(*session.batch(step))
            first = torch.autograd.grad(loss, list(session.model.parameters()), create_graph=True)
            penalty = sum(g.pow(2).sum() for g in first)
            (loss + 0.1 * penalty).backward()
            seen.append([penalty.item(), grads(session)])
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [seen, observe(session)]

    agree(scenario, SIAMESE, placement, swap, refusable=True, config={"device_budget": "4MiB"})


def test_gradients_of_inputs_are_those_of_torch(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        x, y = session.batch(0)
        x.requires_grad_()
        session.model(x, y).backward()
        inner = session.model.inner(x).sum()
        inner.backward()
        return [x.grad, grads(session)]

    agree(scenario, ODD, placement, swap)


def test_only_inputs_may_need_gradients(placement: Placement, swap: Path) -> None:
    """Every parameter frozen: activations still flow back to the input, nothing to step."""

    def scenario(session: Session) -> Any:
        x, y = session.batch(0)
        x.requires_grad_()
        session.model.requires_grad_(False)
        session.model(x, y).backward()
        session.optimizer.step()
        return [x.grad, grads(session), session.weights(), session.moments()]

    agree(scenario, ODD, placement, swap)


def step_on(session: Session) -> None:
    session.backward(1)
    session.optimizer.step()


def halve(session: Session) -> None:
    with torch.no_grad():
        for p in session.model.parameters():
            p.mul_(0.5)


@pytest.mark.parametrize("change", [step_on, halve])
def test_backward_through_weights_that_changed_since_the_forward_raises(
    change: Callable[[Session], None], placement: Placement, swap: Path
) -> None:
    """torch refuses by its version counter; a fault-in must not hand the new weights to the old graph."""

    def scenario(session: Session) -> Any:
        session.train(0)
        loss = session.model(*session.batch(1))
        change(session)
        with pytest.raises((RuntimeError, TieredError)):
            loss.backward()
        session.optimizer.zero_grad()
        return [session.train(2), session.weights()]

    agree(scenario, GPT, placement, swap)

"""What a gradient means: added over backwards, None where unused, visible, editable, dropped and clipped as in torch.

Each test is one scenario run in plain torch and in tiered (`parity.harness.agree`), so the expectation is torch's own
behaviour rather than a number. Leaves placement combinations to `test_matrix`, optimizer settings to `test_optimizer`.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, MOE
from parity.harness import Placement, Session, agree, copied, same, tiered_session

import tiered


def grads(session: Session) -> dict[str, Any]:
    """Every parameter's gradient by name; None where there is none."""
    return {name: copied(p.grad) for name, p in session.model.named_parameters()}


def observe(session: Session) -> list[Any]:
    return [session.optimizer.grad_norm, session.weights(), session.moments()]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_backwards_before_a_step_add_their_gradients(count: int, placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            for part in range(count):
                session.backward(step * count + part)
            seen.append(grads(session))
            session.optimizer.step()
            session.optimizer.zero_grad()
            seen.append(observe(session))
        return seen

    agree(scenario, GPT, placement, swap)


def test_losses_summed_before_one_backward_give_the_same_gradient(placement: Placement, swap: Path) -> None:
    """Two forwards, then one backward: each group is used twice in a forward pass before any backward."""

    def scenario(session: Session) -> Any:
        for step in range(2):
            total = sum(session.model(*session.batch(10 * step + part)) for part in range(3))
            total.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return observe(session)

    agree(scenario, GPT, placement, swap)


def test_backward_twice_through_one_retained_graph_doubles_the_gradient(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        loss = session.model(*session.batch(0))
        loss.backward(retain_graph=True)
        once = grads(session)
        loss.backward()
        twice = grads(session)
        session.optimizer.step()
        return [once, twice, observe(session)]

    agree(scenario, GPT, placement, swap)


def test_forwards_and_backwards_of_several_batches_may_interleave(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        for step in range(2):
            first = session.model(*session.batch(3 * step))
            second = session.model(*session.batch(3 * step + 1))
            first.backward()
            third = session.model(*session.batch(3 * step + 2))
            third.backward()
            second.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return observe(session)

    agree(scenario, GPT, placement, swap)


def test_a_backward_with_a_given_gradient_equals_torchs(placement: Placement, swap: Path) -> None:
    """`out.backward(gradient=g)` starts from a tensor that is no scalar loss, on every step."""

    def scenario(session: Session) -> Any:
        for step in range(3):
            tokens, _ = session.batch(step)
            logits = session.model(tokens)
            logits.backward(gradient=torch.full_like(logits, 0.01))
            session.optimizer.step()
            session.optimizer.zero_grad()
        return observe(session)

    agree(scenario, GPT, placement, swap)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_zero_grad_of_model_and_of_optimizer_mean_what_torch_means(
    owner: str, set_to_none: bool, placement: Placement, swap: Path
) -> None:
    """Zeroed gradients still decay and carry momentum; dropped ones do not, so the weights tell the two apart."""

    def scenario(session: Session) -> Any:
        seen = []
        for step in range(4):
            session.backward(step)
            session.optimizer.step()
            getattr(session, owner).zero_grad(set_to_none=set_to_none)
            seen.append(grads(session))
        session.optimizer.step()
        return [seen, session.weights(), session.moments()]

    agree(scenario, MOE, placement, swap)


def test_gradients_stay_after_a_step_until_they_are_zeroed(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        for step in range(3):
            session.backward(step)
            session.optimizer.step()
        session.optimizer.step()
        return [grads(session), observe(session)]

    agree(scenario, GPT, placement, swap)


def test_dropping_a_gradient_midway_leaves_only_the_later_ones(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.backward(0)
        session.optimizer.zero_grad()
        session.backward(1)
        for p in list(session.model.parameters())[::2]:
            p.grad = None
        session.backward(2)
        kept = grads(session)
        session.optimizer.step()
        return [kept, observe(session)]

    agree(scenario, GPT, placement, swap)


def test_unused_parameters_have_no_gradient_no_decay_and_no_state(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = [grads(session)]
        for step in range(4):
            session.backward(step)
            seen.append(grads(session))
            session.optimizer.step()
            session.optimizer.zero_grad()
            seen.append(sorted(session.moments()))
        assert any(g is None for g in seen[1].values()), "every expert was used: the scenario shows nothing"
        return [seen, session.weights(), session.moments()]

    agree(scenario, MOE, placement, swap)


def test_each_parameter_counts_its_own_steps(placement: Placement, swap: Path) -> None:
    """Experts used on some batches only must have their own bias correction."""

    def scenario(session: Session) -> Any:
        for step in range(6):
            session.train(step)
        return {index: float(state["step"]) for index, state in session.moments().items()}

    agree(scenario, MOE, placement, swap)


def test_a_step_without_any_gradient_changes_nothing(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.optimizer.step()
        session.train(0)
        session.optimizer.step()
        session.optimizer.step()
        return [session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


@pytest.mark.parametrize("limit", [0.05, 1e9, None])
def test_clipping_scales_by_the_norm_over_every_gradient(limit: float | None, placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            session.backward(2 * step)
            session.backward(2 * step + 1)
            before = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in session.model.parameters()))
            session.optimizer.step()
            session.optimizer.zero_grad()
            assert session.optimizer.grad_norm == pytest.approx(before, rel=1e-6)
            seen.append(session.optimizer.grad_norm)
        return [seen, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap, max_grad_norm=limit)


def test_torchs_clip_grad_norm_sees_and_edits_the_gradients(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            session.backward(2 * step)
            session.backward(2 * step + 1)
            seen.append(float(torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.1)))
            session.optimizer.step()
            seen.append(session.optimizer.grad_norm)
            session.optimizer.zero_grad()
        return [seen, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


def test_edits_of_a_gradient_in_place_and_by_assignment_reach_the_step(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        for step in range(3):
            session.backward(step)
            for index, p in enumerate(session.model.parameters()):
                if index % 3 == 0:
                    p.grad.mul_(0.25)
                elif index % 3 == 1:
                    p.grad = p.grad * 2 + 0.01
            seen.append(grads(session))
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [seen, observe(session)]

    agree(scenario, GPT, placement, swap)


def test_a_gradient_set_by_hand_is_stepped_and_added_to(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        for p in session.model.parameters():
            p.grad = torch.full(p.shape, 0.01)
        session.optimizer.step()
        session.backward(0)
        both = grads(session)
        session.optimizer.step()
        return [both, observe(session)]

    agree(scenario, GPT, placement, swap)


def test_a_held_gradient_is_not_overwritten_by_later_steps(placement: Placement, swap: Path) -> None:
    """After `zero_grad()` a reference someone kept is theirs: the runtime may not write into it any more."""

    def scenario(session: Session) -> Any:
        session.backward(0)
        held = [p.grad for p in session.model.parameters()]
        copies = [g.clone() for g in held]
        session.optimizer.step()
        session.optimizer.zero_grad()
        for step in range(1, 4):
            session.train(step)
        return [all(torch.equal(a, b) for a, b in zip(held, copies, strict=True)), session.weights()]

    agree(scenario, GPT, placement, swap)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_step_with_a_non_finite_gradient_is_skipped_whole(
    bad: float, limit: float | None, placement: Placement, swap: Path
) -> None:
    """Weights, moments and step counts stay; one bad element in one parameter is enough."""

    def scenario(session: Session) -> Any:
        session.train(0)
        before = [session.weights(), session.moments()]
        session.backward(1)
        last = list(session.model.parameters())[-1]
        last.grad = torch.full_like(last.grad, 0.0).index_fill_(0, torch.tensor([last.shape[0] - 1]), bad)
        session.optimizer.step()
        after = [session.weights(), session.moments()]
        same(after, before, exact=True, where="state over a skipped step")
        seen = [session.optimizer.skipped_steps, math.isfinite(session.optimizer.grad_norm)]
        session.optimizer.zero_grad()
        seen.append(session.train(2))
        return [seen, observe(session), session.optimizer.skipped_steps]

    agree(scenario, GPT, placement, swap, max_grad_norm=limit)


def test_a_loss_that_overflows_skips_every_step_until_it_is_finite_again(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        for step in range(5):
            loss = session.model(*session.batch(step)) * (math.nan if step in (1, 2) else 1.0)
            loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [session.optimizer.skipped_steps, session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap, max_grad_norm=0.5)


def test_stats_count_steps_taken_and_steps_skipped(placement: Placement, swap: Path) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        (session.model(*session.batch(1)) * math.inf).backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.train(2)
        stats = tiered.stats(session.model)
    assert (stats.steps, stats.skipped_steps) == (2, 1)

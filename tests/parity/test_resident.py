"""Whole steps of models whose groups live on the device with all their states, beside plain torch and the host.

Results are within rounding of the host's, not bit-equal: the kernel is torch's (see tiered/optim/resident.py). Leaves
the arithmetic on tensors alone to tests/optim/test_resident.py.
"""

import gc
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred import Unreached
from models import GPT, MIXED, MOE, ODD, SHORT_GPT, Case
from parity.harness import (
    ADAM,
    EMULATED,
    HOST,
    Placement,
    Session,
    copied,
    frozen,
    plain_session,
    same,
    tiered_session,
)
from torch import Tensor, nn

import tiered
from tiered.device.emulated import computing_on
from tiered.optim import kernels
from tiered.zero.group import ParamGroup
from tiered.zero.model import MODEL_ATTRIBUTE

RESIDENT = Placement(name="resident", device="emulated", param="device", optimizer="device", delay_s=5e-4)
LATE = replace(RESIDENT, name="late", late=True)


def groups_of(session: Session) -> list[ParamGroup]:
    groups: list[ParamGroup] = session.model.__dict__[MODEL_ATTRIBUTE].groups
    return groups


def outcome(session: Session) -> list[Any]:
    return [session.weights(), dict(sorted(session.moments().items())), session.optimizer.skipped_steps]


def agree(scenario: Callable[[Session], Any], case: Case, swap: Path, place: Placement = RESIDENT, **how: Any) -> None:
    """The scenario's observations in plain torch and with everything on the device are the same within rounding."""
    with plain_session(case, **how) as session:
        want = copied(scenario(session))
    with tiered_session(case, place, swap, **how) as session:
        got = copied(scenario(session))
        assert any(group.resident for group in groups_of(session))
    same(got, want, exact=False, where="resident against plain torch")


# --- parity ---


@pytest.mark.parametrize("case", [GPT, MOE, ODD], ids=lambda case: case.name)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_training_equals_plain_torch(case: Case, max_grad_norm: float | None, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(4)), outcome(session)]

    agree(scenario, case, swap, max_grad_norm=max_grad_norm)


def test_each_parameter_group_uses_its_own_settings_as_they_were_at_the_step(swap: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        return [
            {"params": [p for p in named.values() if p.ndim > 1]},
            {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0, "maximize": True, "lr": 3e-3},
        ]

    def scenario(session: Session) -> Any:
        for step in range(4):
            session.backward(step)
            session.optimizer.step()
            for group in session.optimizer.param_groups:  # while the step may still be pending
                group["lr"] *= 0.5
                group["betas"] = (0.5 + 0.1 * step, 0.95)
            session.optimizer.zero_grad()
        return outcome(session)

    agree(scenario, GPT, swap, groups=groups, max_grad_norm=0.5)


@pytest.mark.parametrize("place", [RESIDENT, LATE], ids=lambda place: place.name)
def test_gradients_accumulate_and_are_read_edited_and_kept_as_in_torch(place: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen: list[Any] = []
        for step in range(3):
            for part in range(step + 1):
                session.backward(10 * step + part, share=1.0 / (step + 1))
            for param in session.model.parameters():
                if param.grad is not None and param.ndim > 1:
                    param.grad.mul_(0.5)
            before = [p.grad.clone() for p in session.model.parameters()]
            session.optimizer.step()
            if session.config is not None:  # torch clips gradients where they are
                same([p.grad.clone() for p in session.model.parameters()], before, exact=True)
            seen.append(session.optimizer.grad_norm)
            session.optimizer.zero_grad(set_to_none=step != 1)
        return [seen, outcome(session)]

    agree(scenario, SHORT_GPT, swap, place, max_grad_norm=0.2)


@pytest.mark.parametrize("place", [RESIDENT, LATE], ids=lambda place: place.name)
def test_groups_on_the_host_and_on_the_device_take_one_step_together(place: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = [session.train(0)]
        session.model.blocks[1].requires_grad_(True)  # its states go to the host
        if session.config is not None:
            trains = {group.resident for group in groups_of(session) if "exp_avg" in group.blocks}
            assert trains == {True, False}
        seen += session.train_on(range(1, 4))
        session.backward(4)
        session.model.embed.weight.grad[3] = math.inf  # on the device, and stops the host too
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.backward(5)
        session.model.blocks[1].up.weight.grad[0] = math.nan  # on the host, and stops the device too
        session.optimizer.step()
        session.optimizer.zero_grad()
        return [seen, session.train(6), outcome(session)]

    agree(scenario, SHORT_GPT, swap, place, prepare=frozen("blocks.1."), max_grad_norm=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_train_as_on_the_host(dtype: torch.dtype, swap: Path) -> None:
    """With the loss scale that overflows at first: what is skipped, and the scale after, are the host's."""

    def scenario(session: Session) -> Any:
        optimizer = session.optimizer
        optimizer.loss_scale  # noqa: B018  (asking early changes nothing)
        seen = []
        for seed in range(5):
            loss = session.model(*session.batch(seed)).float()
            optimizer.scale_loss(loss * (1e4 if seed == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((optimizer.loss_scale, optimizer.skipped_steps))
        return [seen, session.weights(), {k: float(s["step"]) for k, s in session.moments().items()}]

    def run(place: Placement) -> Any:
        precision = tiered.MixedPrecision(param_dtype=dtype)
        with tiered_session(SMALL, place, swap, max_grad_norm=0.5, config={"precision": precision}) as session:
            return copied(scenario(session))

    got, want = run(RESIDENT), run(HOST)
    same(got, want, exact=False, rtol=2e-2, atol=2e-3)
    scale, skipped = want[0][-1]
    assert (scale, skipped) == ((65536.0 / 2**skipped, 2) if dtype is torch.float16 else (1.0, 0))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


SMALL = Case("small", Small, lambda seed: (torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)),))


def test_mixed_parameter_dtypes_share_one_norm(swap: Path) -> None:
    def run(place: Placement) -> Any:
        with tiered_session(MIXED, place, swap, max_grad_norm=0.1) as session:
            norms = [session.train(seed)[1] for seed in range(3)]
            return copied([norms, session.moments()])

    same(run(RESIDENT), run(HOST), exact=False, rtol=1e-2, atol=1e-3)


# --- the outcome, settled when it is asked for ---


def test_a_step_returns_before_the_device_has_come_to_it(swap: Path) -> None:
    stream = Unreached()
    release = threading.Timer(60, stream.reached.finish)  # a step that waits must not hang the test
    with tiered_session(SHORT_GPT, RESIDENT, swap, max_grad_norm=0.5) as session:
        session.train(0)
        release.start()
        try:
            with computing_on(stream):
                session.backward(1)
                session.optimizer.step()
                session.optimizer.zero_grad()
                session.backward(2)
                assert not stream.reached.done(), "something has waited for the device"
                stream.reached.finish()
                assert session.optimizer.grad_norm > 0
        finally:
            release.cancel()
            release.join()
        assert tiered.stats(session.model).steps == 2


ASKING: dict[str, Callable[[Session], Any]] = {
    "stats": lambda s: tiered.stats(s.model).skipped_steps == 1,
    "norm": lambda s: not math.isfinite(s.optimizer.grad_norm),
    "skipped": lambda s: s.optimizer.skipped_steps == 1,
    "state dict": lambda s: all(e["step"] == 1 for e in s.optimizer.state_dict()["state"].values()),
    "the next step": lambda s: s.train(2)[1] > 0,
}


@pytest.mark.parametrize("asks", list(ASKING))
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_skipped_whole_and_counted_whoever_asks_first(
    asks: str, bad: float, swap: Path
) -> None:
    with tiered_session(SHORT_GPT, RESIDENT, swap) as session:
        session.train(0)
        before = [session.weights(), session.moments()]
        session.backward(1)
        session.model.blocks[1].up.weight.grad[2, 3] = bad
        session.optimizer.step()
        session.optimizer.zero_grad()
        if asks != "the next step":
            same([session.weights(), copied(session.model.state_dict())], [before[0]] * 2, exact=True)
        assert ASKING[asks](session)
        session.train(3)
        found = tiered.stats(session.model)
        taken = 3 if asks == "the next step" else 2
        assert (found.steps, found.skipped_steps, session.optimizer.skipped_steps) == (taken, 1, 1)
        assert all(entry["step"] == taken for entry in session.moments().values())


def test_loading_settles_the_pending_step_before_it_replaces_what_that_did(swap: Path) -> None:
    with tiered_session(SHORT_GPT, RESIDENT, swap) as session:
        session.train(0)
        saved = copied(session.optimizer.state_dict())
        session.backward(1)
        session.optimizer.step()
        session.optimizer.load_state_dict(saved)
        assert tiered.stats(session.model).steps == 2
        same(copied(session.optimizer.state_dict()), saved, exact=True)
        session.optimizer.zero_grad()


def test_a_skipped_step_changes_no_bit_of_weights_or_moments(swap: Path) -> None:
    with tiered_session(SHORT_GPT, RESIDENT, swap, max_grad_norm=0.5) as session:
        session.train_on(range(2))
        before = [session.weights(), session.moments()]
        session.backward(2)
        session.model.embed.weight.grad[0] = math.inf
        session.optimizer.step()
        same([session.weights(), session.moments()], before, exact=True)


def test_a_scheduler_beside_pending_steps_sees_every_learning_rate(swap: Path) -> None:
    def scenario(session: Session) -> Any:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(session.optimizer, T_max=4)
        rates = []
        for seed in range(5):
            session.backward(seed)
            session.optimizer.step()
            scheduler.step()
            session.optimizer.zero_grad()
            rates += scheduler.get_last_lr()
        return [rates, outcome(session)]

    agree(scenario, SHORT_GPT, swap)


def test_an_optimizer_with_a_pending_outcome_can_be_dropped(swap: Path) -> None:
    with tiered_session(SHORT_GPT, RESIDENT, swap) as session:
        session.backward(0)
        session.optimizer.step()
        gone = weakref.ref(session.optimizer)
        session.optimizer = None
        gc.collect()
        assert gone() is None
        tiered.stats(session.model)
        session.optimizer = tiered.AdamW(session.model.parameters(), **ADAM)
        session.model.zero_grad()
        session.train(1)


def test_a_graph_saved_before_a_step_is_refused_after_it(swap: Path) -> None:
    def scenario(session: Session) -> Any:
        loss = session.model(*session.batch(0))
        loss.backward(retain_graph=True)
        session.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return session.weights()

    agree(scenario, SHORT_GPT, swap)


# --- states between placements ---


@pytest.mark.parametrize(
    ("first", "second"), [(RESIDENT, HOST), (HOST, RESIDENT), (RESIDENT, EMULATED)], ids=lambda place: place.name
)
def test_a_run_saved_in_one_placement_goes_on_in_another(first: Placement, second: Placement, swap: Path) -> None:
    with tiered_session(SHORT_GPT, first, swap, max_grad_norm=0.5) as session:
        session.train_on(range(3))
        model, optimizer = session.weights(), copied(session.optimizer.state_dict())
        session.train_on(range(3, 5))
        want = outcome(session)
    with tiered_session(SHORT_GPT, second, swap, max_grad_norm=0.5) as session:
        session.train(9)  # what is loaded replaces it
        session.model.load_state_dict(model)
        session.optimizer.load_state_dict(optimizer)
        same(copied(session.optimizer.state_dict()), optimizer, exact=True)
        session.train_on(range(3, 5))
        same(outcome(session), want, exact=False)


# --- copies of host groups ---


def test_a_groups_copy_is_brought_up_to_date_as_soon_as_it_is_updated_and_once(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Placement(name="offloaded", device="emulated", param="host", optimizer="nvme")
    events: list[str] = []
    update, fetch = kernels.adamw, ParamGroup.begin_fetch

    def updating(*args: Any, **settings: Any) -> None:
        events.append("update")
        update(*args, **settings)

    def fetching(group: ParamGroup, **how: Any) -> None:
        fetch(group, **how)
        events.append(group.name)

    with tiered_session(SHORT_GPT, place, swap) as session:
        session.train(0)
        session.backward(1)
        monkeypatch.setattr(kernels, "adamw", updating)
        monkeypatch.setattr(ParamGroup, "begin_fetch", fetching)
        session.optimizer.step()
        with torch.no_grad():
            session.model(*session.batch(2))
        names = [group.name for group in groups_of(session)]
    fetched = [event for event in events if event != "update"]
    assert sorted(fetched) == sorted(names)
    assert "update" in events[events.index(fetched[0]) :], "no copy began before the last update"

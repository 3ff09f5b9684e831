"""tiered.AdamW is a torch optimizer: its settings, groups, schedulers, freezing and closures mean what torch's mean.

`param_groups` are the live settings, read at every step; trainability is read from `requires_grad` at every backward.
Leaves gradients to `test_gradients` and its state dict to `test_saving`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ADAPTED, GPT, MOE, ODD, Case, Gpt, token_batch
from parity.harness import (
    ADAM,
    EMULATED,
    NVME,
    PROMPT,
    Placement,
    Session,
    agree,
    frozen,
    plain_session,
    same,
    tiered_session,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

import tiered
from tiered.errors import TieredError


@pytest.fixture(params=PROMPT, ids=lambda placement: placement.name)
def placement(request: pytest.FixtureRequest) -> Placement:
    """Settings and schedules are the host's, whenever the device computes: `LATE` would only take its time."""
    return request.param


def outcome(session: Session) -> list[Any]:
    return [session.weights(), session.moments()]


def test_the_optimizer_is_a_torch_optimizer_with_torchs_defaults(swap: Path) -> None:
    ours = inspect.signature(tiered.AdamW).parameters
    torchs = inspect.signature(torch.optim.AdamW).parameters
    for name in ("lr", "betas", "eps", "weight_decay", "maximize"):
        assert ours[name].default == torchs[name].default, name
    with tiered_session(GPT, NVME, swap) as session:
        assert isinstance(session.optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.0},
        {"weight_decay": 0.5, "lr": 0.03},
        {"betas": (0.0, 0.0)},
        {"betas": (0.5, 0.999), "eps": 1e-3},
        {"lr": 0.0},
        {"maximize": True},
        {"maximize": True, "max_grad_norm": 0.05},
    ],
    ids=str,
)
def test_every_setting_means_what_it_means_in_torch(settings: dict[str, Any], placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(4)), outcome(session)]

    agree(scenario, GPT, placement, swap, **settings)


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, the head learns slower, and one group is empty."""
    named = dict(model.named_parameters())
    head = [named.pop("embed.weight")]
    return [
        {"params": [p for p in named.values() if p.ndim > 1]},
        {"params": [], "lr": 0.7},
        {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": head, "lr": 2e-3, "eps": 1e-4},
    ]


def test_each_group_uses_its_own_settings(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = session.train_on(range(4))
        groups = session.optimizer.param_groups
        return [seen, [(len(g["params"]), g["lr"], g["weight_decay"], g["betas"]) for g in groups], outcome(session)]

    agree(scenario, GPT, placement, swap, groups=by_decay)


def test_changes_to_a_groups_settings_take_effect_at_the_next_step_only(placement: Placement, swap: Path) -> None:
    """Set right after `step()` returns, while updates may still be open: they belong to the old settings."""

    def scenario(session: Session) -> Any:
        for step in range(4):
            session.backward(step)
            session.optimizer.step()
            for group in session.optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1
                group["betas"] = (0.5 + 0.1 * step, 0.95)
            session.optimizer.zero_grad()
        return outcome(session)

    agree(scenario, GPT, placement, swap, groups=by_decay)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, [lambda t, k=k: 1.0 / (1 + k + t) for k in range(len(o.param_groups))]),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
    ],
    ids=["lambda", "cosine", "one cycle", "sequential"],
)
def test_schedulers_drive_the_learning_rate(make: Callable[[Any], Any], placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        scheduler = make(session.optimizer)
        seen = []
        for step in range(5):
            session.train(step)
            scheduler.step()
            seen.append(scheduler.get_last_lr())
        return [seen, outcome(session)]

    agree(scenario, GPT, placement, swap, groups=by_decay)


def test_a_plateau_scheduler_sees_torchs_losses(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        scheduler = lr_scheduler.ReduceLROnPlateau(session.optimizer, factor=0.1, patience=0)
        for step in range(4):
            session.train(step)
            scheduler.step(float(step))
        return [[group["lr"] for group in session.optimizer.param_groups], outcome(session)]

    agree(scenario, GPT, placement, swap)


def test_a_group_added_during_training_is_trained(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        session.optimizer.add_param_group({"params": list(session.model.blocks.parameters()), "lr": 5e-3})
        return [session.train_on(range(1, 4)), outcome(session)]

    agree(scenario, GPT, placement, swap, groups=lambda model: model.embed.parameters())


def test_parameters_left_out_of_the_optimizer_never_change_and_count_in_no_norm(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        session.backward(0)
        unowned = session.model.norm.weight.grad is not None
        session.optimizer.step()
        norm = session.optimizer.grad_norm
        session.model.zero_grad()
        return [unowned, norm, session.train_on(range(1, 3)), outcome(session)]

    agree(scenario, GPT, placement, swap, groups=lambda model: model.blocks.parameters(), max_grad_norm=0.05)


@pytest.mark.parametrize("names", [("blocks.2.",), ("blocks.0.", "blocks.1.up"), ("position", "bias", "blocks.7")])
def test_weights_frozen_before_sharding_stay_and_the_rest_trains(
    names: tuple[str, ...], placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(3)), outcome(session)]

    agree(scenario, GPT, placement, swap, prepare=frozen(*names), max_grad_norm=0.5)


def test_an_optimizer_over_the_trainable_parameters_only_trains_an_adapter(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(3)), outcome(session)]

    agree(scenario, ADAPTED, placement, swap, groups=lambda m: [p for p in m.parameters() if p.requires_grad])


def test_freezing_and_unfreezing_between_steps_takes_effect_at_once(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen: list[Any] = [session.train(0)]
        session.model.blocks.requires_grad_(False)
        seen.append(session.train(1))
        session.model.blocks[3].requires_grad_(True)
        session.model.embed.weight.requires_grad = False
        seen += [session.train(2), session.weights()]
        session.model.requires_grad_(True)
        return [seen, session.train_on(range(3, 5)), outcome(session)]

    agree(scenario, GPT, placement, swap, max_grad_norm=0.5)


def test_weights_frozen_from_the_start_train_once_unfrozen(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = [session.train_on(range(2)), sorted(session.moments())]
        session.model.requires_grad_(True)
        return [seen, session.train_on(range(2, 5)), outcome(session)]

    agree(scenario, GPT, placement, swap, prepare=frozen("blocks", "norm"))


def test_a_gradient_that_waits_while_its_weight_is_frozen_is_still_stepped(placement: Placement, swap: Path) -> None:
    """torch's step looks at gradients, not at `requires_grad`."""

    def scenario(session: Session) -> Any:
        session.backward(0)
        session.model.blocks[1].requires_grad_(False)
        session.backward(1)
        session.optimizer.step()
        return outcome(session)

    agree(scenario, GPT, placement, swap)


def test_a_closure_is_evaluated_with_gradients_or_refused_by_name(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        losses = []
        for step in range(2):

            def closure(step: int = step) -> Tensor:
                session.optimizer.zero_grad()
                loss = session.model(*session.batch(step))
                loss.backward()
                return loss

            losses.append(session.optimizer.step(closure).item())
        return [losses, outcome(session)]

    agree(scenario, GPT, placement, swap, refusable=True)


def test_two_optimizers_share_one_model(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        kind = type(session.optimizer)
        second = kind(session.model.embed.parameters(), **{**ADAM, "lr": 3e-3})
        for step in range(3):
            session.backward(step)
            session.optimizer.step()
            if step != 1:
                second.step()
            session.model.zero_grad()
        return [outcome(session), second.state_dict()["state"]]

    agree(scenario, GPT, placement, swap, groups=lambda model: model.blocks.parameters(), refusable=True)


def test_a_generator_and_named_pairs_are_taken_as_torch_takes_them(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(2)), outcome(session)]

    agree(scenario, MOE, placement, swap, groups=lambda model: model.named_parameters())
    agree(scenario, MOE, placement, swap, groups=lambda model: (p for p in model.parameters()))


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"lr": -1.0}, "lr|learning rate"), ({"betas": (1.0, 0.9)}, "beta"), ({"eps": -1.0}, "eps"),
     ({"weight_decay": -0.1}, "weight_decay"), ({"max_grad_norm": -1.0}, "max_grad_norm"),
     ({"amsgradd": True}, "amsgradd")],
)  # fmt: skip
def test_an_impossible_setting_is_refused_by_name(settings: dict[str, Any], name: str, swap: Path) -> None:
    with tiered_session(GPT, NVME, swap) as session:
        with pytest.raises((ValueError, TypeError), match=f"(?i){name}"):
            tiered.AdamW(session.model.parameters(), **{**ADAM, **settings})
        session.train(0)


def test_parameters_of_a_model_that_is_not_sharded_are_refused_by_name() -> None:
    with pytest.raises(TieredError, match=r"shard"):
        tiered.AdamW(Gpt(layers=1).parameters(), lr=1e-3)


def test_groups_with_one_parameter_twice_are_refused_as_torch_refuses(swap: Path) -> None:
    with tiered_session(ODD, NVME, swap) as session:
        gain = session.model.gain
        with pytest.raises(ValueError, match="more than one"):
            tiered.AdamW([{"params": [gain]}, {"params": [gain]}], lr=1e-3)


def test_one_tied_parameter_gets_one_update(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        assert sum(p is session.model.embed.weight for g in session.optimizer.param_groups for p in g["params"]) == 1
        return [session.train_on(range(3)), outcome(session)]

    agree(scenario, GPT, placement, swap)


def test_a_parameter_larger_than_any_other_by_far_trains_within_its_budget(swap: Path) -> None:
    """One table holds nearly all bytes, so the cut into groups cannot even out what moves."""

    def scenario(session: Session) -> Any:
        return [session.train_on(range(3)), outcome(session)]

    agree(scenario, Case("table", big_table, token_batch), EMULATED, swap, max_grad_norm=0.5, lr=1e-3)


def big_table() -> nn.Module:
    model = Gpt(layers=2)
    model.head.weight = model.embed.weight = nn.Parameter(torch.randn(3001, 32) * 0.1)
    return model


def test_hundreds_of_tiny_parameters_train_as_in_torch(swap: Path) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(3)), outcome(session)]

    agree(
        scenario,
        Case("scalars", Scalars, lambda seed: (torch.tensor(float(seed + 1)),)),
        EMULATED,
        swap,
        config={"host_budget": "2MiB"},
    )


class Scalars(nn.Module):
    """400 parameters of 0 to 3 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(index % 4)) for index in range(400))

    def forward(self, x: Tensor) -> Tensor:
        return sum((p * x).tanh().sum() * (index + 1) for index, p in enumerate(self.all))


def test_plain_and_tiered_agree_on_the_first_step_from_zero_state(swap: Path) -> None:
    """The first update of Adam is lr * sign(gradient): a wrong step number would scale it by a factor."""
    bare = {"weight_decay": 0.0, "eps": 1e-8}
    updates = []
    for opened in (plain_session(GPT, **bare), tiered_session(GPT, NVME, swap, **bare)):
        with opened as session:
            before = session.weights()
            session.train(0)
            after = session.weights()
            updates.append({name: after[name] - before[name] for name in before})
    same(updates[1], updates[0], exact=False)
    assert float(updates[1]["blocks.0.up.weight"].abs().median()) == pytest.approx(ADAM["lr"], rel=0.1)

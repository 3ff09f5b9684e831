"""An edit of a parameter, made in any of torch's ways and at any moment, reaches the copy that the optimizer steps.

Edits in place, through `.data`, by initialisers, by averages and inside `gather(modify=True)`; foreign optimizers; and
parts of the model exchanged. What cannot be made right is refused by name.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, SHORT_GPT
from parity.harness import Placement, Session, agree, copied, same, tiered_session
from torch import Tensor, nn

import tiered

EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "add_ a tensor": lambda p: p.add_(torch.full_like(p, 0.1)),
    "augmented": lambda p: p.__imul__(0.5),
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p)),
    "data.add_": lambda p: p.data.add_(0.1),
    "data.copy_": lambda p: p.data.copy_(torch.linspace(-1, 1, p.numel()).view_as(p)),
    "set item": lambda p: p.__setitem__(0, 0.25),
    "zero_": lambda p: p.zero_(),
    "nn.init.normal_": lambda p: nn.init.normal_(p, std=0.1),
    "nn.init.uniform_": lambda p: nn.init.uniform_(p, -0.1, 0.1),
    "nn.init.constant_": lambda p: nn.init.constant_(p, 0.3),
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
    "detach().mul_": lambda p: p.detach().mul_(0.5),
    "view then fill_": lambda p: p.view(-1)[:3].fill_(0.5),
}
UNUSUAL_EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data assigned": lambda p: setattr(p, "data", p.data * 0.5),
    "data item": lambda p: p.data.__setitem__(0, 0.25),
    "numpy write": lambda p: p.detach().numpy().__setitem__(0, 0.25),
    "out argument": lambda p: torch.mul(p.detach().clone(), 0.5, out=p.data),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "set_": lambda p: p.set_(torch.linspace(-1, 1, p.numel()).view_as(p)),
}


def edited(session: Session, edit: Callable[[nn.Parameter], Any]) -> Any:
    """Edits before the first step (no state yet), between steps, and while gradients wait; what is seen after each."""
    chosen = [p for name, p in session.model.named_parameters() if name in ("blocks.2.up.weight", "norm.weight")]

    def apply() -> Any:
        with torch.no_grad():
            for p in chosen:
                edit(p)
        return [copied(p) for p in chosen]

    torch.manual_seed(5)
    seen = [apply(), session.train(0), apply(), session.weights()]
    seen.append(session.backward(1))
    seen.append(apply())
    session.optimizer.step()
    session.optimizer.zero_grad()
    return [seen, session.train_on(range(2, 4)), session.weights(), session.moments()]


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_of_a_parameter_reaches_forward_optimizer_and_file(
    edit: Callable[[nn.Parameter], Any], placement: Placement, swap: Path
) -> None:
    agree(partial(edited, edit=edit), SHORT_GPT, placement, swap)


@pytest.mark.parametrize("edit", UNUSUAL_EDITS.values(), ids=UNUSUAL_EDITS)
def test_an_unusual_edit_of_a_parameter_reaches_everything_or_is_refused_by_name(
    edit: Callable[[nn.Parameter], Any], placement: Placement, swap: Path
) -> None:
    agree(partial(edited, edit=edit), SHORT_GPT, placement, swap, refusable=True)


def test_module_level_initialisation_after_sharding_is_real(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias) if module.bias is not None else None
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

        session.train(0)
        torch.manual_seed(3)
        session.model.apply(init)
        return [session.weights(), session.train_on(range(1, 3)), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_a_moving_average_over_parameters_follows_them(placement: Placement, swap: Path) -> None:
    """An average that reads each parameter after each step, and is swapped in for evaluation and out again."""

    def scenario(session: Session) -> Any:
        average = [p.detach().clone() for p in session.model.parameters()]
        seen = []
        for step in range(4):
            session.train(step)
            with torch.no_grad():
                for mean, p in zip(average, session.model.parameters(), strict=True):
                    mean.lerp_(p, 0.25)
        with torch.no_grad():
            backup = [p.detach().clone() for p in session.model.parameters()]
            for mean, p in zip(average, session.model.parameters(), strict=True):
                p.copy_(mean)
            seen.append(session.model(*session.batch(9)).item())
            for old, p in zip(backup, session.model.parameters(), strict=True):
                p.copy_(old)
        return [seen, average, session.train(5), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_gather_for_modification_writes_and_gather_for_reading_reads(placement: Placement, swap: Path) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        block = session.model.blocks[1]
        with tiered.gather(block, modify=True), torch.no_grad():
            assert type(block.up.weight.detach().clone()) is Tensor
            block.up.weight.fill_(0.125)
            block.norm_feed.bias.add_(1.0)
        with tiered.gather([block.up.weight, session.model.position]):
            assert bool((block.up.weight == 0.125).all())
        want = session.weights()
        loss = session.backward(1)
        session.optimizer.step()
        stepped = session.weights()
    assert bool((want["blocks.1.up.weight"] == 0.125).all())
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        session.model.load_state_dict(want)
        assert session.backward(1) == loss
        session.optimizer.step()
        same(session.weights(), stepped, exact=True, where="a step after gather against a step after load")


def test_gather_of_everything_matches_the_state_dict_and_ends_when_an_error_leaves_it(
    placement: Placement, swap: Path
) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        want = session.weights()
        with pytest.raises(ZeroDivisionError), tiered.gather(session.model.blocks[0]):
            raise ZeroDivisionError
        for block_name, block in (("blocks.0", session.model.blocks[0]), ("blocks.7", session.model.blocks[7])):
            with tiered.gather(block):
                for name, p in block.named_parameters():
                    same(copied(p), want[f"{block_name}.{name}"], exact=True)
        session.train(1)


def test_a_plain_torch_optimizer_over_sharded_parameters_is_right_or_refused_by_name(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        other = torch.optim.SGD(session.model.parameters(), lr=0.05)
        for step in range(3):
            session.backward(step)
            other.step()
            other.zero_grad()
        return session.weights()

    agree(scenario, GPT, placement, swap, refusable=True)


def grow(model: nn.Module) -> None:
    old = model.embed.weight
    model.embed.weight = model.head.weight = nn.Parameter(torch.cat([old.detach(), old.detach()[:4] * 0.5]))
    model.embed.num_embeddings, model.head.out_features = 52, 52


def swap_block(model: nn.Module) -> None:
    torch.manual_seed(8)
    model.blocks[3] = type(model.blocks[3])(32, 2)


def drop_block(model: nn.Module) -> None:
    del model.blocks[3]


@pytest.mark.parametrize("change", [grow, swap_block, drop_block])
def test_replacing_parts_of_a_sharded_model_is_right_or_refused_by_name(
    change: Callable[[nn.Module], None], placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        change(session.model)
        with torch.no_grad():
            loss = session.model(*session.batch(1)).item()
        return [loss, [list(p.shape) for p in session.model.parameters()], session.weights()]

    agree(scenario, GPT, placement, swap, refusable=True)

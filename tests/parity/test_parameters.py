"""No fake tensors: what a parameter looks like, reads as and accepts while its bytes are away.

Every parameter keeps its identity, name, shape and dtype; reading one gives its true values or a named error, and
copies are true ones. Leaves edits to `test_edits`, files and dictionaries to `test_saving`.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, GPT, ODD, Case, Gpt, token_batch
from parity.harness import EMULATED, NVME, Placement, Session, agree, copied, refused, same, tiered_session
from torch import Tensor, nn

import tiered
from tiered.errors import TieredError


def facts(model: nn.Module) -> dict[str, Any]:
    """All that can be known about a parameter without its values."""
    return {
        name: [
            str(p.dtype), str(p.device), list(p.shape), list(p.size()), p.dim(), p.ndim, p.numel(), p.nelement(),
            list(p.stride()), p.element_size(), p.nbytes, p.is_contiguous(), p.is_leaf, p.requires_grad,
            p.is_floating_point(), p.layout == torch.strided, p.grad_fn is None, p.is_sparse,
            len(p) if p.dim() else -1,
        ]
        for name, p in model.named_parameters()
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_names_shapes_dtypes_and_counts_are_torchs_at_all_times(case: Case, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = [facts(session.model)]
        loss = session.model(*session.batch(0))
        seen.append(facts(session.model))
        loss.backward()
        seen.append(facts(session.model))
        session.optimizer.step()
        seen.append(facts(session.model))
        session.optimizer.zero_grad()
        seen.append([sum(p.numel() for p in session.model.parameters() if p.requires_grad), len(session.weights())])
        seen.append([name for name, _ in session.model.named_parameters(remove_duplicate=False)])
        return seen

    agree(scenario, case, NVME, swap)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameter_objects_and_module_types_never_change(case: Case, swap: Path) -> None:
    torch.manual_seed(0)
    model = case.build()
    identity = [id(p) for p in model.parameters()]
    modules = [id(m) for m in model.modules()]
    with tiered_session(Case(case.name, lambda: model, case.make_batch), NVME, swap) as session:
        for step in range(2):
            assert [id(p) for p in model.parameters()] == identity
            assert [id(m) for m in model.modules()] == modules
            assert all(isinstance(p, nn.Parameter) and isinstance(p, Tensor) for p in model.parameters())
            assert [id(p) for group in session.optimizer.param_groups for p in group["params"]] == identity
            session.train(step)
    assert [id(p) for p in model.parameters()] == identity
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_the_model_is_still_of_its_class(placement: Placement, swap: Path) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        assert isinstance(session.model, Gpt)
        assert type(session.model).__name__ == "Gpt"
        assert isinstance(session.model.blocks[0].up, nn.Linear)
        assert "Gpt(" in repr(session.model)
        assert "in_features=32" in session.model.blocks[0].up.extra_repr()


def test_sharding_returns_the_same_module(swap: Path) -> None:
    model = Gpt(layers=2)
    assert tiered.shard(model, tiered.Config(device="cpu", nvme=swap)) is model
    tiered.close(model)


READS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "norm": lambda p: p.norm().item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy().copy().tolist(),
    "clone": lambda p: p.clone().detach(),
    "data": lambda p: p.data.clone(),
    "index": lambda p: p[0].detach().clone(),
    "sum of data": lambda p: p.data.sum().item(),
    "arithmetic": lambda p: (p * 2 + 1).detach(),
    "broadcast": lambda p: (torch.ones_like(p) - p).detach(),
    "reflected": lambda p: (2 - p).detach(),
    "comparison": lambda p: (p > 0).tolist(),
    "function": lambda p: torch.stack([p, p]).detach(),
    "list argument": lambda p: torch.cat([p.flatten(), p.flatten()]).detach(),
    "out of place cast": lambda p: p.to(torch.float64).detach(),
    "half": lambda p: p.half().detach(),
    "view": lambda p: p.view(-1).detach().clone(),
    "transpose": lambda p: p.t().detach().clone() if p.dim() == 2 else p.detach().clone(),
    "iteration": lambda p: [row.detach().clone() for row in p],
    "format": lambda p: f"{p.detach().abs().max():.6f}",
    "equal": lambda p: bool(torch.equal(p, p.clone())),
    "allclose": lambda p: torch.allclose(p, torch.zeros_like(p)),
    "copy into": lambda p: torch.empty_like(p).copy_(p).detach(),
    "matmul": lambda p: (p @ torch.ones(p.shape[-1])).detach(),
    "as tensor": lambda p: torch.as_tensor(p).detach().clone(),
    "contiguous": lambda p: p.contiguous().detach().clone(),
    "isnan": lambda p: bool(p.isnan().any()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_parameter_outside_forward_gives_its_true_value(
    read: Callable[[Tensor], Any], placement: Placement, swap: Path
) -> None:
    """Read while everything is away, between steps, and again after more steps: a stale copy would show."""

    def scenario(session: Session) -> Any:
        chosen = ["blocks.0.up.weight", "blocks.5.norm_feed.weight", "position", "embed.weight", "norm.bias"]
        params = dict(session.model.named_parameters())
        seen = []
        for step in range(3):
            seen.append([read(params[name]) for name in chosen] if step != 1 else None)
            session.train(step)
        return [*seen, [read(params[name]) for name in chosen]]

    def rounded(session: Session) -> Any:
        result = scenario(session)
        return result if read is not repr else [result[0]]

    agree(rounded, GPT, placement, swap)


def test_zero_dimensional_and_empty_parameters_read_true(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        model = session.model
        return [model.gain.item(), float(model.gain.detach()), bool(model.gain > 0), model.nothing.tolist(),
                model.no_rows.shape, model.no_rows.numel(), model.nothing.sum().item()]  # fmt: skip

    agree(scenario, ODD, placement, swap)


def test_parameters_that_are_away_do_not_look_tied_to_one_another(placement: Placement, swap: Path) -> None:
    """Savers find ties by address: equal addresses for different parameters would drop all but one of them."""
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        try:
            places = [p.data_ptr() for p in session.model.parameters()]
        except TieredError as refusal:
            refused(refusal, "data_ptr")
        else:
            assert 0 not in places
        tied = session.model.head.weight
        assert tied is session.model.embed.weight


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_of_a_sharded_model_is_a_true_plain_model_or_refused_by_name(
    duplicate: Callable[[nn.Module], nn.Module], placement: Placement, swap: Path
) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        want, batch = session.weights(), session.batch(3)
        with torch.no_grad():
            loss = session.model(*batch)
        try:
            twin = duplicate(session.model)
        except TieredError as refusal:
            refused(refusal)
        else:
            same(copied(twin.state_dict()), want, exact=True)
            with torch.no_grad():
                same(twin(*batch), loss, exact=True)
                twin.embed.weight.zero_()
            assert twin.head.weight is twin.embed.weight
            same(session.weights(), want, exact=True, where="the original after its copy was edited")
        session.train(1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
def test_a_copy_of_one_sharded_parameter_holds_its_values_or_is_refused_by_name(
    duplicate: Callable[[nn.Parameter], nn.Parameter], placement: Placement, swap: Path
) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        p = session.model.blocks[6].up.weight
        try:
            twin = duplicate(p)
        except TieredError as refusal:
            refused(refusal, "blocks.6.up.weight")
        else:
            assert twin is not p
            same(copied(twin), session.weights()["blocks.6.up.weight"], exact=True)
        session.train(1)


def transposed() -> nn.Module:
    """A model with parameters that are not contiguous in memory."""
    model = Gpt(layers=3)
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
    return model


def test_parameters_that_are_not_contiguous_keep_their_values_or_are_refused_by_name(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        return [session.train_on(range(3)), session.weights()]

    case = Case("transposed", transposed, token_batch)
    try:
        agree(scenario, case, placement, swap)
    except TieredError as refusal:
        refused(refusal, "up.weight")


def test_reading_during_an_open_forward_pass_does_not_disturb_it(swap: Path) -> None:
    def scenario(session: Session) -> Any:
        norms: list[float] = []

        def peek(module: nn.Module, inputs: Any, output: Any) -> None:
            norms.extend(p.detach().norm().item() for p in session.model.parameters())

        hook = session.model.blocks[4].register_forward_hook(peek)
        losses = session.train_on(range(2))
        hook.remove()
        return [losses, norms, session.weights()]

    agree(scenario, GPT, EMULATED, swap)

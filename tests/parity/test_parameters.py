"""No fake tensors: what a parameter looks like, reads as and accepts while its bytes are away.

Every parameter keeps its identity, name, shape and dtype; reading one gives its true values or a named error, and an
edit made in any of torch's ways reaches the copy that the optimizer steps. Leaves files and dictionaries to
`test_saving`.
"""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, GPT, ODD, Case, Gpt, token_batch
from parity.harness import EMULATED, NVME, Placement, Session, agree, copied, same, tiered_session
from torch import Tensor, nn

import tiered
from tiered.errors import TieredError


def train_on(session: Session, seeds: range) -> list[tuple[float, float]]:
    return [session.train(seed) for seed in seeds]


def facts(model: nn.Module) -> dict[str, Any]:
    """All that can be known about a parameter without its values."""
    return {
        name: [
            str(p.dtype), str(p.device), list(p.shape), list(p.size()), p.dim(), p.ndim, p.numel(), p.nelement(),
            list(p.stride()), p.element_size(), p.nbytes, p.is_contiguous(), p.is_leaf, p.requires_grad,
            p.is_floating_point(), p.storage_offset(), p.layout == torch.strided, p.grad_fn is None, p.is_sparse,
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
            assert "data_ptr" in str(refusal)
        else:
            assert 0 not in places
        tied = session.model.head.weight
        assert tied is session.model.embed.weight


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "add_ a tensor": lambda p: p.add_(torch.full_like(p, 0.1)),
    "augmented": lambda p: p.__imul__(0.5),
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p)),
    "data.add_": lambda p: p.data.add_(0.1),
    "data.copy_": lambda p: p.data.copy_(torch.linspace(-1, 1, p.numel()).view_as(p)),
    "data assigned": lambda p: setattr(p, "data", p.data * 0.5),
    "data item": lambda p: p.data.__setitem__(0, 0.25),
    "detach().mul_": lambda p: p.detach().mul_(0.5),
    "set item": lambda p: p.__setitem__(0, 0.25),
    "view then fill_": lambda p: p.view(-1)[:3].fill_(0.5),
    "numpy write": lambda p: p.detach().numpy().__setitem__(0, 0.25),
    "zero_": lambda p: p.zero_(),
    "nn.init.normal_": lambda p: nn.init.normal_(p, std=0.1),
    "nn.init.uniform_": lambda p: nn.init.uniform_(p, -0.1, 0.1),
    "nn.init.constant_": lambda p: nn.init.constant_(p, 0.3),
    "out argument": lambda p: torch.mul(p.detach().clone(), 0.5, out=p.data),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_of_a_parameter_reaches_forward_optimizer_and_file(
    edit: Callable[[nn.Parameter], Any], placement: Placement, swap: Path
) -> None:
    """Edited before the first step (no state yet), between steps, and while gradients wait; never undone later."""

    def scenario(session: Session) -> Any:
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
        return [seen, train_on(session, range(2, 4)), session.weights(), session.moments()]

    agree(scenario, GPT, placement, swap)


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
        return [session.weights(), train_on(session, range(1, 3)), session.weights()]

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
            assert "state_dict" in str(refusal) or "gather" in str(refusal), f"no remedy in {refusal}"
        else:
            same(copied(twin.state_dict()), want, exact=True)
            with torch.no_grad():
                same(twin(*batch), loss, exact=True)
                twin.embed.weight.zero_()
            assert twin.head.weight is twin.embed.weight
            same(session.weights(), want, exact=True, where="the original after its copy was edited")
        session.train(1)


@pytest.mark.parametrize("pick", ["deepcopy", "pickle"])
def test_a_copy_of_one_sharded_parameter_holds_its_values_or_is_refused_by_name(
    pick: str, placement: Placement, swap: Path
) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        p = session.model.blocks[6].up.weight
        want = session.weights()["blocks.6.up.weight"]
        try:
            twin = copy.deepcopy(p) if pick == "deepcopy" else pickle.loads(pickle.dumps(p))
        except TieredError:
            continue_training = True
        else:
            same(twin.detach().clone(), want, exact=True)
            continue_training = twin is not p
        assert continue_training
        session.train(1)


@dataclass
class Transposed:
    """A model with parameters that are not contiguous in memory."""

    @staticmethod
    def build() -> nn.Module:
        model = Gpt(layers=3)
        for block in model.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
        return model


def test_parameters_that_are_not_contiguous_keep_their_values_or_are_refused_by_name(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        return [train_on(session, range(3)), session.weights()]

    case = Case("transposed", Transposed.build, token_batch)
    try:
        agree(scenario, case, placement, swap)
    except TieredError as refusal:
        assert "up.weight" in str(refusal)


def test_reading_during_an_open_forward_pass_does_not_disturb_it(swap: Path) -> None:
    def scenario(session: Session) -> Any:
        norms: list[float] = []

        def peek(module: nn.Module, inputs: Any, output: Any) -> None:
            norms.extend(p.detach().norm().item() for p in session.model.parameters())

        hook = session.model.blocks[4].register_forward_hook(peek)
        losses = train_on(session, range(2))
        hook.remove()
        return [losses, norms, session.weights()]

    agree(scenario, GPT, EMULATED, swap)

"""`state_dict()` and `load_state_dict()` of model and optimizer are torch's, whole and real, wherever the bytes live.

A file written from a sharded model must load into a plain one and the other way round, at any moment, ties and strict
errors included. Leaves the project's own checkpoint format to its own tests.
"""

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ADAPTED, CASES, CONV, GPT, MOE, ODD, Case
from parity.harness import (
    ADAM,
    EMULATED,
    HOST,
    NVME,
    PROMPT,
    Placement,
    PlainAdamW,
    Session,
    agree,
    copied,
    frozen,
    plain_session,
    same,
    tiered_session,
)
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

import tiered
from tiered.errors import TieredError


@pytest.fixture(params=PROMPT, ids=lambda placement: placement.name)
def placement(request: pytest.FixtureRequest) -> Placement:
    """What is checked here is the store's, whenever the device computes: `LATE` would only take its time."""
    return request.param


def build_plain(case: Case, seed: int = 123) -> nn.Module:
    torch.manual_seed(seed)
    return case.build()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_state_dict_is_torchs_in_names_order_shapes_and_values(
    case: Case, placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        first = session.model.state_dict()
        assert isinstance(first, OrderedDict)
        assert all(type(value) is Tensor for value in first.values())
        assert all(value.untyped_storage().nbytes() >= value.nbytes for value in first.values())
        seen = [session.weights(), session.train(0), session.weights()]
        with torch.no_grad():
            session.model(*session.batch(5))
        return [*seen, session.weights(), dict(session.model.state_dict(prefix="net."))]

    agree(scenario, case, placement, swap)


def test_a_state_dict_taken_between_backward_and_step_holds_the_old_weights(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        session.backward(1)
        before = session.weights()
        session.optimizer.step()
        return [before, session.weights()]

    agree(scenario, GPT, placement, swap)


def test_a_state_dict_that_was_kept_is_a_snapshot_or_follows_as_torchs_does_but_never_decays(
    placement: Placement, swap: Path
) -> None:
    """torch's dictionary shares the weights' memory; ours may share or copy, but may not turn into freed memory."""
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        held = session.model.state_dict()
        at_once = copied(held)
        for step in range(1, 4):
            session.train(step)
        later = session.weights()
        for name, value in held.items():
            assert any(torch.equal(value, known[name]) for known in (at_once, later)), name


def test_the_state_dict_of_a_child_is_real(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        return [dict(session.model.blocks[3].state_dict()), dict(session.model.embed.state_dict())]

    agree(scenario, GPT, placement, swap)


@pytest.mark.parametrize("case", [GPT, CONV, ODD, ADAPTED], ids=lambda case: case.name)
def test_torch_save_of_the_state_dict_loads_into_a_plain_model(case: Case, placement: Placement, swap: Path) -> None:
    with tiered_session(case, placement, swap) as session:
        session.train_on(range(2))
        file = io.BytesIO()
        torch.save(session.model.state_dict(), file)
        file.seek(0)
        want = session.weights()
        plain = build_plain(case)
        plain.load_state_dict(torch.load(file, weights_only=True))
    same(copied(plain.state_dict()), want, exact=True)


def test_safetensors_files_hold_every_weight_and_keep_the_tie(placement: Placement, swap: Path, tmp_path: Path) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train_on(range(2))
        want = session.weights()
        save_file({k: v.clone() for k, v in session.model.state_dict().items()}, str(tmp_path / "all.safetensors"))
        save_model(session.model, str(tmp_path / "model.safetensors"))
    same(load_file(str(tmp_path / "all.safetensors")), dict(sorted(want.items())), exact=True)
    plain = build_plain(GPT)
    load_model(plain, str(tmp_path / "model.safetensors"))
    same(copied(plain.state_dict()), want, exact=True)


def test_named_parameters_saved_one_by_one_are_real(placement: Placement, swap: Path) -> None:
    """As adapter libraries do: the trainable parameters only, straight from the parameter objects."""

    def scenario(session: Session) -> Any:
        session.train_on(range(2))
        chosen = {n: p for n, p in session.model.named_parameters() if p.requires_grad}
        file = io.BytesIO()
        torch.save({name: p.detach().cpu().clone() for name, p in chosen.items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    agree(scenario, ADAPTED, placement, swap)


@pytest.mark.parametrize("when", ["before sharding", "before the first step", "between steps", "after a backward"])
@pytest.mark.parametrize("case", [GPT, CONV], ids=lambda case: case.name)
def test_a_plain_checkpoint_loads_at_any_moment_and_the_next_step_keeps_it(
    case: Case, when: str, placement: Placement, swap: Path
) -> None:
    """The copy that the optimizer steps must be the loaded one, else the first step undoes the load."""
    checkpoint = copied(build_plain(case).state_dict())

    def load(model: nn.Module) -> None:
        assert str(model.load_state_dict(checkpoint)) == "<All keys matched successfully>"

    def scenario(session: Session) -> Any:
        seen: list[Any] = []
        if when == "before the first step":
            load(session.model)
            seen.append(session.weights())
        seen.append(session.train(0))
        if when == "between steps":
            load(session.model)
        session.backward(1)
        if when == "after a backward":
            load(session.model)
            seen.append(session.weights())
        session.optimizer.step()
        session.optimizer.zero_grad()
        return [seen, session.weights(), session.train_on(range(2, 4)), session.weights()]

    agree(scenario, case, placement, swap, prepare=load if when == "before sharding" else None)


def test_loading_reports_missing_unexpected_and_misshapen_entries_as_torch_does(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        good = session.weights()
        missing = {name: value for name, value in good.items() if name != "blocks.1.up.bias"}
        messages = []
        for wrong in (missing, {**good, "extra": torch.ones(2)}, {**good, "position": torch.ones(3, 2)}):
            with pytest.raises(RuntimeError) as caught:
                session.model.load_state_dict(wrong)
            messages.append(str(caught.value))
        loose = session.model.load_state_dict({**missing, "extra": torch.ones(2)}, strict=False)
        return [messages, sorted(loose.missing_keys), sorted(loose.unexpected_keys), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_a_load_through_one_name_of_a_tied_pair_changes_both(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        assert session.model.head.weight is session.model.embed.weight
        keys = list(session.model.state_dict())
        session.model.load_state_dict({"head.weight": torch.full((48, 32), 0.05)}, strict=False)
        return [keys, session.weights(), session.train(1), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_a_checkpoint_with_other_dtypes_is_cast_into_the_parameters(placement: Placement, swap: Path) -> None:
    low = {name: value.bfloat16() for name, value in build_plain(GPT).state_dict().items()}

    def scenario(session: Session) -> Any:
        session.model.load_state_dict(low)
        return [session.weights(), session.train(0), session.weights()]

    agree(scenario, GPT, placement, swap)


def test_loading_by_assignment_is_right_or_refused_by_name(placement: Placement, swap: Path) -> None:
    checkpoint = copied(build_plain(GPT).state_dict())

    def scenario(session: Session) -> Any:
        session.model.load_state_dict(copied(checkpoint), assign=True)
        with torch.no_grad():
            return [session.weights(), session.model(*session.batch(0)).item()]

    agree(scenario, GPT, placement, swap, refusable=True)


OPTIONS = {"lr", "betas", "eps", "weight_decay", "maximize", "params"}


@pytest.mark.parametrize("case", [GPT, MOE, ODD], ids=lambda case: case.name)
def test_the_optimizers_state_dict_has_torchs_layout(case: Case, placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        empty = session.optimizer.state_dict()["state"]
        session.train_on(range(3))
        saved = session.optimizer.state_dict()
        groups = [{key: value for key, value in g.items() if key in OPTIONS} for g in saved["param_groups"]]
        shapes = {index: sorted(entry) for index, entry in saved["state"].items()}
        for entry in saved["state"].values():
            assert all(type(value) is Tensor for value in entry.values())
        return [empty, [dict(sorted(g.items())) for g in groups], shapes, dict(sorted(session.moments().items()))]

    agree(scenario, case, placement, swap)


def resumed_plainly(case: Case, weights: Any, state: Any) -> list[Any]:
    """Continues in plain torch from a model and an optimizer state dict."""
    model = build_plain(case)
    model.load_state_dict(weights)
    optimizer = PlainAdamW(model.parameters(), **{**ADAM, "lr": 0.5})
    optimizer.load_state_dict(state)
    session = Session(case, model, optimizer, None)
    return [session.train_on(range(3, 6)), session.weights(), session.moments()]


@pytest.mark.parametrize("case", [GPT, MOE, ODD], ids=lambda case: case.name)
def test_torchs_adamw_resumes_from_the_saved_optimizer(case: Case, placement: Placement, swap: Path) -> None:
    with tiered_session(case, placement, swap) as session:
        session.train_on(range(3))
        file = io.BytesIO()
        torch.save({"weights": session.model.state_dict(), "state": session.optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        want = [session.train_on(range(3, 6)), session.weights(), session.moments()]
    same(resumed_plainly(case, saved["weights"], saved["state"]), want, exact=False)


@pytest.mark.parametrize("case", [GPT, MOE, ODD], ids=lambda case: case.name)
def test_training_resumes_from_a_checkpoint_of_plain_torch(case: Case, placement: Placement, swap: Path) -> None:
    with plain_session(case) as session:
        session.train_on(range(3))
        weights, state = session.weights(), copied(session.optimizer.state_dict())
        want = [session.train_on(range(3, 6)), session.weights(), session.moments()]
    with tiered_session(case, placement, swap, lr=0.5) as session:
        session.train(77)  # whatever was there before a load is gone after it
        session.model.load_state_dict(weights)
        session.optimizer.load_state_dict(state)
        got = [session.train_on(range(3, 6)), session.weights(), session.moments()]
    same(got, want, exact=False)


@pytest.mark.parametrize("first", [HOST, NVME, EMULATED], ids=lambda place: place.name)
def test_a_run_split_over_two_sessions_is_bit_equal_to_one_run(
    first: Placement, placement: Placement, swap: Path
) -> None:
    """Saved from one placement, resumed in another, by the state dicts alone."""
    with tiered_session(MOE, HOST, swap, max_grad_norm=0.5) as session:
        session.train_on(range(6))
        want = [session.weights(), session.moments()]
    with tiered_session(MOE, first, swap, max_grad_norm=0.5) as session:
        session.train_on(range(3))
        weights, state = session.weights(), copied(session.optimizer.state_dict())
    with tiered_session(MOE, placement, swap, max_grad_norm=0.5) as session:
        session.model.load_state_dict(weights)
        session.optimizer.load_state_dict(state)
        session.train_on(range(3, 6))
        same([session.weights(), session.moments()], want, exact=True)


def test_frozen_weights_and_buffers_are_saved_and_loaded_with_the_rest(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        session.train(0)
        saved = session.weights()
        session.model.load_state_dict({name: value + 1 for name, value in saved.items()})
        return [saved, session.weights(), session.train(1), session.weights()]

    agree(scenario, CONV, placement, swap, prepare=frozen("stem"))


def test_an_optimizer_state_of_another_model_is_refused_and_changes_nothing(placement: Placement, swap: Path) -> None:
    with plain_session(MOE) as session:
        session.train(0)
        other = copied(session.optimizer.state_dict())
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        before = [session.weights(), session.moments()]
        with pytest.raises((ValueError, TieredError)):
            session.optimizer.load_state_dict(other)
        same([session.weights(), session.moments()], before, exact=True)
        misshapen = copied(session.optimizer.state_dict())
        misshapen["state"][0]["exp_avg"] = torch.ones(3)
        with pytest.raises((ValueError, TieredError), match=r"embed|exp_avg|position"):
            session.optimizer.load_state_dict(misshapen)
        same([session.weights(), session.moments()], before, exact=True)


@pytest.mark.parametrize("durability", ["process", "none"])
def test_stats_count_what_the_swap_files_take(durability: str, swap: Path) -> None:
    """Two slots where steps are committed, and one where not."""
    config = tiered.Config(nvme=swap, param_tier="nvme", optimizer_tier="nvme", device="cpu", durability=durability)
    with tiered.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config) as model:
        files = list(swap.glob("*/swap"))
        assert tiered.stats(model).resident_bytes["nvme"] == sum(file.stat().st_size for file in files) > 0


def test_stats_name_where_each_kind_of_state_lives(swap: Path) -> None:
    with tiered_session(GPT, NVME, swap) as session:
        session.train(0)
        placement = tiered.stats(session.model).placement
    nbytes = sum(p.numel() for p in GPT.build().parameters()) * 4
    assert placement["param"]["nvme"] >= nbytes
    assert placement["exp_avg"]["nvme"] >= nbytes
    assert sum(placement["exp_avg_sq"].values()) >= nbytes

"""What is saved goes on bit for bit, on any placement, number of ranks and stage; what does not fit is named first."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Gpt, OddShapes
from safetensors import safe_open
from threaded_ranks import World, sharded
from torch import nn

import tiered
from tiered.checkpoint import folder as folder_module
from tiered.checkpoint import slices

LINK = tiered.Emulation(max_delay_s=1e-4)
DRIVE: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme"}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu"},
    "drive": {"device": "cpu", **DRIVE},
    "device": {"device": "emulated", "emulation": LINK},
    "device and drive": {"device": "emulated", "emulation": LINK, **DRIVE},
}
Outcome = dict[str, Any]


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


class Net(nn.Module):
    """Tied, frozen, 0-dim, empty, odd and unused parameters, and buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.last = nn.Linear(12, 12, bias=False)
        self.last.weight = self.first.weight
        self.never = nn.Parameter(torch.randn(5))
        self.blocks[0].requires_grad_(False)
        self.register_buffer("mask", torch.ones(12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x) * self.gain)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.last(x) * self.mask).square().mean() + self.nothing.sum()


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(model: nn.Module, optimizer: Any, seeds: range, part: int = 0, parts: int = 1) -> None:
    for seed in seeds:
        rows = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed)).chunk(parts)[part]
        optimizer.scale_loss(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()


def outcome(model: nn.Module, optimizer: Any) -> Outcome:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return {"values": values, "state": state["state"], "groups": groups, "norm": optimizer.grad_norm}


def equal(got: Outcome, want: Outcome) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def session(
    seed: int = 0, lr: float = 1e-2, model: nn.Module | None = None, **settings: Any
) -> Iterator[tuple[nn.Module, tiered.AdamW]]:
    model = network(seed) if model is None else model
    with sharded(model, **{"device": "cpu", **settings}):
        decays = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decays}, {"params": rest, "weight_decay": 0.0}]
        yield model, tiered.AdamW(groups, lr=lr, max_grad_norm=1.0)


def uninterrupted() -> Outcome:
    with session() as (model, optimizer):
        train(model, optimizer, range(5))
        return outcome(model, optimizer)


# --- going on ---


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("then", PLACES)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_wherever_states_live(
    place: str, then: str, tmp_path: Path
) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    want = uninterrupted()
    with session(nvme=swap, **PLACES[place]) as (model, optimizer):
        train(model, optimizer, range(3))
        tiered.save(model, optimizer, tmp_path / "saved", extra={"epoch": 3})
        train(model, optimizer, range(3, 5))
        equal(outcome(model, optimizer), want)  # saving has changed nothing
    with session(9, 1.0, nvme=swap, **PLACES[then]) as (model, optimizer):
        train(model, optimizer, range(1))  # what is loaded replaces states that there are
        assert tiered.load(model, optimizer, tmp_path / "saved") == {"epoch": 3}
        assert optimizer.updates == 3
        train(model, optimizer, range(3, 5))
        equal(outcome(model, optimizer), want)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1), (1, 2)])
def test_a_checkpoint_of_any_ranks_and_stage_loads_on_any_others(
    saving: int, loading: int, stage: int, tmp_path: Path
) -> None:
    def save(rank: int) -> Outcome:
        with session(stage=stage, nvme=tmp_path, **DRIVE) as (model, optimizer):
            train(model, optimizer, range(2), rank, saving)
            tiered.save(model, optimizer, tmp_path / "saved", extra={"rank": rank})
            return outcome(model, optimizer)

    def load(rank: int) -> Outcome:
        with session(9, 1.0, stage=stage % 3 + 1) as (model, optimizer):
            extra = tiered.load(model, optimizer, tmp_path / "saved")
            assert extra == {"rank": rank if rank < saving else 0}
            found = outcome(model, optimizer)
            train(model, optimizer, range(2, 3), rank, loading)  # which needs every copy to be the loaded one
            return found

    want = on_ranks(saving, save)[0]
    for found in on_ranks(loading, load):
        equal({**found, "norm": want["norm"]}, want)


def on_ranks(size: int, program: Callable[[int], Any]) -> list[Any]:
    if size == 1:
        return [program(0)]
    with World(size).installed() as world:
        return world.run(program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_goes_on_bit_for_bit_with_its_masters_and_loss_scale(dtype: torch.dtype, tmp_path: Path) -> None:
    precision = tiered.MixedPrecision(param_dtype=dtype)
    seen = []
    for stop in (None, 2):
        with session(precision=precision) as (model, optimizer):
            train(model, optimizer, range(4 if stop is None else stop))
            if stop is None:
                seen.append(outcome(model, optimizer) | {"scale": optimizer.loss_scale})
            else:
                tiered.save(model, optimizer, tmp_path / "saved")
    with session(9, precision=precision) as (model, optimizer):
        tiered.load(model, optimizer, tmp_path / "saved")
        train(model, optimizer, range(2, 4))
        seen.append(outcome(model, optimizer) | {"scale": optimizer.loss_scale})
    equal(seen[1], seen[0])


def test_another_precision_takes_the_values_as_they_round(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        train(model, optimizer, range(2))
        tiered.save(model, optimizer, tmp_path / "saved")
        want = {name: value.clone() for name, value in model.state_dict().items()}
    with session(9, precision=tiered.MixedPrecision(param_dtype=torch.bfloat16)) as (model, optimizer):
        tiered.load(model, optimizer, tmp_path / "saved")
        torch.testing.assert_close(dict(model.state_dict()), want, rtol=0, atol=0)  # the masters have every bit
        assert torch.equal(model.blocks[1].weight.detach().float(), want["blocks.1.weight"].bfloat16().float())


def test_a_file_of_a_checkpoint_is_a_safetensors_file(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        folder = tiered.save(model, optimizer, tmp_path / "saved")
        want = model.state_dict()["blocks.1.weight"].reshape(-1).clone()
    (file,) = folder.glob("*/*.safetensors")
    with safe_open(str(file), framework="pt") as opened:
        assert torch.equal(opened.get_tensor("blocks.1.weight:value:0"), want)


# --- weights alone, renamed, missing ---


def test_without_an_optimizer_values_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        train(model, optimizer, range(2))
        tiered.save(model, None, tmp_path / "saved")
        want = {name: value.clone() for name, value in model.state_dict().items()}
    with session(9) as (model, optimizer):
        train(model, optimizer, range(1))
        assert tiered.load(model, optimizer, tmp_path / "saved") is None
        assert optimizer.updates == 0, "moments are fresh"
        torch.testing.assert_close(dict(model.state_dict()), want, rtol=0, atol=0)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.fresh = nn.Linear(4, 2)


class Original(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gone = nn.Linear(2, 2)


def test_renamed_parameters_load_by_a_map_and_names_that_fit_nothing_are_all_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original, renamed = Original(), Renamed()
    want = original.first.weight.detach().clone()
    with sharded(original, device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, tmp_path / "saved")
    with sharded(renamed, device="cpu") as (model, optimizer, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(tiered.UsageError) as refusal:
            tiered.load(model, optimizer, tmp_path / "saved")
        assert "4 missing in the checkpoint (entry.weight, entry.bias, fresh.weight, fresh.bias)" in str(refusal.value)
        assert "4 of the checkpoint not used (first.weight, first.bias, gone.weight, gone.bias)" in str(refusal.value)
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        names = {"entry.weight": "first.weight", "entry.bias": "first.bias"}
        with caplog.at_level(logging.WARNING):
            tiered.load(model, optimizer, tmp_path / "saved", names=names, strict=False)
        assert "fresh.weight" in caplog.text
        assert "gone.bias" in caplog.text
        assert torch.equal(model.entry.weight.detach(), want)
        assert torch.equal(model.fresh.weight.detach(), before["fresh.weight"])


def test_a_shape_that_differs_is_named_before_anything_is_touched(tmp_path: Path) -> None:
    with sharded(nn.Sequential(nn.Linear(4, 4)), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, tmp_path / "saved")
    with sharded(nn.Sequential(nn.Linear(4, 5)), device="cpu") as (model, optimizer, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(tiered.UsageError, match=r"'0\.weight' has shape \(5, 4\), but \(4, 4\)"):
            tiered.load(model, optimizer, tmp_path / "saved")
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("build", [lambda: Gpt(2), OddShapes])
def test_tied_and_odd_models_come_back_as_they_were(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    with sharded(build(), device="cpu") as (model, optimizer, _):
        want = {name: value.clone() for name, value in model.state_dict().items()}
        tiered.save(model, optimizer, tmp_path / "saved")
    torch.manual_seed(1)
    with sharded(build(), device="cpu") as (model, optimizer, _):
        tiered.load(model, optimizer, tmp_path / "saved")
        torch.testing.assert_close(dict(model.state_dict()), want, rtol=0, atol=0)


# --- extra ---


def test_an_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "rng": torch.get_rng_state(),
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(2.5),
        "numbers": [1, -(1 << 62), 0.1, float("nan"), float("-inf"), None, True],
        "words": {"dict": "a", "tensor": "b", "": []},
    }
    with session() as (model, optimizer):
        tiered.save(model, optimizer, tmp_path / "saved", extra=extra)
        got = tiered.load(model, optimizer, tmp_path / "saved")
    assert got.pop("words") == extra.pop("words")
    assert got["numbers"].pop() is True
    assert got["numbers"].pop() is None
    extra["numbers"] = extra["numbers"][:-2]
    torch.testing.assert_close(got, extra, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [object(), {1: 2}, {"a": [{"b": {3, 4}}]}, 1 << 70, b"bytes"])
def test_an_extra_that_would_need_pickle_is_named_and_nothing_is_written(bad: Any, tmp_path: Path) -> None:
    with session() as (model, optimizer), pytest.raises(tiered.UsageError, match=r"^extra"):
        tiered.save(model, optimizer, tmp_path / "saved", extra=bad)
    assert not (tmp_path / "saved" / "manifest.json").exists()
    assert list(tmp_path.glob("saved/*")) == []


# --- several, and failures ---


def test_as_many_as_are_to_be_kept_are_kept_and_the_last_one_loads(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        for seed in range(4):
            train(model, optimizer, range(seed, seed + 1))
            tiered.save(model, optimizer, tmp_path, extra=seed, keep=2)
        assert sorted(os.listdir(tmp_path)) == ["step-000000003", "step-000000004"]
        assert tiered.load(model, optimizer, tmp_path) == 3
        assert tiered.load(model, optimizer, tmp_path / "step-000000003") == 2
        train(model, optimizer, range(5, 6))
        tiered.save(model, optimizer, tmp_path, extra="again", keep=1)  # step 4 once more, from an older one
        assert tiered.load(model, optimizer, tmp_path) == "again"
        assert os.listdir(tmp_path) == ["step-000000004"]


@pytest.mark.parametrize("place", ["write", "fsync", "rename"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_save_that_fails_leaves_the_checkpoint_before_and_the_run_goes_on(
    size: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(*_: Any) -> int:
        raise full

    def program(rank: int) -> Outcome:
        with session(stage=2) as (model, optimizer):
            train(model, optimizer, range(1), rank, size)
            tiered.save(model, optimizer, tmp_path / "saved", extra=1)
            train(model, optimizer, range(1, 2), rank, size)
            if rank == 0:
                target = slices.os if place != "rename" else folder_module.os
                monkeypatch.setattr(target, place, fails)
            with pytest.raises(tiered.StorageError):
                tiered.save(model, optimizer, tmp_path / "saved", extra=2)
            if rank == 0:
                monkeypatch.undo()
            found = outcome(model, optimizer)
            assert tiered.load(model, optimizer, tmp_path / "saved") == 1
            return found

    results = on_ranks(size, program)
    assert len(list((tmp_path / "saved").iterdir())) == 2, "the manifest, and the data it names"
    equal(results[0], results[-1])


def test_a_save_that_one_rank_alone_calls_is_named_on_every_rank(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with session() as (model, optimizer):
            train(model, optimizer, range(1), rank, 2)
            if rank:
                tiered.save(model, optimizer, tmp_path / "saved")
            else:
                model.state_dict()

    with World(2).installed() as world:
        ends = world.ended(program)
    assert all(isinstance(end, tiered.RankError) and "save()" in str(end) for end in ends), ends


def test_a_flipped_bit_is_named_and_never_trained_on(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        train(model, optimizer, range(2))
        folder = tiered.save(model, optimizer, tmp_path / "saved")
        want = outcome(model, optimizer)
        (file,) = folder.glob("*/*.safetensors")
        good = file.read_bytes()
        header = 8 + int.from_bytes(good[:8], "little")
        for at in {header, header + 777, len(good) - 1}:
            file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            with pytest.raises(tiered.CorruptDataError, match="not those that were written") as caught:
                tiered.load(model, optimizer, tmp_path / "saved")
            assert caught.value.filename == str(file)
            with pytest.raises(tiered.UsageError):
                optimizer.step()
            with pytest.raises(tiered.UsageError):
                tiered.save(model, optimizer, tmp_path / "another")
        file.write_bytes(good)
        tiered.load(model, optimizer, tmp_path / "saved")
        equal({**outcome(model, optimizer), "norm": want["norm"]}, want)
        train(model, optimizer, range(2, 3))


def test_settings_of_parameter_groups_follow_their_parameters_in_whatever_order_groups_come(tmp_path: Path) -> None:
    def grouped(model: nn.Module, swapped: bool) -> tiered.AdamW:
        decays = {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 1e-3, "weight_decay": 0.3}
        rest = {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-3, "weight_decay": 0.0}
        return tiered.AdamW([rest, decays] if swapped else [decays, rest])

    with sharded(network(), device="cpu") as (model, _, _):
        optimizer = grouped(model, False)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, 0.25
        tiered.save(model, optimizer, tmp_path / "saved")
    with sharded(network(), device="cpu") as (model, _, _):
        optimizer = grouped(model, True)
        tiered.load(model, optimizer, tmp_path / "saved")
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.25, 0.0), (0.5, 0.3)]

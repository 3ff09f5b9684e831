"""An update computed in backward is the update of its step, or is forgotten: to the last bit, whatever is done."""

import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_drives import Error, bad_drives
from stepping import BETWEEN, LAYERS, WIDTH, Between, Net, Trained, backward, training
from torch import nn

import tiered
from tiered.optim.early import EarlyUpdate
from tiered.zero.model import MODEL_ATTRIBUTE

DRIVE: dict[str, Any] = {"overlap": "backward", "host_budget": "6MiB"}


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    (made := tmp_path / "swap").mkdir()
    return made


@pytest.fixture(autouse=True)
def quick_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However loaded the machine is, what backward has queued is read and computed before the step asks for it."""
    keep = EarlyUpdate.keep

    def kept(self: Any, *given: Any) -> Any:
        until = time.monotonic() + 5
        with contextlib.suppress(tiered.StorageError):
            while self._run is not None and not self._run.over and time.monotonic() < until:
                self._pump()
                time.sleep(0.001)
        return keep(self, *given)

    monkeypatch.setattr(EarlyUpdate, "keep", kept)


def all_of(trained: Trained) -> list[Any]:
    """What is seen of a run when it is over."""
    states = trained.optimizer.state_dict()["state"]
    seen: list[Any] = [trained.optimizer.grad_norm]
    seen += [value.clone() for value in trained.model.state_dict().values()]
    return seen + [states[key][kind].clone() for key in states for kind in states[key]]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


Run = Callable[[Trained], list[Any]]


def compare(run: Run, swap: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """Runs it with everything in memory and on a drive; the groups that were kept there."""
    with training(swap, monkeypatch, "", host_budget="64MiB") as trained:
        expected = [*run(trained), *all_of(trained)]
    with training(swap, monkeypatch, "drive", **{**DRIVE, **settings}) as trained:
        getattr(trained.model, MODEL_ATTRIBUTE).early._balance.share = 1.0
        found = [*run(trained), *all_of(trained)]
        kept = trained.kept
    assert_equal(found, expected)
    return kept


def steps(trained: Trained, count: int = 6, clear: bool | None = True) -> list[Any]:
    seen = []
    for seed in range(count):
        seen.append(trained.step(seed))
        if clear is not None:
            trained.optimizer.zero_grad(clear)
    return seen


@pytest.mark.parametrize("limit", [None, 1e9])
def test_where_nothing_is_clipped_updates_are_kept(
    limit: float | None, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = limit
        return steps(trained)

    assert compare(run, swap, monkeypatch) >= 3 * LAYERS, "in four steps, all groups but those that stay"


def test_where_a_step_clips_it_is_computed_again_from_the_old_states(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(trained: Trained) -> list[Any]:
        seen = []
        for limit in (None, None, None, 1e-3, None, 1e-4, None, None):
            seen.append(backward(trained.model, len(seen)))
            trained.optimizer.max_grad_norm = limit
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        return seen

    assert compare(run, swap, monkeypatch) > 0


def test_while_every_step_clips_nothing_is_computed_before_its_step(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(swap, monkeypatch, "drive", **DRIVE) as trained:
        trained.optimizer.max_grad_norm = 1e-3
        steps(trained)
        groups = len(getattr(trained.model, MODEL_ATTRIBUTE).groups)
        trained.model.state_dict()
        assert len(trained.counted) == 6 * groups


@pytest.mark.parametrize("clear", [True, False, None])
@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_is_done_between_backward_and_step_gives_what_it_gives_in_memory(
    between: str, clear: bool | None, swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act: Between = BETWEEN[between]

    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        seen: list[Any] = []
        for seed in range(7):
            seen.append(backward(trained.model, seed))
            if seed in (3, 5):
                seen.append(act(trained, folder))
            trained.optimizer.step()
            if clear is not None:
                trained.optimizer.zero_grad(clear)
        return seen

    assert compare(run, swap, monkeypatch) > 0


@pytest.mark.parametrize("counts", [(2, 2, 2, 2, 2), (1, 3, 3, 3, 1, 1), (2, 2, 1, 2, 2, 4, 4)])
def test_a_step_of_several_backwards_is_the_step_of_their_sum(
    counts: tuple[int, ...], swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        seen = []
        for number, count in enumerate(counts):
            seen += [backward(trained.model, 10 * number + micro) for micro in range(count)]
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        return seen

    assert compare(run, swap, monkeypatch) > 0


def test_a_step_that_is_skipped_forgets_what_was_computed(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        seen = steps(trained, 4)
        backward(trained.model, 4)
        trained.model.layers[0].weight.grad.fill_(float("inf"))
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return [*seen, trained.optimizer.skipped_steps, *steps(trained, 4)]

    assert compare(run, swap, monkeypatch) > 0


def test_a_gradient_of_a_later_group_that_is_not_finite_undoes_what_earlier_ones_got(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        seen = steps(trained, 4)
        handle = trained.model.layers[0].weight.register_hook(lambda grad: grad * float("nan"))
        trained.step(4)
        handle.remove()
        trained.optimizer.zero_grad()
        return [*seen, trained.optimizer.skipped_steps, *steps(trained, 4)]

    assert compare(run, swap, monkeypatch) > 0


def test_a_backward_that_raises_half_way_and_one_without_a_step_leave_nothing(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("half way")

    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        seen = steps(trained, 4)
        handle = trained.model.layers[1].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            backward(trained.model, 4)
        handle.remove()
        trained.optimizer.zero_grad()
        seen += steps(trained, 3)
        backward(trained.model, 9)
        trained.optimizer.zero_grad()
        return [*seen, *steps(trained, 3)]

    assert compare(run, swap, monkeypatch) > 0


def test_settings_that_change_between_are_those_of_the_step(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        schedule = torch.optim.lr_scheduler.StepLR(trained.optimizer, step_size=1, gamma=0.7)
        seen = []
        for seed in range(7):
            seen.append(trained.step(seed))
            trained.optimizer.zero_grad()
            schedule.step()
            if seed == 4:
                backward(trained.model, 50)
                trained.optimizer.param_groups[0]["lr"] = 0.25
                trained.optimizer.step()
                trained.optimizer.zero_grad()
        return seen

    assert compare(run, swap, monkeypatch) > 0


def test_slow_writes_that_are_on_their_way_at_the_step_are_waited_for_by_whoever_needs_them(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        seen = steps(trained, 3)
        with bad_drives() as drives:
            drives.rule = lambda call: time.sleep(0.01) if call.write else None
            for seed in range(3):
                seen.append(trained.step(seed))
                trained.optimizer.zero_grad()
                seen += [p.sum().item() for p in reversed(list(trained.model.parameters()))]
            return [*seen, *steps(trained, 3)]

    assert compare(run, swap, monkeypatch) > 0


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_drive_that_fails_in_backward_fails_the_step_by_name_and_no_hint_raises(
    write: bool, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bad_drives() as drives, training(swap, monkeypatch, "drive", drive_timeout_s=None, **DRIVE) as trained:
        trained.optimizer.max_grad_norm = None
        steps(trained, 4)
        with torch.no_grad():
            trained.model(torch.ones(2, WIDTH))
        loss = trained.model(torch.ones(2, WIDTH))
        drives.rule = lambda call: Error(errno.EIO) if call.write == write else None
        with pytest.raises(tiered.StorageError):
            loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            for seed in range(3):
                trained.step(seed)
    assert list(swap.iterdir()) == []


def test_a_killed_run_goes_on_from_the_last_step_though_the_next_was_computed(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written beside the last commit is named by nothing."""
    with training(swap, monkeypatch, "drive", **DRIVE) as trained:
        trained.optimizer.max_grad_norm = None
        steps(trained, 4)
        expected = all_of(trained)
        backward(trained.model, 9)
        store = getattr(trained.model, MODEL_ATTRIBUTE).runtime.store
        store.revert()
        assert_equal(all_of(trained)[1:], expected[1:])


def test_masters_of_16_bit_parameters_are_kept_too(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = tiered.MixedPrecision(param_dtype=torch.bfloat16)
    ran = []
    for place, settings in (("", {"host_budget": "64MiB"}), ("drive", DRIVE)):
        with training(swap, monkeypatch, place, precision=precision, **settings) as trained:
            trained.optimizer.max_grad_norm = None
            ran.append([*steps(trained, 6), *all_of(trained)])
            if place:
                assert trained.kept > 0
    assert_equal(*ran)


def test_where_memory_is_short_candidates_give_way(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trained: Trained) -> list[Any]:
        trained.optimizer.max_grad_norm = None
        return steps(trained, 8)

    compare(run, swap, monkeypatch, host_budget="1MiB")


def test_one_slot_of_states_has_no_room_for_candidates(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(swap, monkeypatch, "drive", durability="none", **DRIVE) as trained:
        assert getattr(trained.model, MODEL_ATTRIBUTE).early is None
        steps(trained, 4)


def test_closing_a_model_with_candidates_under_way_leaves_nothing(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bad_drives() as drives, training(swap, monkeypatch, "drive", **DRIVE) as trained:
        trained.optimizer.max_grad_norm = None
        steps(trained, 4)
        drives.rule = lambda call: time.sleep(0.02) if call.write else None
        backward(trained.model, 4)
        assert tiered.stats(trained.model).staging_buffers > 0, "nothing was under way"
        tiered.close(trained.model, keep_weights=False)
    assert list(swap.iterdir()) == []


def test_after_a_step_every_buffer_is_back(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(swap, monkeypatch, "drive", **DRIVE) as trained:
        trained.optimizer.max_grad_norm = None
        steps(trained, 5)
        trained.model.state_dict()
        assert tiered.stats(trained.model).staging_buffers == 0
        assert trained.kept > 0
    assert isinstance(trained.model, Net)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_a_group_somebody_has_a_view_of_needs_no_staging_beside_that_of_the_others(
    overlap: str, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is updated at once, and in the same slots: all the staging there is may be theirs."""
    ran = []
    for place, more in (("", {"host_budget": "64MiB"}), ("drive", {"host_budget": "700KiB", "overlap": overlap})):
        with training(swap, monkeypatch, place, **more) as trained:
            trained.optimizer.max_grad_norm = None
            seen: list[Any] = []
            for seed in range(6):
                seen.append(backward(trained.model, seed))
                view = trained.model.layers[3].bias.grad if seed >= 3 else None
                trained.optimizer.step()
                trained.optimizer.zero_grad()
                del view
            ran.append([*seen, *all_of(trained)])
    assert_equal(*ran)


def test_a_larger_group_that_begins_to_train_gets_slots_it_fits_in(tmp_path: Path) -> None:
    ran = []
    for overlap in ("none", "backward"):
        (swap := tmp_path / overlap).mkdir()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 20000)).requires_grad_(True)
        model[4].requires_grad_(False)
        tiers = {"param_tier": "nvme", "optimizer_tier": "nvme"}
        config = tiered.Config(device="cpu", host_budget="32MiB", nvme=swap, overlap=overlap, **tiers)  # type: ignore[arg-type]
        with tiered.shard(model, config):
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            for step in range(6):
                if step == 3:
                    model[4].requires_grad_(True)
                model(torch.full((2, 16), 0.1 * step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ran.append([value.clone() for value in model.state_dict().values()])
            early = getattr(model, MODEL_ATTRIBUTE).early
            assert (early.kept > 0) if early is not None else overlap == "none"
    assert_equal(*ran)


@pytest.mark.parametrize("training_on", [False, True])
def test_a_step_of_which_everything_was_kept_is_committed_by_the_next_forward(
    training_on: bool, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(
        swap, monkeypatch, "drive", **{**DRIVE, "host_budget": "64MiB", "device_budget": "120KiB"}
    ) as trained:
        inside = getattr(trained.model, MODEL_ATTRIBUTE)
        inside.early._balance.share = 1.0
        trained.optimizer.max_grad_norm = None
        whole = 0
        for seed in range(12):
            before = trained.kept
            trained.step(seed)
            trained.optimizer.zero_grad()
            if trained.kept - before == len(inside.groups):
                whole += 1
                assert trained.lazy
                if training_on:
                    trained.model(torch.ones(2, WIDTH))
                else:
                    with torch.no_grad():
                        trained.model(torch.ones(2, WIDTH))
                assert not trained.lazy, "a kill would lose the step still"
            for group in inside.groups:  # so that all can be kept
                inside.executor.evict(group)
        assert whole > 0

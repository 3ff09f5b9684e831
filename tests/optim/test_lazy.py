"""A step that is computed later is the step that was decided: to the last bit, whatever happens in between."""

import contextlib
import errno
import gc
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_drives import Error, bad_drives
from stepping import (
    BETWEEN,
    LAYERS,
    PLACES,
    WIDTH,
    Between,
    Net,
    Trained,
    backward,
    change_gradients,
    evaluate,
    read_gradients,
    training,
)

import tiered
from tiered.optim import adamw, update
from tiered.store.store import TieredStore
from tiered.zero.model import MODEL_ATTRIBUTE


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    (made := tmp_path / "swap").mkdir()
    return made


def scenario(trained: Trained, between: Between, set_to_none: bool | None, folder: Path) -> list[Any]:
    """What is seen of a run that does something right after each step."""
    seen: list[Any] = []
    for seed in range(3):
        seen.append(trained.step(seed))
        if set_to_none is not None and between not in (read_gradients, change_gradients):
            trained.optimizer.zero_grad(set_to_none)
        seen.append(between(trained, folder))
        if set_to_none is not None:
            trained.model.zero_grad(set_to_none)
    seen.append(trained.optimizer.grad_norm)
    states = trained.optimizer.state_dict()["state"]
    seen += [value.clone() for value in trained.model.state_dict().values()]
    seen += [states[key][kind].clone() for key in states for kind in states[key]]
    return seen


@pytest.mark.parametrize("set_to_none", [True, False, None])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_done_right_after_a_step_gives_what_a_step_done_at_once_gives(
    place: str, between: str, set_to_none: bool | None, swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    for where in ("", place):
        (folder := tmp_path / f"of {where}").mkdir()
        with training(swap, monkeypatch, where) as trained:
            ran.append(scenario(trained, BETWEEN[between], set_to_none, folder))
    for at_once, lazy in zip(*ran, strict=True):
        if isinstance(at_once, torch.Tensor):
            torch.testing.assert_close(lazy, at_once, rtol=0, atol=0)
        else:
            assert lazy == at_once


@pytest.mark.parametrize("place", PLACES)
def test_a_step_returns_before_groups_are_updated_and_forward_updates_each_when_it_uses_it(
    place: str, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(swap, monkeypatch, place) as trained:
        trained.step(0)
        assert trained.counted == []
        assert trained.lazy
        at: list[int] = []
        for layer in trained.model.layers:
            layer.register_forward_hook(lambda *_: at.append(len(trained.counted)))
        trained.optimizer.zero_grad()
        backward(trained.model, 1)
        assert not trained.lazy
        assert at == [*range(at[0], at[0] + LAYERS)], at
        assert at[0] <= 2  # the root's own group is used before


def test_what_a_step_reads_is_on_its_way_when_it_returns(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(swap, monkeypatch, "drive") as trained:
        trained.step(0)
        trained.step(1)
        before = tiered.stats(trained.model).read_bytes["nvme"]
        backward(trained.model, 2)
        while trained.lazy:
            evaluate(trained, swap)
        middle = tiered.stats(trained.model).read_bytes["nvme"]
        trained.optimizer.step()
        assert trained.counted[-1] == len(trained.counted) - 1
        assert tiered.stats(trained.model).read_bytes["nvme"] > middle > before


def test_forward_takes_parameters_from_their_update_and_reads_none(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(swap, monkeypatch, "drive", device_budget="40KiB") as trained:
        for seed in range(3):
            trained.step(seed)
            trained.optimizer.zero_grad()
        moved = {"nvme": 0}
        moved["nvme"] = tiered.stats(trained.model).read_bytes["nvme"]
        with torch.no_grad():
            trained.model(torch.ones(2, WIDTH))
        of_update = tiered.stats(trained.model).read_bytes["nvme"] - moved["nvme"]
        with torch.no_grad():
            trained.model(torch.ones(2, WIDTH))
        of_forward = tiered.stats(trained.model).read_bytes["nvme"] - moved["nvme"] - of_update
        parameters = sum(p.numel() for p in trained.model.parameters())
        assert of_forward >= 4 * parameters * 0.8, "the parameters do not move"
        assert of_update <= 3 * 4 * parameters + 4096 * 8 * LAYERS


@pytest.mark.parametrize("place", PLACES)
def test_who_holds_a_view_of_gradients_or_values_sees_the_step_at_once(
    place: str, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch: what is done to a gradient after the step, through whatever tensor, is no part of it."""

    def run(where: str) -> list[torch.Tensor]:
        with training(swap, monkeypatch, where) as trained:
            backward(trained.model, 0)
            gradient, value = trained.model.layers[1].weight.grad, trained.model.layers[2].weight.data
            trained.optimizer.step()
            seen = value.clone()
            gradient.zero_()
            return [seen, *(v.clone() for v in trained.model.state_dict().values())]

    for at_once, lazy in zip(run(""), run(place), strict=True):
        torch.testing.assert_close(lazy, at_once, rtol=0, atol=0)


@pytest.mark.parametrize("nth", [0, 3, 9, 14])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_drive_that_fails_meanwhile_fails_whoever_needs_a_group_now_and_for_ever(
    write: bool, nth: int, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bad_drives() as drives, training(swap, monkeypatch, "drive", drive_timeout_s=None) as trained:
        trained.step(0)
        trained.step(1)
        trained.model.state_dict()
        backward(trained.model, 2)
        count = iter(range(10**9))
        drives.rule = lambda call: Error(errno.EIO) if call.write == write and next(count) >= nth else None
        with pytest.raises(tiered.StorageError):
            trained.optimizer.step()
            for _ in range(3):
                backward(trained.model, 3)
                trained.optimizer.step()
        for again in (trained.optimizer.step, trained.model.state_dict):
            with pytest.raises(tiered.TieredError):
                again()
    assert list(swap.iterdir()) == []


def test_after_a_step_that_failed_nobody_is_given_torn_weights_and_a_load_goes_on(
    swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(swap, monkeypatch, "drive") as trained:
        trained.step(0)
        tiered.save(trained.model, trained.optimizer, tmp_path / "saved")
        want = {name: value.clone() for name, value in trained.model.state_dict().items()}

        def broken(*chunk: Any) -> None:
            raise ArithmeticError("no more")

        with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
            patch.setattr(update, "on_host", broken)
            trained.step(1)
            trained.step(2)
        refusing = (
            lambda: backward(trained.model, 3),
            trained.model.state_dict,
            trained.optimizer.state_dict,
            lambda: tiered.save(trained.model, trained.optimizer, tmp_path / "torn"),
            lambda: tiered.close(trained.model),
        )
        for call in refusing:
            with pytest.raises(tiered.UsageError, match=r"failed half way.*no more"):
                call()
        tiered.load(trained.model, trained.optimizer, tmp_path / "saved")
        for name, value in trained.model.state_dict().items():
            assert torch.equal(value, want[name])
        trained.step(1)
        trained.step(2)


def test_a_step_that_fails_at_once_leaves_nothing_to_be_done_later(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups that move nothing, which are updated at once, beside others that are lazy."""
    with training(
        swap, monkeypatch, "drive", param_tier="host", optimizer_tier="auto", host_budget="420KiB"
    ) as trained:
        places = tiered.stats(trained.model).placement["exp_avg"]
        assert places.keys() == {"host", "nvme"}, places
        trained.step(0)
        assert trained.lazy
        assert trained.counted
        backward(trained.model, 1)
        store = getattr(trained.model, MODEL_ATTRIBUTE).runtime.store

        def broken(*chunk: Any) -> None:
            raise ArithmeticError

        with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
            patch.setattr(update, "on_host", broken)
            trained.optimizer.step()
        assert store.staged == 0
        assert not trained.lazy


@pytest.mark.parametrize("place", ["", *PLACES])
def test_a_step_a_save_and_a_load_inside_a_forward_or_a_gather_are_refused_and_change_nothing(
    place: str, swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(swap, monkeypatch, place) as trained:
        trained.step(0)
        model, optimizer = trained.model, trained.optimizer
        calls = (
            optimizer.step,
            lambda: tiered.save(model, optimizer, tmp_path / "saved"),
            lambda: tiered.load(model, optimizer, tmp_path / "saved"),
            lambda: tiered.close(model),
        )
        want = {name: value.clone() for name, value in model.state_dict().items()}

        def refuse(*_: Any) -> None:
            for call in calls:
                with pytest.raises(tiered.UsageError, match="inside a forward or a gather"):
                    call()

        backward(model, 1)
        with tiered.gather(model.layers[1], modify=True):
            refuse()
        handle = model.layers[2].register_forward_pre_hook(refuse)
        model(torch.ones(2, WIDTH))
        handle.remove()
        assert optimizer.calls == 1
        torch.testing.assert_close(dict(model.state_dict()), want, rtol=0, atol=0)


def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, before which Ctrl-C comes once."""
    left = [True]

    def struck(*given: Any, **how: Any) -> Any:
        if left:
            left.clear()
            signal.raise_signal(signal.SIGINT)
        return function(*given, **how)

    return struck


@pytest.mark.parametrize("place", ["", *PLACES])
@pytest.mark.parametrize("where", ["decision", "plan", "commit"])
def test_a_step_that_is_interrupted_is_counted_and_happens_or_neither(
    where: str, place: str, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for interrupted in (False, True):
        with training(swap, monkeypatch, place) as trained, monkeypatch.context() as patch:
            trained.step(0)
            backward(trained.model, 1)
            if interrupted and where == "decision":
                patch.setattr(tiered.AdamW, "_taken", interrupting(tiered.AdamW._taken))
            elif interrupted and where == "plan":
                patch.setattr(adamw, "plan_step", interrupting(adamw.plan_step))
            elif interrupted:
                patch.setattr(TieredStore, "commit", interrupting(TieredStore.commit))
            with contextlib.suppress(KeyboardInterrupt):
                trained.optimizer.step()
                trained.model.state_dict()
            assert (trained.optimizer.calls, trained.optimizer.updates) == (2, 2)
            trained.optimizer.zero_grad()
            trained.step(2)
            seen.append([value.clone() for value in trained.model.state_dict().values()])
    for at_once, lazy in zip(*seen, strict=True):
        torch.testing.assert_close(lazy, at_once, rtol=0, atol=0)


def test_what_needs_memory_gets_it_from_a_step_that_is_not_over(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(swap, monkeypatch, "drive") as trained:
        trained.step(0)
        model = getattr(trained.model, MODEL_ATTRIBUTE)
        store = model.runtime.store
        assert trained.lazy
        assert store.staged > 0
        store.unstage(store.staging(store.room(evicting=True) + 4096, "more than there is"))
        assert not trained.lazy
        assert store.staged == 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_closing_before_a_step_is_over_gives_everything_back(
    place: str, keep: bool, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = []
    for where in ("", place):
        with training(swap, monkeypatch, where) as trained:
            trained.step(0)
            store = getattr(trained.model, MODEL_ATTRIBUTE).runtime.store
            tiered.close(trained.model, keep_weights=keep)
            assert store.staged == 0
            assert store.host.used == 0
            values.append({n: v.clone() for n, v in trained.model.state_dict().items()} if keep else {})
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)
    assert list(swap.iterdir()) == []


def test_a_model_that_is_dropped_before_a_step_is_over_leaves_nothing(swap: Path) -> None:
    torch.manual_seed(7)
    config = tiered.Config(device="cpu", host_budget="3MiB", nvme=swap, **PLACES["drive"])
    model = tiered.shard(Net(), config)
    Trained(model, tiered.AdamW(model.parameters()), []).step(0)
    del model
    deadline = time.monotonic() + 30
    while list(swap.iterdir()) and time.monotonic() < deadline:
        gc.collect()  # again: a drive's thread that tells of a transfer at that moment still holds what is dropped
        time.sleep(0.1)
    assert list(swap.iterdir()) == []


def test_a_step_is_committed_when_all_of_it_is_written_and_not_before(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(swap, monkeypatch, "drive") as trained:
        generations = getattr(trained.model, MODEL_ATTRIBUTE).runtime.store.generations
        trained.step(0)
        assert generations._serial == 0
        backward(trained.model, 1)
        assert generations._serial == 1
        trained.optimizer.step()
        trained.optimizer.keep()
        assert generations._serial >= 2

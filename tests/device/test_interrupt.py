"""Ctrl-C during a step: the step is whole, then the interrupt is delivered; a second one passes at once."""

import contextlib
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tiered.device.interrupt import interruptible, uninterrupted
from tiered.optim import pipeline, update


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_inside_comes_after_the_block() -> None:
    reached = []

    def struck_once() -> None:
        with uninterrupted():
            interrupt()
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        struck_once()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_passes_at_once() -> None:
    reached = []

    def struck_twice() -> None:
        with uninterrupted():
            interrupt()
            interrupt()
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        struck_twice()
    assert not reached


def test_an_interrupt_is_not_lost_where_the_block_raises() -> None:
    def fails() -> None:
        with uninterrupted():
            interrupt()
            raise ValueError("of its own")

    with pytest.raises(KeyboardInterrupt) as caught:
        fails()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("early", [True, False])
def test_a_wait_inside_may_be_interrupted_by_what_was_held_or_comes(early: bool) -> None:
    reached = []

    def waits() -> None:
        with uninterrupted(), uninterrupted():
            if early:
                interrupt()
            reached.append("held")
            with interruptible():
                if not early:
                    interrupt()
                reached.append("not held")
            reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        waits()
    assert reached == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_such_a_wait_interrupts_are_held_again() -> None:
    reached = []

    def waits() -> None:
        with uninterrupted():
            with interruptible():
                pass
            interrupt()
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        waits()
    assert reached


def test_without_an_interrupt_and_in_other_threads_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        pass
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with uninterrupted():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not errors
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_interrupted_half_way_is_taken_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(hit: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        config = tiered.Config(
            device="cpu", host_budget="1MiB", nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme"
        )
        with tiered.shard(model, config):
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            model(torch.ones(2, 64)).sum().backward()
            on_host, calls = update.on_host, itertools.count(1)

            def update_and_strike(*chunk: Any) -> None:
                on_host(*chunk)
                if next(calls) == 2:
                    interrupt()

            if hit:
                monkeypatch.setattr(update, "on_host", update_and_strike)
            with pytest.raises(KeyboardInterrupt) if hit else contextlib.nullcontext():
                optimizer.step()
                model(torch.ones(2, 64))  # what is late of a step is computed when it is needed
            monkeypatch.undo()
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            return {name: value.clone() for name, value in model.state_dict().items()}

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_a_step_that_fails_half_way_is_named_by_every_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with tiered.shard(model, tiered.Config(device="cpu", host_budget="1MiB")):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, 8)).sum().backward()
        run = pipeline.Run

        def failing(store: object, meter: object, groups: object, update: pipeline.Update, *more: Any) -> pipeline.Run:
            def once(chunk: pipeline.Chunk, tensors: dict[str, torch.Tensor]) -> None:
                update(chunk, tensors)
                raise OSError(5, "the drive is gone")

            return run(store, meter, groups, once, *more)  # type: ignore[arg-type]

        monkeypatch.setattr(pipeline, "Run", failing)
        with pytest.raises(OSError, match="drive is gone"):
            optimizer.step()
        monkeypatch.undo()
        with pytest.raises(tiered.UsageError, match=r"failed half way .*drive is gone"):
            optimizer.step()

"""No leak: buffers are back after a step, everything is back after `close()`, and the module is a plain module again.

Process-wide counts are taken in processes of their own (`probe.py`), each under a time limit, so that a hang at exit is
an error here and not a hang. Resident bytes are compared with far larger leaks than the noise of an allocator: the
growth allowed over fifteen open-close cycles is half of what one cycle holds. The allocator of those processes maps
large blocks one by one, so that what is freed is seen to go.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, GPT, MOE, Case, Gpt
from parity.harness import ADAM, EMULATED, NVME, Placement, config_for, copied, same, tiered_session
from parity.probe import LAYERS, MIB
from torch import nn

import tiered

LIMIT_S = 120
STATES = 16 * LAYERS * MIB // 4  # bytes of parameters, gradients and moments of one cycle's model


def probe(scenario: str, swap: Path, error: str = "") -> list[dict[str, Any]]:
    """What the scenario printed; the process must have ended by itself, well or by the uncaught `error`."""
    program = Path(__file__).with_name("probe.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program), scenario, str(swap)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        check=False,
    )
    assert done.returncode == (1 if error else 0), f"exit {done.returncode}: {done.stderr[-2000:]}"
    last_line = (done.stderr.splitlines() or [""])[-1]
    assert last_line.startswith(error) if error else not last_line, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scenario", ["cycles", "cycles_on_a_device", "cycles_with_failures"])
def test_opening_and_closing_again_and_again_grows_nothing(scenario: str, swap: Path) -> None:
    first, fifth, last = probe(scenario, swap)
    assert last["python threads"] == 1, "a thread outlives close()"
    assert last["threads"] <= first["threads"]
    assert last["descriptors"] <= first["descriptors"]
    assert last["files"] == 0
    assert last["models alive"] == 0, "something still refers to closed models"
    assert last["tensors"] <= first["tensors"]
    assert last["mappings"] <= fifth["mappings"] + 20
    assert last["resident"] <= fifth["resident"] + STATES // 2


def test_many_steps_of_one_model_grow_nothing(swap: Path) -> None:
    early, late = probe("steps", swap)
    assert late["threads"] == early["threads"]
    assert late["descriptors"] == early["descriptors"]
    assert late["files"] == early["files"]
    assert late["tensors"] <= early["tensors"]
    assert late["resident"] <= early["resident"] + STATES // 4


def test_the_process_stays_within_its_host_budget_from_construction_on(swap: Path) -> None:
    """128 MiB of states under 24 MiB: allowed are the budget, a window of three layers and 32 MiB for the allocator."""
    before, after = probe("peak", swap)
    assert after["peak"] - before["resident"] < (24 + 3 + 32) * MIB


def test_a_process_that_ends_without_close_ends_by_itself(swap: Path) -> None:
    assert probe("left_open", swap)[0]["files"] > 0


def test_a_process_that_ends_by_an_error_in_forward_ends_by_itself_with_that_error(swap: Path) -> None:
    assert probe("raised", swap, error="ZeroDivisionError")[0]["files"] > 0


def test_what_a_dead_process_left_does_not_disturb_the_next_run(swap: Path) -> None:
    probe("left_open", swap)
    model = Gpt()
    with tiered.shard(model, config_for(GPT.build, NVME, swap)):
        model(*GPT.make_batch(0)).backward()


def test_every_staging_buffer_is_back_once_a_step_is_complete(placement: Placement, swap: Path) -> None:
    with tiered_session(GPT, placement, swap, max_grad_norm=0.5) as session:
        for step in range(3):
            session.backward(2 * step)
            session.backward(2 * step + 1)
            session.optimizer.step()
            session.optimizer.zero_grad()
            session.weights()  # waits for the updates that a step leaves open
            session.moments()
            assert tiered.stats(session.model).staging_buffers == 0
        with torch.no_grad():
            session.model(*session.batch(9))
        deadline = time.monotonic() + 20  # what is fetched ahead after the last use lands by itself
        while tiered.stats(session.model).staging_buffers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tiered.stats(session.model).staging_buffers == 0


def test_resident_bytes_do_not_grow_over_steps(placement: Placement, swap: Path) -> None:
    with tiered_session(MOE, placement, swap) as session:
        seen = []
        for step in range(12):
            session.train(step)
            session.weights()
            seen.append(dict(tiered.stats(session.model).resident_bytes))
    for tier in seen[0]:
        # which blocks are still in memory depends on the moment, but a step's leak never comes back
        assert min(entry[tier] for entry in seen[6:]) <= max(entry[tier] for entry in seen[:6]), tier


HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything about a module that a runtime might leave changed, values apart."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        parts[name] = [id(type(module)), sorted(module.__dict__), sorted(vars(type(module)))]
        parts[name] += [len(getattr(module, hooks)) for hooks in HOOKS]
    for name, p in model.named_parameters(remove_duplicate=False):
        parts[name] = [id(p), type(p), sorted(p.__dict__), p.requires_grad, p.is_leaf, p.dtype, list(p.stride())]
        parts[name] += [p.untyped_storage().nbytes() >= p.nbytes, p._backward_hooks, p._post_accumulate_grad_hooks]
    for name, buffer in model.named_buffers():
        parts[name] = [id(buffer), type(buffer), buffer.dtype]
    return parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_after_close_the_model_is_the_plain_module_it_was(case: Case, placement: Placement, swap: Path) -> None:
    model = case.build()
    for p in model.parameters():  # torch makes these two attributes when a hook is first attached, and keeps them
        p.register_hook(lambda grad: None).remove() if p.requires_grad else None
        p.register_post_accumulate_grad_hook(lambda param: None).remove() if p.requires_grad else None
    before = anatomy(model)
    tiered.shard(model, config_for(case.build, placement, swap))
    optimizer = tiered.AdamW(model.parameters(), **ADAM)
    for step in range(2):
        model(*case.make_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(*case.make_batch(2))
    weights = copied(model.state_dict())
    tiered.close(model)
    assert anatomy(model) == before
    same(copied(model.state_dict()), weights, exact=True)
    assert not list(swap.iterdir())


def test_closing_at_any_moment_of_a_step_gives_everything_back(placement: Placement, swap: Path) -> None:
    threads = threading.active_count()
    for moment in ("at once", "forward", "backward", "step", "failed forward"):
        model = Gpt()
        tiered.shard(model, config_for(GPT.build, placement, swap))
        optimizer = tiered.AdamW(model.parameters(), **ADAM)
        if moment == "failed forward":
            model.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(*GPT.make_batch(0))
        elif moment != "at once":
            loss = model(*GPT.make_batch(0))
            if moment != "forward":
                loss.backward()
            if moment == "step":
                optimizer.step()
        tiered.close(model)
        assert threading.active_count() == threads, moment
        assert not list(swap.iterdir()), moment
        assert all(type(p) is nn.Parameter for p in model.parameters()), moment
        assert all(p.isfinite().all() for p in model.parameters()), moment


@pytest.mark.parametrize("place", [NVME, EMULATED], ids=lambda place: place.name)
def test_a_closed_model_is_collected_with_its_optimizer(place: Placement, swap: Path) -> None:
    with tiered_session(GPT, place, swap) as session:
        session.train(0)
        watched = [weakref.ref(session.model), weakref.ref(session.optimizer), weakref.ref(session.model.blocks[2])]
    del session
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]

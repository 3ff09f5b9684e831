"""What the process suffers: kills, Ctrl-C, limits of the system, a missing extension."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.program import chain, config, train

from tiered.optim import kernels


def begin(start: Callable[..., subprocess.Popen[str]], swap: Path, delay_s: float = 0.1) -> subprocess.Popen[str]:
    """A process that is in the middle of training, `delay_s` after its second step; its files are in the directory."""
    process = start("endless", swap)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "training\n", process.stderr.read() if process.stderr else line
    time.sleep(delay_s)  # only to reach other places: no moment is right or wrong
    assert len(os.listdir(swap)) == 1
    return process


def again(swap: Path) -> None:
    """A run of the same model, which takes over what an endless one has left, trains right without it, and ends."""
    fresh = {"param_tier": "host", "optimizer_tier": "host", "host_budget": "256MiB"}
    assert train(chain(8, 512), config(swap), 1) == train(chain(8, 512), config(swap, **fresh), 1)
    assert os.listdir(swap) == []


def test_what_a_killed_run_left_is_kept_for_a_run_of_its_model_which_takes_its_place(
    start: Callable, swap: Path
) -> None:
    process = begin(start, swap)
    left = os.listdir(swap)
    process.kill()
    process.wait(timeout=60)
    assert os.listdir(swap) == left, "a killed process cannot clean up"
    assert train(chain(), config(swap)) == train(chain(), config(swap, param_tier="host", optimizer_tier="host"))
    assert os.listdir(swap) == left, "a run of another model has no use for it"
    again(swap)


def test_what_a_killed_run_left_is_reclaimed_by_any_other_where_nothing_is_to_last(start: Callable, swap: Path) -> None:
    process = start("endless", swap, TIERED_TEST_DURABILITY="none")
    assert process.stdout.readline() == "training\n"
    process.kill()
    process.wait(timeout=60)
    assert len(os.listdir(swap)) == 1
    train(chain(3, 32), config(swap))
    assert os.listdir(swap) == []


def test_a_living_run_is_left_alone_by_another_in_the_same_directory(start: Callable, swap: Path) -> None:
    process = begin(start, swap)
    (theirs,) = os.listdir(swap)
    train(chain(3, 32), config(swap))
    assert os.listdir(swap) == [theirs]
    assert process.poll() is None


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.13])
def test_ctrl_c_in_the_middle_of_training_ends_the_process_and_leaves_its_last_step(
    start: Callable, swap: Path, delay_s: float
) -> None:
    process = begin(start, swap, delay_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGINT, errors[-2000:]
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert len(os.listdir(swap)) == 1
    again(swap)


def test_training_needs_no_locked_memory(run: Callable, swap: Path) -> None:
    on_cpu, on_device = run("no_locked_memory", swap)
    assert on_cpu == on_device == train(chain(), config(swap))


def test_training_without_the_extension_gives_the_same_bits(run: Callable, swap: Path) -> None:
    asked = run("reference", swap, TIERED_PORTABLE="1")
    missing = run("no_extension", swap)
    assert not asked["native"]
    assert not missing["native"]
    here = {"native": kernels.native(), **train(chain(), config(swap), 4)}
    assert asked == missing == {**here, "native": False}
    if not here["native"]:
        pytest.skip("the extension is not built: portable was compared with portable")

"""Memory that is too small: a named number that works, or a run that stays within what it was given.

Each bound is enforced or measured by the kernel, in a process of its own.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.program import MIB, chain, config, train

from tiered.errors import ConfigError

TIERS = [("nvme", "nvme"), ("host", "nvme"), ("nvme", "host"), ("host", "host"), ("auto", "auto")]


def named(message: str, budget: int) -> int:
    """The budget that a refusal says is enough."""
    if by := re.search(r"_budget by at least (\d+) bytes", message):
        wanted = budget + int(by[1])
    else:
        number = re.search(r"_budget to at least (\d+)", message) or re.search(r"takes? (\d+) bytes", message)
        assert number, f"no number to follow: {message}"
        wanted = int(number[1])
    assert wanted > budget, f"the number named is no larger than what was given: {message}"
    return wanted


def follow(swap: Path, field: str, given: int, **settings: Any) -> tuple[list[int], dict[str, Any]]:
    """Trains with the budget the errors ask for, from `given` on: every budget tried, and the training's result."""
    tried = [given]
    for _ in range(5):
        try:
            return tried, train(chain(), config(swap, **{**settings, field: tried[-1]}))
        except ConfigError as error:
            message = str(error)
        assert field in message
        tried.append(named(message, tried[-1]))
    raise AssertionError(f"refused for ever: {tried}: {message}")


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training of a run with room for everything."""
    return train(chain(), config(tmp_path_factory.mktemp("swap"), host_budget="1GiB", optimizer_tier="host"))


@pytest.mark.parametrize("settings", [{}, {"device": "emulated", "device_budget": "2MiB"}], ids=["cpu", "emulated"])
@pytest.mark.parametrize(("param", "optimizer"), TIERS)
def test_the_host_budget_that_a_refusal_names_is_enough_to_train(
    swap: Path, param: str, optimizer: str, settings: dict[str, Any], want: dict[str, Any]
) -> None:
    tried, result = follow(swap, "host_budget", 4096, param_tier=param, optimizer_tier=optimizer, **settings)
    assert result == want
    assert len(tried) == 2, f"the first number named did not work: {tried}"
    assert os.listdir(swap) == []


def test_without_a_drive_the_host_budget_that_a_refusal_names_is_enough_to_train(
    swap: Path, want: dict[str, Any]
) -> None:
    tried, result = follow(swap, "host_budget", 4096, nvme=None, param_tier="auto", optimizer_tier="auto")
    assert result == want
    assert len(tried) == 2, f"the first number named did not work: {tried}"


@pytest.mark.parametrize("param", ["nvme", "host", "auto", "device"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_device_budget_that_a_refusal_names_is_enough_to_train(
    swap: Path, device: str, param: str, want: dict[str, Any]
) -> None:
    if device == "cpu" and param in ("host", "auto"):
        pytest.skip("parameters in host memory compute there: no device budget is needed")
    tried, result = follow(swap, "device_budget", 5000, device=device, param_tier=param, host_budget="32MiB")
    assert result == want
    assert len(tried) == 2, f"the first number named did not work: {tried}"
    assert os.listdir(swap) == []


def test_a_budget_of_one_byte_less_than_named_is_refused(swap: Path) -> None:
    tried, _ = follow(swap, "host_budget", 4096)
    with pytest.raises(ConfigError, match="host_budget"):
        train(chain(), config(swap, host_budget=tried[-1] - 1))
    tried, _ = follow(swap, "device_budget", 4096)
    with pytest.raises(ConfigError, match="device_budget"):
        train(chain(), config(swap, device_budget=tried[-1] - 1))


def test_states_beyond_what_the_system_lets_the_process_have_are_trained(run: Callable, swap: Path) -> None:
    seen = run("bounded_by_the_system", swap)
    assert seen["refused"], "the limit is not in force"
    assert seen["states"] > 256 * MIB
    assert len(seen["losses"]) == 2
    assert os.listdir(swap) == []


@pytest.mark.slow
def test_states_of_three_gib_are_trained_in_one_and_a_half(run: Callable, swap: Path) -> None:
    if os.statvfs(swap).f_bavail * os.statvfs(swap).f_frsize < 8 << 30:
        pytest.skip("needs 8 GiB of free disk")
    seen = run("states_of_three_gib", swap)
    assert seen["refused"], "the limit is not in force"
    assert seen["states"] > 3 << 30 > 2 * seen["limit"] - 1
    assert len(seen["losses"]) == 2
    assert os.listdir(swap) == []


def test_a_process_grows_by_its_host_budget_a_window_of_three_layers_and_little_more(run: Callable, swap: Path) -> None:
    """48 layers of 4 MiB, 768 MiB of states, built and trained under 64 MiB; little is 64 MiB for torch and threads."""
    seen = run("resident_peak", swap)
    assert seen["host peak"] <= 64 * MIB
    assert seen["growth"] <= (64 + 3 * 4 + 64) * MIB

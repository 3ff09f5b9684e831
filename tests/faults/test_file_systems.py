"""Real file systems that are full, become read-only, go away or freeze under a training: errors by name, and an end.

Each is made in a file and mounted where only the process under test sees it; skipped where that takes rights we lack.
"""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.program import chain, config, steps, train

import tiered


@pytest.fixture(params=["0", "1"], ids=["native", "portable"])
def portable(request: pytest.FixtureRequest) -> str:
    """The value of TIERED_PORTABLE."""
    return str(request.param)


def losses(swap: Path) -> list[float]:
    """Of two steps on a drive that works."""
    model = chain()
    with tiered.shard(model, config(swap)):
        return steps(model, tiered.AdamW(model.parameters(), lr=1e-2), 2)


def names_the_drive(error: list[Any], swap: Path) -> bool:
    return re.search(rf"{swap}/tiered-\w+-r0/swap", error[2]) is not None


def test_a_drive_that_cannot_reserve_space_is_found_full_before_training_and_keeps_nothing(
    run_on_file_system: Callable, swap: Path, portable: str
) -> None:
    seen = run_on_file_system("full_without_fallocate", swap, TIERED_PORTABLE=portable)
    for refused in seen["refused"]:
        assert (refused["error"], refused["kept"]) == ("SwapFullError", True)
        assert f"{swap}/tiered-" in refused["message"]
        assert "bytes are free on the drive" in refused["message"]
    assert seen["given back"]
    assert seen["left"] == [["lost+found"], []]
    assert seen["small"] == train(chain(2, 128), config(swap))


def test_a_drive_that_another_program_fills_later_is_no_matter(
    run_on_file_system: Callable, swap: Path, portable: str
) -> None:
    seen = run_on_file_system("filled_by_another", swap, TIERED_PORTABLE=portable)
    assert seen["errno"] == errno.ENOSPC
    want = train(chain(), config(swap))
    assert (seen["losses"], seen["digest"]) == (want["losses"], want["digest"])


def test_a_drive_that_becomes_read_only_is_an_error_by_name(
    run_on_file_system: Callable, swap: Path, portable: str
) -> None:
    seen = run_on_file_system("goes_read_only", swap, TIERED_PORTABLE=portable)
    assert seen["losses"] == losses(swap)
    assert seen["seen"][0][:2] == ["StorageError", errno.EROFS]
    assert names_the_drive(seen["seen"][0], swap)
    assert all(kind != "none" for kind, _, _ in seen["seen"])
    assert seen["steps"] == 2


def test_a_drive_that_is_gone_is_an_error_by_name(run_on_file_system: Callable, swap: Path, portable: str) -> None:
    seen = run_on_file_system("goes_away", swap, TIERED_PORTABLE=portable)
    assert seen["losses"] == losses(swap)
    assert seen["seen"][0][:2] == ["StorageError", errno.EIO]
    assert names_the_drive(seen["seen"][0], swap)
    assert all(kind != "none" for kind, _, _ in seen["seen"])
    assert seen["steps"] == 2


def test_writes_that_stall_inside_the_kernel_end_as_a_timeout_and_the_model_closes(
    run_on_file_system: Callable, swap: Path
) -> None:
    seen = run_on_file_system("freezes", swap)
    assert seen["losses"] == losses(swap)
    assert seen["seen"][0][:2] == ["StorageError", errno.ETIMEDOUT]
    assert names_the_drive(seen["seen"][0], swap)
    assert "has not come back for" in seen["seen"][0][2] or "was not begun" in seen["seen"][0][2]
    assert seen["steps"] == 2

"""The short forms of tools/kill_storm and tools/soak in every run, and the long ones with -m soak."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def said(tool: str, folder: Path, limit_s: int, *options: object) -> str:
    """What the tool said; it ended well and left nothing."""
    line = [sys.executable, str(TOOLS / tool), "--nvme", str(folder), *map(str, options)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize(("ranks", "drives"), [(1, 1), (1, 2), (2, 1)])
def test_runs_that_are_killed_at_random_instants_go_on_to_the_last_bit(ranks: int, drives: int, tmp_path: Path) -> None:
    assert ": 8 kills" in said("kill_storm", tmp_path, 300, "--ranks", ranks, "--drives", drives, "--kills", 8)


@pytest.mark.soak
def test_many_runs_that_are_killed_at_random_instants_go_on_to_the_last_bit(tmp_path: Path) -> None:
    said("kill_storm", tmp_path, 3600, "--kills", 200)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_saves_and_kills_grows_in_nothing(ranks: int, tmp_path: Path) -> None:
    assert "2 lives" in said("soak", tmp_path, 300, "--seconds", 20, "--lives", 2, "--ranks", ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_run_with_saves_and_kills_grows_in_nothing(ranks: int, tmp_path: Path) -> None:
    said("soak", tmp_path, 3600, "--seconds", 1800, "--lives", 20, "--ranks", ranks)

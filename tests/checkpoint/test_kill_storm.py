"""The short form of tools/kill_storm in every run, and the long one with -m soak."""

import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).parents[2] / "tools" / "kill_storm"


def storm(folder: Path, limit_s: int, *options: object) -> str:
    line = [sys.executable, str(STORM), "--nvme", str(folder), *map(str, options)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_that_are_killed_at_random_instants_go_on_to_the_last_bit(ranks: int, tmp_path: Path) -> None:
    assert ": 8 kills" in storm(tmp_path, 300, "--ranks", ranks, "--kills", 8)


@pytest.mark.soak
def test_many_runs_that_are_killed_at_random_instants_go_on_to_the_last_bit(tmp_path: Path) -> None:
    storm(tmp_path, 3600, "--kills", 200)

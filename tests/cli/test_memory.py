"""Resident growth: what a process touched and gave back still counts as its peak."""

import subprocess
import sys

import pytest

PROGRAM = """
from tiered.cli.memory import ResidentGrowth

before = bytearray(96 << 20)
before[::4096] = b"x" * (96 << 8)
del before
growth = ResidentGrowth()
quiet = growth.peak_bytes()
held = bytearray(32 << 20)
held[::4096] = b"x" * (32 << 8)
del held
print(quiet, growth.peak_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process reset its peak")
def test_growth_counts_a_peak_that_is_over_and_not_one_from_before() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    quiet, peak = map(int, done.stdout.split())
    assert quiet < 8 << 20
    assert 30 << 20 <= peak <= 40 << 20

"""What the fault tests share: a swap directory, an end to a hang, and training in a process of its own.

Invariants: 1. every child process has a time limit and is killed at the end of its test. 2. a test that waits for ever
in this process ends by an alarm, whose traceback shows where it waits.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).with_name("program.py")
LIMIT_S = 150
ALARM_S = 100
MOUNTED = ("unshare", "--mount", "--propagation", "private")


@pytest.fixture(autouse=True)
def guarded_process() -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test was still waiting after {ALARM_S} s")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(ALARM_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    torch.set_num_threads(threads)


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    """An existing, empty directory for the NVMe tier."""
    path = tmp_path / "swap"
    path.mkdir()
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a scenario of program.py; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(scenario: str, swap: Path, *prefix: str, **environment: str) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-W", "error", str(PROGRAM), scenario, str(swap)]
        quick = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env={**os.environ, **quick, **environment}, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Any]:
    """Runs a scenario to its end, which must be a good one, and gives what it printed last as JSON."""

    def complete(scenario: str, swap: Path, *prefix: str, **environment: str) -> Any:
        signal.alarm(LIMIT_S + 10)
        process = start(scenario, swap, *prefix, **environment)
        output, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"exit {process.returncode}: {errors[-3000:]}"
        return json.loads(output.splitlines()[-1])

    return complete


@pytest.fixture
def run_mounted(run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a scenario where mounts are private to it and end with it; skips where that takes rights we lack."""
    try:
        allowed = subprocess.run([*MOUNTED, "true"], capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("private mounts need root and unshare(1)")
    return lambda scenario, swap, **environment: run(scenario, swap, *MOUNTED, **environment)


@pytest.fixture
def run_on_file_system(run_mounted: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`run_mounted` of a scenario that makes a file system in a file; skips where no loop device is to be had."""
    image, place = tmp_path / "probe", tmp_path / "place"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True, timeout=30)
        mount = [*MOUNTED, "mount", "-o", "loop", str(image), str(place)]
        subprocess.run(mount, check=True, capture_output=True, timeout=30)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system in a file needs mkfs.ext4 and loop devices: {error}")
    return run_mounted

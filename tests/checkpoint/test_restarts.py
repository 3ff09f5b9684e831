"""torchrun restarts a job of which a rank died: it goes on from the swap directories, and ends with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

SECONDS = 240
STEPS, DIES = 7, 4
STEPS_OF_COMMAND = 40
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PASSED_ON = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"OMP_NUM_THREADS": "1"}
PASSED_ON["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # sharing it, gloo of a restarted job finds the old ranks
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]


def finished(*command: object) -> str:
    """Run torchrun with `command` to its good end; returns what was said. No process outlives it."""
    line = [*LAUNCH, *map(str, command)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=PASSED_ON) as process:
        try:
            _, told = process.communicate(timeout=SECONDS)
        finally:
            end(process)
    assert process.returncode == 0, told
    return told


def end(process: subprocess.Popen[Any]) -> None:
    """Kill torchrun, and its ranks, which would go on without it."""
    if process.poll() is None:
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for rank in ranks:
            rank.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("swap", "died", "whole"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_job_whose_rank_died_is_restarted_goes_on_and_ends_with_the_same_bits(folder: Path) -> None:
    program = Path(__file__).with_name("restarted_worker.py")
    for out, dies in (("died", DIES), ("whole", STEPS)):
        finished(program, folder / "swap", folder / out, STEPS, dies)
        assert list((folder / "swap").iterdir()) == [], "a job that ended well left files"
    for rank in range(2):
        died, whole = ((folder / out / f"rank-{rank}").read_text().split() for out in ("died", "whole"))
        assert (died[0], whole[0]) == (str(DIES), "0")
        assert died[1] == whole[1]


def test_the_command_under_torchrun_goes_on_from_its_swap_directories(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    shape = ["--layers", "2", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", 4]
    drives = ["--nvme", folder / "swap", "--param-tier", "nvme", "--optimizer-tier", "nvme"]
    line = ["-m", "tiered", "train", text, *shape, *drives, "--steps", STEPS_OF_COMMAND]
    finished(*line, "--json", folder / "whole.json")
    whole = json.loads((folder / "whole.json").read_text())["losses"]
    line += ["--save", folder / "saved", "--resume", "--json", folder / "died.json"]
    told = folder / "told"
    with (
        told.open("w") as out,
        subprocess.Popen([*LAUNCH, *map(str, line)], stdout=subprocess.DEVNULL, stderr=out, env=PASSED_ON) as process,
    ):
        try:
            _kill_rank(process, told)
            assert process.wait(SECONDS) == 0, told.read_text()
        finally:
            end(process)
    assert "from the swap directory" in told.read_text()
    died = json.loads((folder / "died.json").read_text())["losses"]
    assert 0 < len(died) < STEPS_OF_COMMAND
    assert died == whole[-len(died) :]
    assert list((folder / "swap").iterdir()) == []


def _kill_rank(process: subprocess.Popen[Any], told: Path) -> None:
    """SIGKILL for rank 1, once a step is told of."""
    deadline = time.monotonic() + SECONDS
    while "\nstep " not in told.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    for child in psutil.Process(process.pid).children():
        if child.environ().get("RANK") == "1":
            child.send_signal(signal.SIGKILL)

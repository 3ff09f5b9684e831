"""The command on two ranks as a user starts it, by torchrun: the same training, told once, and every ending."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from tiered.cli import main

TINY = ["--layers", "2", "--hidden", "32", "--heads", "2", "--context", "16"]
SECONDS = 240
TELLS_ALL = hasattr(SubprocessContext, "_capture_process_failures")
"""Whether torchrun tells exit codes of the ranks it has ended too, or only of those that failed by themselves."""
PASSED_ON = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@contextlib.contextmanager
def torchrun(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of the command; all processes are gone at the end, also where something hangs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*launcher, "-m", "tiered", "train", *TINY, *map(str, arguments)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=PASSED_ON) as process:
        watchdog = threading.Timer(SECONDS, end, [process])
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kills torchrun and its ranks, which would go on without it."""
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for rank in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()


def first_step(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The ranks, once they have made a step."""
    assert process.stderr is not None
    told: list[str] = []
    while not (told and told[-1].startswith("step 1/")):
        told.append(process.stderr.readline())
        assert told[-1], "".join(told)
    ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}
    assert set(ranks) == {0, 1}
    return ranks


def exit_codes(err: str) -> dict[int, int]:
    """Rank -> exit code, as torchrun tells them of ranks that failed."""
    found = re.findall(r"rank +: (\d+).*\n +exitcode +: (-?\d+)", err)
    return {int(rank): int(code) for rank, code in found}


def said(err: str) -> list[str]:
    """What the ranks complained of."""
    return [line for line in err.splitlines() if line.startswith("tiered train: ")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    return path


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    folder = tmp_path / "swap"
    folder.mkdir()
    return folder


def test_two_ranks_train_what_one_process_trains_and_tell_it_once(
    text: Path, swap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = [
        text, "--batch", 4, "--accumulate", 2, "--steps", 5, "--lr", 0.01, "--nvme", swap,
        "--param-tier", "nvme", "--optimizer-tier", "nvme", "--compare-plain",
    ]  # fmt: skip
    with torchrun(*order, "--json", tmp_path / "two.json") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert main(["train", *TINY, *map(str, order), "--json", str(tmp_path / "one.json")]) == 0
    assert list(swap.iterdir()) == []

    two, one = (json.loads((tmp_path / name).read_text()) for name in ("two.json", "one.json"))
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["losses"][-1] < two["losses"][0]
    assert two["plain"]["losses"] == pytest.approx(one["plain"]["losses"], abs=1e-5)  # torchrun gives fewer threads
    assert two["plain"]["largest_difference"] <= 1e-4
    assert (two["ranks"], two["stage"], one["ranks"]) == (2, 3, 1)
    moved: dict[str, Any] = two["stats"]["collective_bytes"]
    gradients = 4 * two["parameters"] * 2 * 5  # bytes of one, backward passes a step, steps
    assert gradients <= moved["reduce_scatter"] < 1.1 * gradients
    assert moved["all_gather"] > 0
    whole, half = (sum(found["stats"]["placement"]["exp_avg"].values()) for found in (one, two))
    assert 0.5 * whole <= half < 0.6 * whole

    steps = [line.split()[1] for line in err.splitlines() if line.startswith("step")]
    assert steps == [f"{step}/5" for step in range(1, 6)]
    assert err.count("parameters, ") == 1
    assert out.count("loss first -> last") == 1
    assert "2, ZeRO stage 3" in out
    assert "all_gather" in out
    assert not re.search(r"(?m)^\W*ranks\b", capsys.readouterr().out)  # a row of the table, of one process


def test_a_batch_that_two_ranks_do_not_divide_is_one_line_and_code_2(text: Path) -> None:
    with torchrun(text, "--batch", 3) as process:
        out, err = process.communicate()
    assert [line.split(";")[0] for line in said(err)] == [
        "tiered train: error: --batch: got 3 sequences for 2 ranks, expected a multiple of 2 such as 2 or 4"
    ]
    codes = exit_codes(err)
    assert codes[0] == 2
    assert 1 in codes or not TELLS_ALL
    assert codes.get(1, 2) in (2, -signal.SIGTERM)  # torchrun may end it before it has begun
    assert out == ""


def test_a_signal_to_torchrun_ends_both_ranks_with_one_summary_and_no_swap(text: Path, swap: Path) -> None:
    with torchrun(text, "--steps", 10**9, "--nvme", swap, "--optimizer-tier", "nvme", "--compare-plain") as process:
        ranks = first_step(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert out.count("stopped by SIGINT") == 1
    assert out.count("loss first -> last") == 1
    assert said(err) == []
    assert "forcefully" not in err  # torchrun killed none
    assert list(swap.iterdir()) == []
    assert not any(rank.is_running() for rank in ranks.values())


def test_a_signal_to_one_rank_alone_stops_both_after_the_same_step(text: Path) -> None:
    with torchrun(text, "--steps", 10**9, "--stage", 2) as process:
        first_step(process)[1].send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert out.count("stopped by SIGTERM") == 1
    assert "ZeRO stage 2" in out
    assert said(err) == []
    codes = exit_codes(err)
    assert set(codes.values()) == {143}
    assert len(codes) == 2 or not TELLS_ALL


def test_a_rank_that_dies_is_one_line_and_code_1_of_the_other_with_what_was_trained(text: Path, swap: Path) -> None:
    line = [text, "--steps", 10**9, "--rank-timeout", 5, "--nvme", swap, "--optimizer-tier", "nvme"]
    with torchrun(*line) as process:
        first_step(process)[1].kill()
        out, err = process.communicate()
    assert out.count("stopped by RankError") == 1
    assert "loss first -> last" in out
    assert len(said(err)) == 1
    assert said(err)[0].startswith("tiered train: error: ")
    assert "rank 1" in said(err)[0]
    assert exit_codes(err) == ({0: 1, 1: -9} if TELLS_ALL else {1: -9})

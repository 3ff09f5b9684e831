"""The command as a user starts it, in a process of its own: results, equality with plain PyTorch, and every ending."""

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered.cli import main, summary

TINY = ["--layers", "2", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "2"]
SECONDS = 240


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tiered", "train", *TINY, *map(str, arguments)]


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=SECONDS, check=False)


def result(*arguments: object) -> dict[str, Any]:
    done = train("--json", "-", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A run that would go on for ever, after its first step; killed at the end, or when it hangs."""
    line = command("--steps", 10**9, *arguments)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stderr is not None
            seen = itertools.takewhile(lambda shown: not shown.startswith("step 1/"), process.stderr)
            told = "".join(seen)
            assert process.poll() is None, told
            yield process
        finally:
            watchdog.cancel()
            process.kill()


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


def test_a_run_on_a_drive_moves_bytes_learns_and_equals_plain_pytorch(text: Path, swap: Path) -> None:
    found = result(
        text, "--steps", 6, "--lr", 0.01, "--nvme", swap, "--param-tier", "nvme", "--optimizer-tier", "nvme",
        "--accumulate", 2, "--compare-plain",
    )  # fmt: skip
    assert len(found["losses"]) == found["steps"] == 6
    assert found["losses"][-1] < found["losses"][0]
    assert found["plain"]["largest_difference"] <= 1e-4
    assert found["stats"]["read_bytes"]["nvme"] > 0
    assert found["stats"]["written_bytes"]["nvme"] > 0
    assert found["stats"]["staging_buffers"] == 0
    assert found["memory"]["state_bytes"] == 16 * found["parameters"]
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("extra", [("--no-deferred",), ("--tied-head",), ("--checkpoint-activations",)])
def test_other_ways_to_build_the_model_equal_plain_pytorch_too(text: Path, extra: tuple[str, ...]) -> None:
    assert result(text, "--steps", 3, "--compare-plain", *extra)["plain"]["largest_difference"] <= 1e-4


def test_losses_that_differ_from_plain_pytorch_are_code_1(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(summary.TOLERANCE, torch.float32, -1.0)  # no difference is below it
    assert main(["train", *TINY, str(text), "--steps", "1", "--compare-plain"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_bf16_weights_follow_plain_pytorch_with_an_fp32_master(text: Path) -> None:
    found = result(text, "--steps", 3, "--dtype", "bf16", "--compare-plain")
    assert found["plain"]["largest_difference"] <= found["plain"]["tolerance"]


def test_fp16_weights_train_with_a_scaled_loss(text: Path) -> None:
    losses = result(text, "--steps", 6, "--lr", 0.01, "--dtype", "fp16")["losses"]
    assert losses[-1] < losses[0]


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(text: Path, swap: Path) -> None:
    first = result(text, "--steps", 3, "--seed", 5)["losses"]
    on_drive = result(text, "--steps", 3, "--seed", 5, "--nvme", swap, "--param-tier", "nvme")["losses"]
    assert first == on_drive  # placement changes no bit
    assert first != result(text, "--steps", 3, "--seed", 6)["losses"]


def test_the_table_goes_to_stdout_and_the_lines_of_progress_to_stderr(text: Path, tmp_path: Path) -> None:
    done = train(text, "--steps", 3, "--json", tmp_path / "out.json")
    assert done.returncode == 0
    assert "loss first -> last" in done.stdout
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("step")] == ["1/3", "2/3", "3/3"]
    assert json.loads((tmp_path / "out.json").read_text())["steps"] == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_ends_it_with_a_summary_its_code_and_no_swap(
    text: Path, swap: Path, number: signal.Signals, code: int
) -> None:
    with started(text, "--nvme", swap, "--optimizer-tier", "nvme", "--compare-plain") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    assert f"stopped by {number.name}" in out
    assert "loss first -> last" in out
    assert "Traceback" not in err
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_swap_folder_that_is_none_is_one_line_and_code_2(text: Path, tmp_path: Path, kind: str) -> None:
    folder = text if kind == "file" else tmp_path / "missing"
    done = train(text, "--steps", 1, "--nvme", folder, "--optimizer-tier", "nvme")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert str(folder) in errors[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_budget_too_small_for_the_model_is_one_line_and_code_2(text: Path) -> None:
    done = train(text, "--steps", 1, "--host-budget", "4KiB")
    assert done.returncode == 2
    assert "host_budget" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_file_that_vanishes_during_training_is_code_1_with_what_was_trained(text: Path) -> None:
    with started(text) as process:
        text.unlink()
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "stopped by StorageError" in out
    assert f"{text}: cannot be read any more" in err.splitlines()[-1]

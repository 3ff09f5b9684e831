"""A run that ended, by itself or by a signal, is taken up again by the same command line, to the last bit."""

import json
import signal
import time
from pathlib import Path

import pytest
from cli.test_train import result, started, text, train

__all__ = ["text"]  # a fixture


def test_a_run_taken_up_again_has_the_losses_of_one_that_never_ended(text: Path, tmp_path: Path) -> None:
    line = [text, "--lr", 0.01, "--accumulate", 2, "--save", tmp_path / "saved", "--resume"]
    whole = result(*line[:-3], "--steps", 5)["losses"]
    first = result(*line, "--steps", 3)["losses"]
    then = result(*line, "--steps", 5)["losses"]
    assert [*first, *then] == whole
    assert result(*line, "--steps", 5)["losses"] == [], "all are done"


def test_checkpoints_come_as_often_as_is_said_and_the_newest_stay(text: Path, tmp_path: Path) -> None:
    result(text, "--steps", 7, "--save", tmp_path / "saved", "--save-every", 2, "--keep", 3)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"step-{n:09d}" for n in (4, 6, 7)]


def test_a_signal_saves_what_is_done(text: Path, tmp_path: Path) -> None:
    with started(text, "--save", tmp_path / "saved") as process:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    (folder,) = (tmp_path / "saved").iterdir()
    steps = int(folder.name.removeprefix("step-"))
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert body["step"] == steps >= 1
    found = result(text, "--save", tmp_path / "saved", "--resume", "--steps", steps + 2)
    assert found["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resume"], "--resume: expected --save FOLDER with it"),
        (["--save-every", 3], "--save-every: expected --save FOLDER with it"),
        (["--keep", 3], "--keep: expected --save FOLDER with it"),
        (["--save", "x", "--resume", "--compare-plain"], "--compare-plain: got it with --resume"),
    ],
)
def test_options_that_mean_nothing_together_are_one_line_and_code_2(
    arguments: list[object], says: str, tmp_path: Path
) -> None:
    done = train(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_checkpoint_of_another_model_is_one_line_and_nothing_is_lost(text: Path, tmp_path: Path) -> None:
    line = [text, "--save", tmp_path / "saved", "--resume"]
    result(*line, "--steps", 1)
    done = train(*line, "--steps", 2, "--hidden", 64)
    assert done.returncode == 2
    assert "has shape" in done.stderr
    assert result(*line, "--steps", 2)["steps"] == 1


def test_after_a_kill_the_newer_of_swap_directory_and_checkpoint_is_gone_on_from(text: Path, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    drives = ["--nvme", tmp_path / "swap", "--param-tier", "nvme", "--optimizer-tier", "nvme"]
    line = [text, *drives, "--save", tmp_path / "saved", "--save-every", 2, "--resume"]
    with started(*line) as process:
        while not list((tmp_path / "saved").glob("*/manifest.json")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    last = 2 + max(int(path.name.removeprefix("step-")) for path in (tmp_path / "saved").glob("step-*"))
    whole = result(text, "--steps", last + 2)["losses"]
    done = train(*line, "--steps", last + 2, "--json", tmp_path / "then.json")
    assert done.returncode == 0, done.stderr
    assert "from the swap directory" in done.stderr
    then = json.loads((tmp_path / "then.json").read_text())["losses"]
    assert then == whole[last + 2 - len(then) : last + 2]
    again = train(*line, "--steps", last + 3)
    assert f"going on after step {last + 2}, from the checkpoint" in again.stderr

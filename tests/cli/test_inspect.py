"""`tiered inspect` as a user starts it: exit codes, tables, JSON, one line for bad input, and signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiered
from tiered.cli import inspect as command
from tiered.cli import main as run
from tiered.cli.looking import Inspecting
from tiered.cli.options import parse

SECONDS = 240


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file({"a.weight": torch.randn(30, 20), "b": torch.randn(7)}, tmp_path / "w.safetensors")
    return tiered.import_checkpoint(tmp_path / "w.safetensors", tmp_path / "saved")


def flip(saved: Path) -> None:
    (file,) = saved.glob("*/rank-0.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_sound_checkpoint_is_code_0_and_a_faulty_one_code_1(saved: Path) -> None:
    line = [sys.executable, "-m", "tiered", "inspect", str(saved), "--verify"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"checkpoint {saved}\n")
    assert done.stdout.splitlines()[-1].startswith("sound, ")
    flip(saved)
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert "FAULT corrupt" in done.stdout
    assert "[value of b, buffer b]" in done.stdout  # in one piece
    assert done.stdout.splitlines()[-1].startswith("1 fault")


def test_the_json_has_the_keys_that_the_document_names(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(saved), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], told["faults"], told["kind"]) == (True, 0, "checkpoint")
    document = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")
    section = document.split("## Inspect")[1].split("\n## ")[0]
    keys = [*told, *told["checkpoints"][0], *told["checkpoints"][0]["contents"]]
    assert [key for key in keys if f"`{key}`" not in section and f"`{key}[]`" not in section] == []


@pytest.mark.parametrize("given", ["missing", "w.safetensors", "."])
def test_what_cannot_be_inspected_is_code_2_and_one_line(
    saved: Path, tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if given == ".":
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes").touch()
        given = "other"
    assert run(["inspect", str(tmp_path / given)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("tiered inspect: error: ")
    assert str(tmp_path / given) in error


def test_no_path_is_code_2() -> None:
    with pytest.raises(SystemExit) as ended:
        run(["inspect"])
    assert ended.value.code == 2


def test_every_option_reaches_its_argument() -> None:
    assert parse(["inspect", "a", "b", "--verify", "--json"]) == Inspecting(
        paths=(Path("a"), Path("b")), verify=True, json=True
    )


def test_names_that_would_move_a_cursor_are_shown_as_text(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "bad\x1b[2J\nname\udcff [red]").touch()
    assert run(["inspect", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "bad\\x1b[2J\\nname\\udcff [red]" in out


def test_a_signal_ends_it_with_its_code(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(self: object, done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command.BytesDisplay, "__call__", show)
    assert run(["inspect", str(saved), "--verify"]) == 143
    assert capsys.readouterr().err == "tiered inspect: stopped by SIGTERM\n"

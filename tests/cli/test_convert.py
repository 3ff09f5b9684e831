"""`tiered export` and `tiered import` as a user starts them: results, refusals of one line, and signals."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiered.cli import convert, progress
from tiered.cli import main as run
from tiered.cli.options import Conversion, parse
from tiered.cli.progress import BytesDisplay

SECONDS = 240


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file({"a.weight": torch.randn(30, 20), "b": torch.randn(7)}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def started(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiered", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_a_file_goes_in_and_comes_out_by_the_command(weights: Path, tmp_path: Path) -> None:
    done = started("import", weights, tmp_path / "saved", "--name", "b=bias", "--name", "a.=first.")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'saved'}: 2.4 KiB of tensors in 2 files, ")
    done = started(
        "export", tmp_path / "saved", tmp_path / "hf", "--dtype", "bf16", "--max-shard-size", "1KB", "--json", "-"
    )
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["command"] == "export"
    assert result["path"] == str(tmp_path / "hf")
    assert result["files"] == {path.name: path.stat().st_size for path in (tmp_path / "hf").iterdir()}
    assert len(result["files"]) == 3
    got = {k: v for path in (tmp_path / "hf").glob("*.safetensors") for k, v in load_file(path).items()}
    want = load_file(weights)
    assert torch.equal(got["first.weight"], want["a.weight"].bfloat16())
    assert torch.equal(got["bias"], want["b"].bfloat16())


def test_what_a_run_saved_goes_out_in_every_format_and_a_run_takes_up_what_came_back(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    line = [tmp_path / "text", *["--layers", "1", "--hidden", "16", "--heads", "2", "--context", "8", "--batch", "2"]]
    done = started("train", *line, "--steps", 2, "--save", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    codes = [
        run(["export", str(tmp_path / "run"), str(tmp_path / form), "--format", form])
        for form in ("huggingface", "dcp", "adamw")
    ]
    assert codes == [0, 0, 0]
    assert (tmp_path / "huggingface" / "model.safetensors").is_file()
    assert (tmp_path / "dcp" / ".metadata").is_file()
    assert torch.load(tmp_path / "adamw", weights_only=True)["param_groups"][0]["lr"] == 3e-4
    joined = ["--optimizer", str(tmp_path / "adamw")]
    assert run(["import", str(tmp_path / "huggingface"), str(tmp_path / "one"), *joined]) == 0
    assert run(["import", str(tmp_path / "dcp"), str(tmp_path / "two")]) == 0
    assert run(["import", str(tmp_path / "dcp"), str(tmp_path / "three"), "--weights-only"]) == 0
    steps = [
        json.loads((tmp_path / name / "manifest.json").read_text())["manifest"]["step"]
        for name in ("one", "two", "three")
    ]
    assert steps == [2, 2, 0]


def test_every_option_reaches_its_argument() -> None:
    line = (
        "--dtype fp16 --name a=b --name c.= --name =x. --model-key app.model --optimizer-key o --force --json out.json"
    )
    order = parse(f"export from to --format dcp --max-shard-size 7MB {line}".split())
    assert isinstance(order, Conversion)
    assert (order.command, order.source, order.target, order.json) == ("export", Path("from"), Path("to"), "out.json")
    common = {"dtype": torch.float16, "names": {"a": "b", "c.": "", "": "x."}, "force": True}
    assert order.settings == {**common, "format": "dcp", "max_shard_size": "7MB", "keys": ("app.model", "o")}
    order = parse(f"import from to --optimizer o.pt --weights-only {line}".split())
    assert isinstance(order, Conversion)
    assert order.settings == {**common, "optimizer": Path("o.pt"), "keys": ("app.model", None)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("import nowhere {0}/x", "nowhere"),
        ("import {0}/w.safetensors {0}/x --name zzz=y", "'zzz'"),
        ("import {0}/w.safetensors {0}/x --name zzz", "expected OLD=NEW"),
        ("import {0}/w.safetensors {0}/x --name b=c --name b=d", "got 'b' twice"),
        ("import {0}/w.safetensors {0}/x --json {0}", "expected a file or -"),
        ("import {0}/w.safetensors {0}/x --optimizer {0}/none.pt", "none.pt"),
        ("export {0}/none {0}/x", "no whole checkpoint"),
        ("export {0} {0}/x", "tiered import"),
        ("export {0} {0}/x --max-shard-size much", "max_shard_size"),
        ("export {0} {0}/x --format tar", "--format"),
    ],
)
def test_bad_input_is_one_line_and_code_2_and_nothing_is_made(
    arguments: str, says: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(arguments.format(tmp_path).split())
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == [weights.name]


def test_a_destination_that_is_taken_is_kept_unless_it_may_be_replaced(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["import", weights, tmp_path / "saved"], ["export", tmp_path / "saved", tmp_path / "hf"]):
        line = list(map(str, words))
        assert run(line) == 0
        assert run(line) == 2
        assert "--force" in capsys.readouterr().err
        assert run([*line, "--force"]) == 0


def test_a_failure_half_way_is_code_1(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(weights), str(tmp_path / "saved")]) == 0
    (file,) = (tmp_path / "saved").glob("*/*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert run(["export", str(tmp_path / "saved"), str(tmp_path / "hf")]) == 1
    assert "not those that were written" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_under_torchrun_it_is_refused(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert run(["import", str(weights), str(tmp_path / "saved")]) == 2
    assert "without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_between_two_pieces_and_leaves_what_was_there(
    number: int, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["import", str(weights), str(tmp_path / "saved")]
    assert run(line) == 0
    before = (tmp_path / "saved" / "manifest.json").read_bytes()

    class Signalled(BytesDisplay):
        def __call__(self, done: int, total: int) -> None:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(convert, "BytesDisplay", Signalled)
    assert run([*line, "--force"]) == 128 + number
    assert f"stopped by {signal.Signals(number).name}" in capsys.readouterr().err
    assert (tmp_path / "saved" / "manifest.json").read_bytes() == before
    assert len(list((tmp_path / "saved").iterdir())) == 2


def test_bytes_are_shown_now_and_then_where_nobody_watches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter([0.0, 5.0, 11.0, 11.0, 12.0, 30.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with (tmp_path / "shown").open("w") as stream:
        show = BytesDisplay(stream, "export")
        for done in (1, 2, 3, 4):
            show(done << 20, 4 << 20)
    assert (tmp_path / "shown").read_text() == "export 2.0 MiB of 4.0 MiB\nexport 4.0 MiB of 4.0 MiB\n"


def test_on_a_terminal_a_bar_is_shown() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with BytesDisplay(stream, "import") as show:
        show(1 << 20, 4 << 20)
    assert "import" in stream.getvalue()
    assert "1.0/4.0 MiB" in stream.getvalue()

"""The command line: what it becomes, and one named line with exit code 2 for everything it refuses."""

from pathlib import Path

import pytest
import torch

import tiered
from tiered.cli import main
from tiered.cli.options import parse


def test_the_defaults_train_on_the_standard_library() -> None:
    order = parse(["train"])
    assert order.files == ()
    assert order.deferred
    assert not order.compare_plain
    assert order.config.device_budget is None
    assert order.recipe.dtype == torch.float32
    assert order.config.precision == tiered.MixedPrecision()
    assert (order.config.stage, order.config.budgets, order.config.rank_timeout_s) == (3, "rank", 30.0)


def test_every_option_reaches_its_field(tmp_path: Path) -> None:
    line = (
        "train one.txt two.txt --layers 3 --hidden 12 --heads 2 --tied-head --checkpoint-activations --context 5 "
        "--batch 6 --accumulate 7 --steps 8 --lr 0.25 --weight-decay 0 --max-grad-norm 0 --seed 9 --dtype bf16 "
        "--device emulated --device-budget 64MiB --host-budget 1GiB --param-tier nvme --optimizer-tier host "
        f"--nvme {tmp_path}/a --nvme {tmp_path}/b --no-deferred --json out.json --compare-plain "
        "--stage 2 --budgets node --rank-timeout 7.5 --drive-timeout 2.5 --durability power --trace run.json "
        "--overlap forward --drive-endurance 600TB --drive-endurance 1200TB"
    )
    order = parse(line.split())
    shape, recipe, config = order.shape, order.recipe, order.config
    assert order.files == (Path("one.txt"), Path("two.txt"))
    assert (shape.layers, shape.hidden, shape.heads, shape.vocabulary) == (3, 12, 2, 256)
    assert shape.tied_head
    assert shape.checkpoint_activations
    assert (recipe.context, recipe.batch, recipe.accumulate, recipe.steps, recipe.seed) == (5, 6, 7, 8, 9)
    assert recipe.tokens == 5 * 6 * 7
    assert (recipe.lr, recipe.weight_decay, recipe.max_grad_norm) == (0.25, 0.0, None)
    assert (config.device, config.device_budget, config.host_budget) == ("emulated", 64 << 20, 1 << 30)
    assert (config.param_tier, config.optimizer_tier) == ("nvme", "host")
    assert config.directories == (tmp_path / "a", tmp_path / "b")
    assert config.precision.param_dtype == torch.bfloat16
    assert (config.stage, config.budgets, config.rank_timeout_s) == (2, "node", 7.5)
    assert (config.drive_timeout_s, config.durability, config.trace) == (2.5, "power", Path("run.json").absolute())
    assert (config.overlap, config.endurance) == ("forward", (600 * 10**12, 1200 * 10**12))
    assert not order.deferred
    assert order.compare_plain
    assert order.json == "out.json"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_asking_for_help_or_the_version_ends_well(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "tiered" in capsys.readouterr().out


def test_help_names_every_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    for option in ("--device-budget", "--host-budget", "--nvme", "--compare-plain", "--no-deferred", "TEXT_FILE"):
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["fly"], "'fly'"),
        (["train", "--steps", "0"], "--steps: got '0', expected a whole number of at least 1"),
        (["train", "--steps", "two"], "--steps: got 'two'"),
        (["train", "--lr", "nan"], "--lr: got 'nan', expected a number above 0"),
        (["train", "--lr", "0"], "--lr: got '0'"),
        (["train", "--weight-decay", "inf"], "--weight-decay: got 'inf'"),
        (["train", "--max-grad-norm", "-1"], "--max-grad-norm"),
        (["train", "--seed", "-1"], "--seed"),
        (["train", "--dtype", "fp8"], "--dtype"),
        (["train", "--stage", "0"], "--stage"),
        (["train", "--budgets", "machine"], "--budgets"),
        (["train", "--rank-timeout", "0"], "--rank-timeout: got '0', expected a number above 0"),
        (["train", "--step", "3"], "--step"),
        (["train", "--heads", "3"], "heads: got 3, expected a divisor of hidden=256"),
        (["train", "--host-budget", "lots"], "host_budget='lots'"),
        (["train", "--device", "abacus"], "device='abacus'"),
        (["train", "--param-tier", "tape"], "param_tier='tape'"),
        (["train", "--optimizer-tier", "nvme"], "optimizer_tier='nvme'"),
        (["train", "--dtype", "fp16", "--compare-plain"], "--compare-plain"),
        (["train", "missing-file.txt"], "missing-file.txt: no such file"),
        (["train", "--json", "missing-folder/out.json"], "--json: cannot write missing-folder/out.json"),
        (["train", "--json", "."], "--json: got the folder ."),
    ],
)
def test_bad_input_is_one_named_line_and_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert named in shown.err
    assert shown.err.count("\n") == 1
    assert "error: " in shown.err


def test_a_text_shorter_than_the_context_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("short")
    assert main(["train", str(text), "--context", "5"]) == 2
    assert "expected at least 6" in capsys.readouterr().err

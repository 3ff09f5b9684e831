"""The command line, parsed and checked once into an `Order`, `Conversion`, `Inspecting` or `Reporting`; nothing
later parses text.

Owns the options, their help and their limits. Bad input is one line on stderr and exit code 2: an argument's name, what
was got, what was expected. Memory sizes and tiers are checked by `tiered.Config`, which names the same words.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

import tiered
from tiered.cli import looking
from tiered.cli.gpt import GPTShape
from tiered.cli.looking import Inspecting, Reporting

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BYTES = 256
"""Vocabulary of a model that reads bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained on what, with which numbers; the same for the tiered and the plain run."""

    context: int
    batch: int
    accumulate: int
    steps: int
    lr: float
    weight_decay: float
    max_grad_norm: float | None
    """None: gradients are not clipped."""
    seed: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Tokens (bytes) of one optimizer step."""
        return self.context * self.batch * self.accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where checkpoints go, and when."""

    folder: Path
    every: int | None
    """Steps; None: at the end alone, also one by a signal."""
    keep: int
    resume: bool
    """Go on from the last one there, or from the swap directory, whichever is newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run of `tiered train`."""

    files: tuple[Path, ...]
    shape: GPTShape
    recipe: Recipe
    config: tiered.Config
    deferred: bool
    compare_plain: bool
    saving: Saving | None
    json: str | None
    """Where the result goes: a path, "-" for stdout, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One run of `tiered export` or `tiered import`."""

    command: Literal["export", "import"]
    source: Path
    target: Path
    settings: dict[str, Any]
    """Arguments of `tiered.export_checkpoint` or `tiered.import_checkpoint`."""
    json: str | None
    """Where the result goes: a path, "-" for stdout, or None."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse(arguments: Sequence[str] | None) -> Order | Conversion | Inspecting | Reporting:
    """The order that the command line gives; exits with 0 after --help and --version and with 2 after bad input.

    Raises tiered.ConfigError for values that are impossible together.
    """
    parser = Parser(prog="tiered", description="Train PyTorch models larger than the GPU's memory and larger than RAM.")
    parser.add_argument("--version", action="version", version=f"tiered {version('tiered')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a byte-level GPT on text files",
        description="Train a byte-level GPT on text files (by default the sources of Python's standard library) "
        "within the memory given, and report what moved where.",
        epilog="Sizes are written as 64MiB, 1.5GiB or a number of bytes.",
        allow_abbrev=False,
    )
    _add_model(train.add_argument_group("model"))
    _add_recipe(train.add_argument_group("training"))
    _add_placement(train.add_argument_group("placement"))
    _add_output(train.add_argument_group("output"))
    _add_export(
        commands.add_parser(
            "export",
            help="write a checkpoint in a format of others",
            description="Write a checkpoint of tiered.save as weights of Hugging Face's layout, as torch's AdamW state "
            "by parameter name, or as a folder of torch.distributed.checkpoint for FSDP2.",
            allow_abbrev=False,
        )
    )
    _add_import(
        commands.add_parser(
            "import",
            help="make a checkpoint of what others saved",
            description="Make a checkpoint that tiered.load takes of a safetensors file, a folder of Hugging Face's "
            "layout, or a folder of torch.distributed.checkpoint. Nothing is unpickled.",
            allow_abbrev=False,
        )
    )
    looking.add(commands)
    given = parser.parse_args(arguments)
    if given.command in looking.COMMANDS:
        return looking.order(given)
    return _order(given) if given.command == "train" else _conversion(given)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("files", nargs="*", type=Path, metavar="TEXT_FILE", help="text to train on, read as bytes")
    group.add_argument("--layers", type=_count, default=4, help="transformer blocks (%(default)s)")
    group.add_argument("--hidden", type=_count, default=256, help="width of the model (%(default)s)")
    group.add_argument("--heads", type=_count, default=4, help="attention heads, a divisor of --hidden (%(default)s)")
    group.add_argument("--tied-head", action="store_true", help="use the embedding's matrix as output head")
    group.add_argument(
        "--checkpoint-activations", action="store_true", help="recompute each block's activations in backward"
    )


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--context", type=_count, default=128, help="bytes of text a sequence (%(default)s)")
    group.add_argument(
        "--batch", type=_count, default=4, help="sequences a backward pass, of all ranks together (%(default)s)"
    )
    group.add_argument("--accumulate", type=_count, default=1, help="backward passes a step (%(default)s)")
    group.add_argument("--steps", type=_count, default=20, help="optimizer steps (%(default)s)")
    group.add_argument("--lr", type=_positive, default=3e-4, help="AdamW's learning rate (%(default)s)")
    group.add_argument("--weight-decay", type=_not_negative, default=0.1, help="AdamW's weight decay (%(default)s)")
    group.add_argument(
        "--max-grad-norm", type=_not_negative, default=1.0, help="clip the global norm to this; 0: never (%(default)s)"
    )
    group.add_argument("--seed", type=_seed, default=0, help="seed of weights and batches (%(default)s)")
    group.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights at work; the master is fp32")


def _add_placement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", help="cuda, cpu or emulated (default: a GPU where there is one)")
    group.add_argument("--device-budget", metavar="SIZE", help="model bytes on the device at once")
    group.add_argument("--host-budget", metavar="SIZE", help="bytes of RAM for model states and buffers")
    group.add_argument(
        "--nvme", action="append", type=Path, metavar="FOLDER", help="swap folder on a drive; repeat for several drives"
    )
    group.add_argument(
        "--drive-timeout", type=_positive, metavar="SECONDS", help="how long a drive may take over a transfer (30)"
    )
    group.add_argument(
        "--durability", choices=("process", "power", "none"), help="what a step on the drives survives (process)"
    )
    group.add_argument(
        "--drive-endurance",
        action="append",
        metavar="SIZE",
        help="bytes a drive may be written in its life, such as 600TB; for all drives, or once for each",
    )
    group.add_argument(
        "--overlap",
        choices=("auto", "none", "prefetch", "forward", "backward"),
        help="what goes on beside compute (auto)",
    )
    group.add_argument("--param-tier", metavar="TIER", default="auto", help="auto, device, host or nvme")
    group.add_argument("--optimizer-tier", metavar="TIER", default="auto", help="auto, device, host or nvme")
    group.add_argument(
        "--stage", type=int, choices=(1, 2, 3), help="ZeRO stage: what several ranks partition among them (3)"
    )
    group.add_argument("--budgets", choices=("rank", "node"), help="whose the two budgets are (rank)")
    group.add_argument(
        "--rank-timeout", type=_positive, metavar="SECONDS", help="how long ranks wait for one that makes no call (30)"
    )
    group.add_argument(
        "--deferred",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="place each weight as it is made, so that the whole model is never in RAM (on)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save", type=Path, metavar="FOLDER", help="write checkpoints there: at the end, and on a signal"
    )
    group.add_argument("--save-every", type=_count, metavar="STEPS", help="and every so many steps")
    group.add_argument("--keep", type=_count, metavar="COUNT", help="checkpoints that stay, the newest (2)")
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --save, or from what a killed run left in --nvme, whichever is newer",
    )
    group.add_argument("--trace", type=Path, metavar="PATH", help="write a timeline there, which Perfetto opens")
    group.add_argument("--json", metavar="PATH", help="write the result there as JSON; - is stdout")
    group.add_argument(
        "--compare-plain",
        action="store_true",
        help="train the same model in plain PyTorch afterwards; exit code 1 if the losses differ",
    )


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("source", type=Path, metavar="CHECKPOINT", help="a folder that tiered.save or --save wrote to")
    export.add_argument("target", type=Path, metavar="TARGET", help="where it goes: a folder; with adamw a file")
    export.add_argument(
        "--format",
        choices=("huggingface", "adamw", "dcp"),
        default="huggingface",
        help="huggingface: weights as safetensors; adamw: the optimizer's state for torch.load; dcp: both, for "
        "torch.distributed.checkpoint (%(default)s)",
    )
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a safetensors file (%(default)s)")
    _add_conversion(export)


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="SOURCE", help="a safetensors file, or a folder of either kind")
    command.add_argument("target", type=Path, metavar="CHECKPOINT", help="the folder of the checkpoint")
    command.add_argument(
        "--optimizer", type=Path, metavar="FILE", help="AdamW's state by parameter name, a file of torch.save"
    )
    _add_conversion(command)


def _add_conversion(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=DTYPES, help="of the weights (as they are); moments are fp32")
    command.add_argument(
        "--name",
        action="append",
        type=_pair,
        default=[],
        metavar="OLD=NEW",
        help="rename a tensor, or with OLD ending in a dot or empty all that begin so; repeat for several",
    )
    command.add_argument("--model-key", metavar="NAME", default="model", help="of dcp: the model's name (%(default)s)")
    command.add_argument(
        "--optimizer-key", metavar="NAME", default="optim", help="of dcp: the optimizer's name (%(default)s)"
    )
    command.add_argument("--weights-only", action="store_true", help="of dcp: without the optimizer's state")
    command.add_argument("--force", action="store_true", help="replace what is there")
    command.add_argument("--json", metavar="PATH", help="write the result there as JSON; - is stdout")


def _conversion(given: argparse.Namespace) -> Conversion:
    names: dict[str, str] = {}
    for old, new in given.name:
        if old in names:
            raise tiered.ConfigError(f"--name: got {old!r} twice, expected it once")
        names[old] = new
    settings: dict[str, Any] = {
        "dtype": DTYPES[given.dtype] if given.dtype else None,
        "names": names,
        "keys": (given.model_key, None if given.weights_only else given.optimizer_key),
        "force": given.force,
    }
    if given.command == "export":
        settings |= {"format": given.format, "max_shard_size": given.max_shard_size}
    else:
        settings["optimizer"] = given.optimizer
    return Conversion(
        command=given.command, source=given.source, target=given.target, settings=settings, json=given.json
    )


def _order(given: argparse.Namespace) -> Order:
    if given.compare_plain and given.dtype == "fp16":
        raise tiered.ConfigError("--compare-plain: got it with --dtype fp16, expected --dtype fp32 or bf16")
    if given.compare_plain and given.resume:
        raise tiered.ConfigError("--compare-plain: got it with --resume, expected a run from the start")
    for name in ("save_every", "keep", "resume"):
        if getattr(given, name) and given.save is None:
            raise tiered.ConfigError(f"--{name.replace('_', '-')}: expected --save FOLDER with it")
    saving = None
    if given.save is not None:
        saving = Saving(folder=given.save, every=given.save_every, keep=given.keep or 2, resume=given.resume)
    dtype = DTYPES[given.dtype]
    shape = GPTShape(
        vocabulary=BYTES,
        hidden=given.hidden,
        layers=given.layers,
        heads=given.heads,
        tied_head=given.tied_head,
        checkpoint_activations=given.checkpoint_activations,
    )
    recipe = Recipe(
        context=given.context,
        batch=given.batch,
        accumulate=given.accumulate,
        steps=given.steps,
        lr=given.lr,
        weight_decay=given.weight_decay,
        max_grad_norm=given.max_grad_norm or None,
        seed=given.seed,
        dtype=dtype,
    )
    return Order(
        files=tuple(given.files),
        shape=shape,
        recipe=recipe,
        config=_config(given, dtype),
        deferred=given.deferred,
        compare_plain=given.compare_plain,
        saving=saving,
        json=given.json,
    )


def _config(given: argparse.Namespace, dtype: torch.dtype) -> tiered.Config:
    settings: dict[str, Any] = {
        name: getattr(given, name)
        for name in (
            "device", "device_budget", "host_budget", "nvme", "param_tier", "optimizer_tier", "stage", "budgets",
            "durability", "overlap", "trace",
        )
        if getattr(given, name) is not None
    }  # fmt: skip
    if given.rank_timeout is not None:
        settings["rank_timeout_s"] = given.rank_timeout
    if given.drive_timeout is not None:
        settings["drive_timeout_s"] = given.drive_timeout
    if given.drive_endurance is not None:
        each = given.drive_endurance
        settings["drive_endurance"] = each if len(each) > 1 else each[0]
    if dtype != torch.float32:
        settings["precision"] = tiered.MixedPrecision(param_dtype=dtype)
    return tiered.Config(**settings)


def _pair(text: str) -> tuple[str, str]:
    old, separator, new = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected OLD=NEW")
    return old, new


def _number(kind: Callable[[str], float], holds: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def parse_number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):  # false for NaN whatever the bound
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return value

    return parse_number


_count = _number(int, lambda value: value >= 1, "a whole number of at least 1")
_seed = _number(int, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2147483647")
_positive = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
_not_negative = _number(float, lambda value: 0 <= value < math.inf, "a number of 0 or more")

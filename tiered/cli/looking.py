"""The command lines of what only reads: `tiered inspect` and `tiered report`, as `Inspecting` and `Reporting`.

Owns their options and help, as `tiered.cli.options` does those of the other commands.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = ("inspect", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspecting:
    """One run of `tiered inspect`."""

    paths: tuple[Path, ...]
    verify: bool
    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """One run of `tiered report`."""

    timelines: tuple[Path, ...]
    output: Path


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the commands."""
    _add_inspect(
        commands.add_parser(
            "inspect",
            help="say what a checkpoint or a swap directory holds, and whether it is sound",
            description="Say what a checkpoint's folder or a swap directory holds, who owns it, whether a run can go "
            "on from it, and what of it is missing or wrong. It only reads: a live run is not disturbed.",
            epilog="Exit codes: 0 nothing is wrong, 1 something is, 2 there is nothing to inspect.",
            allow_abbrev=False,
        )
    )
    _add_report(
        commands.add_parser(
            "report",
            help="make a page of the timeline of a run",
            description="Make one HTML page, which needs no network, of the timelines that --trace or "
            "Config(trace=...) wrote: what went on when, bytes by tier, and each step's time, bound and waits.",
            epilog="Exit codes: 0 done, 1 the page could not be written, 2 no timeline, or no place for the page.",
            allow_abbrev=False,
        )
    )


def order(given: argparse.Namespace) -> Inspecting | Reporting:
    """What the parsed line of one of them says."""
    if given.command == "report":
        return Reporting(timelines=tuple(given.timelines), output=given.output)
    return Inspecting(paths=tuple(given.paths), verify=given.verify, json=given.json)


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a checkpoint's folder, or a swap directory; several for a run over several drives",
    )
    command.add_argument("--verify", action="store_true", help="read every byte of it, and check each hash or checksum")
    command.add_argument("--json", action="store_true", help="write one JSON object to stdout instead of the tables")


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "timelines",
        nargs="+",
        type=Path,
        metavar="RUN.json",
        help="a timeline, of a run that goes on or was killed too; several for a part of the page for each rank",
    )
    command.add_argument("-o", "--output", required=True, type=Path, metavar="RUN.html", help="where the page goes")

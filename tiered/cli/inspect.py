"""The command `tiered inspect`: what is at a path, as tables or as JSON, and what of it is wrong.

Owns the words and the exit codes: 0 nothing is wrong, 1 something is, 2 there is nothing to inspect. The work is
`tiered.inspect`, and the keys of the JSON are the fields of what it returns, with `sound` and `faults` (their number).
Invariant: what others wrote is shown without its control characters, so no name can move a terminal's cursor.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

import tiered
from tiered.cli.looking import Inspecting
from tiered.cli.progress import BytesDisplay
from tiered.cli.ranks import Place
from tiered.cli.signals import StopSignal
from tiered.config import format_size

SOUND, FAULTY, BAD_INPUT = 0, 1, 2
_WIDTH = 120  # columns where no terminal says
_NAMED = 5  # settings that are shown, and parameters of a finding
_TOLD = ("param_tier", "optimizer_tier", "nvme", "device", "precision")


class _Stopped(BaseException):
    """A signal came."""


def inspect(order: Inspecting, place: Place, stop: StopSignal) -> int:
    """Does what the command line says and returns its exit code."""
    if not place.alone:
        return _fail(place, f"got {place.ranks} ranks, expected one process: start it without torchrun", BAD_INPUT)
    try:
        with BytesDisplay(sys.stderr, "verify") as show:

            def progress(now: int, total: int) -> None:
                show(now, total)
                if stop.requested:
                    raise _Stopped

            found = tiered.inspect(order.paths, verify=order.verify, progress=progress)
    except _Stopped:
        return _fail(place, f"stopped by {stop.received.name if stop.received else 'a signal'}", stop.exit_code)
    except tiered.TieredError as error:
        return _fail(place, f"error: {error}", BAD_INPUT)
    if order.json:
        sys.stdout.write(json.dumps(as_json(found), indent=2) + "\n")
    else:
        show_inspection(found, sys.stdout)
    return SOUND if found.sound else FAULTY


def as_json(found: tiered.Inspection) -> dict[str, Any]:
    """What `--json` writes."""
    return {**dataclasses.asdict(found), "sound": found.sound, "faults": len(found.faults)}


def show_inspection(found: tiered.Inspection, stream: TextIO) -> None:
    """Prints a table for each thing, the findings, and a last line that says whether it is sound."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)
    for checkpoint in found.checkpoints:
        newest = ", the newest" if checkpoint.newest and len(found.checkpoints) > 1 else ""
        _show(console, f"checkpoint{newest}", checkpoint.path, _checkpoint_rows(checkpoint))
    for directory in found.directories:
        _show(console, "swap directory", directory.path, _swap_rows(directory))
    for finding in found.all_findings():
        console.print(Text(_told(finding), style="red" if finding.fault else ""), soft_wrap=True)
    faults = len(found.faults)
    verified = sum(each.verified_bytes or 0 for each in found.checkpoints)
    verified += sum(each.verified_bytes or 0 for each in found.directories)
    read = f", {format_size(verified)} verified" if verified else ""
    if found.kind == "empty":
        read = ": nothing is there, as a run that ends well leaves it"
    console.print(Text(f"{f'{faults} fault' + 's' * (faults > 1) if faults else 'sound'}{read}"), soft_wrap=True)


def _show(console: Console, title: str, path: str, rows: Iterator[tuple[str, str]]) -> None:
    console.print(Text(f"{title} {plain(path)}"), soft_wrap=True)
    table = Table(show_header=False)
    for name, text in rows:
        table.add_row(Text(plain(name)), Text(plain(text)))
    console.print(table)


def _checkpoint_rows(checkpoint: Any) -> Iterator[tuple[str, str]]:
    if checkpoint.contents is not None:
        yield from _contents_rows(checkpoint.contents)
    if len(checkpoint.bytes_by_rank) > 1:
        for rank, kinds in checkpoint.bytes_by_rank.items():
            yield f"  of rank {rank}", _sizes(kinds)
    yield "on the drive", format_size(checkpoint.disk_bytes)


def _swap_rows(directory: Any) -> Iterator[tuple[str, str]]:
    process = f", process {directory.pid} of {directory.host}" if directory.pid else ""
    yield "rank", str(directory.rank)
    yield "owner", f"{directory.owner}{process}"
    yield "to go on from", f"{'yes' if directory.resumable else 'no'}: {directory.why}"
    for record in directory.records:
        serial = "" if record.serial is None else f", generation {record.serial}"
        name = record.path.rpartition("/")[2]
        yield f"  {name}", f"{record.state}{serial}{', the last' if record.last else ''}"
    if directory.contents is not None:
        yield from _contents_rows(directory.contents)
    if len(directory.bytes_by_drive) > 1:
        for path, nbytes in directory.bytes_by_drive.items():
            weight, whole = directory.weight_by_drive[path], sum(directory.weight_by_drive.values())
            yield "  on", f"{path}: {format_size(nbytes)}, weight {weight} of {whole}"
    yield "on the drive", format_size(directory.disk_bytes)


def _contents_rows(contents: Any) -> Iterator[tuple[str, str]]:
    yield "step", str(contents.step)
    if contents.ranks is not None:
        stage = "" if contents.stage is None else f", ZeRO stage {contents.stage}"
        yield "ranks", f"{contents.ranks}{stage}"
    if contents.parameters is not None:
        yield "parameters", f"{contents.parameters}, of {contents.elements or 0:,} elements"
    yield "bytes", _sizes(contents.bytes_by_kind)
    settings = [f"{name}={contents.config[name]}" for name in _TOLD if contents.config.get(name, "None") != "None"]
    if settings:
        yield "settings", ", ".join(settings[:_NAMED])
    if contents.versions:
        yield "made with", ", ".join(f"{name} {number}" for name, number in contents.versions.items())


def _sizes(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {format_size(nbytes)}" for kind, nbytes in kinds.items()) or "nothing"


def _told(finding: Any) -> str:
    place = "" if finding.offset is None else f", byte {finding.offset}"
    names = ", ".join(finding.of[:_NAMED]) + (f" and {len(finding.of) - _NAMED} more" * (len(finding.of) > _NAMED))
    of = f" [{names}]" if names else ""
    return plain(f"{'FAULT' if finding.fault else 'note'} {finding.kind}: {finding.path}{place}: {finding.says}{of}")


def plain(text: str) -> str:
    """Without characters that do something to a terminal, or that have no bytes to print."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode() for letter in text
    )


def _fail(place: Place, text: str, code: int) -> int:
    if place.first:
        sys.stderr.write(plain(f"tiered inspect: {' '.join(text.split())}") + "\n")
    return code

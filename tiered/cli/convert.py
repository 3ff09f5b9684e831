"""The commands `tiered export` and `tiered import`: checkpoints to and from the formats of others.

Owns what is shown and the exit codes; the work is `tiered.export_checkpoint` and `tiered.import_checkpoint`. A stop
signal ends it between two pieces: the destination is then what it was.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import tiered
from tiered.cli.options import Conversion
from tiered.cli.progress import BytesDisplay
from tiered.cli.ranks import Place
from tiered.cli.signals import StopSignal
from tiered.cli.summary import check_target
from tiered.config import format_size

BAD_INPUT, FAILED = 2, 1


class _Stopped(BaseException):
    """A signal came."""


def convert(order: Conversion, place: Place, stop: StopSignal) -> int:
    """Does what the command line says and returns its exit code: 2 where nothing was written yet."""
    done = 0
    start = time.perf_counter()
    try:
        if not place.alone:
            raise tiered.ConfigError(f"got {place.ranks} ranks, expected one process: start it without torchrun")
        if order.json is not None:
            check_target(order.json)
        with BytesDisplay(sys.stderr, order.command) as show:

            def progress(now: int, total: int) -> None:
                nonlocal done
                done = now
                show(now, total)
                if stop.requested:
                    raise _Stopped

            call = tiered.export_checkpoint if order.command == "export" else tiered.import_checkpoint
            path = call(order.source, order.target, progress=progress, **order.settings)
    except _Stopped:
        said = stop.received.name if stop.received else "a signal"
        return _fail(order, place, f"stopped by {said}; {order.target} is as it was", stop.exit_code)
    except tiered.TieredError as error:
        return _fail(order, place, f"error: {error}", FAILED if done else BAD_INPUT)
    _report(order, _result(order, path, done, time.perf_counter() - start))
    return 0


def _result(order: Conversion, path: Path, nbytes: int, seconds: float) -> dict[str, Any]:
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return {
        "command": order.command,
        "source": str(order.source),
        "path": str(path),
        "tensor_bytes": nbytes,
        "files": {str(each.relative_to(path) if each != path else each.name): each.stat().st_size for each in files},
        "seconds": seconds,
    }


def _report(order: Conversion, result: dict[str, Any]) -> None:
    said = sys.stderr if order.json == "-" else sys.stdout
    count, seconds = len(result["files"]), result["seconds"]
    size = format_size(result["tensor_bytes"])
    print(f"{result['path']}: {size} of tensors in {count} file{'s' * (count > 1)}, {seconds:.1f} s", file=said)
    if order.json is not None:
        text = json.dumps(result, indent=2) + "\n"
        if order.json == "-":
            sys.stdout.write(text)
        else:
            Path(order.json).write_text(text, encoding="utf-8")


def _fail(order: Conversion, place: Place, text: str, code: int) -> int:
    if place.first:
        sys.stderr.write(f"tiered {order.command}: {' '.join(text.split())}\n")
    return code

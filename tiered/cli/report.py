"""The command `tiered report`: the timelines that a run's ranks have written, as one HTML page.

Owns the words and the exit codes: 0 the page is there, 1 it could not be written, 2 what was given is no timeline or
the page has no place to go; what was there before is then as it was.
"""

import os
import sys
from pathlib import Path

import tiered
from tiered.cli import page
from tiered.cli.inspect import plain
from tiered.cli.looking import Reporting
from tiered.cli.progress import BytesDisplay
from tiered.cli.ranks import Place
from tiered.cli.recorded import Recording, read
from tiered.cli.signals import StopSignal
from tiered.cli.steps import steps_of

BAD_INPUT, FAILED = 2, 1


class _Stopped(BaseException):
    """A signal came."""


def report(order: Reporting, place: Place, stop: StopSignal) -> int:
    """Does what the command line says and returns its exit code."""
    if not place.alone:
        told = f"error: got {place.ranks} ranks, expected one process: start it without torchrun"
        return _fail(place, told, BAD_INPUT)
    try:
        _check_target(order)
        recordings = [_read(path, stop) for path in order.timelines]
        text = page.page(recordings)
    except _Stopped:
        said = stop.received.name if stop.received else "a signal"
        return _fail(place, f"stopped by {said}; {order.output} is as it was", stop.exit_code)
    except tiered.TieredError as error:
        return _fail(place, f"error: {error}", BAD_INPUT)
    try:
        page.write(text, order.output)
    except tiered.TieredError as error:
        return _fail(place, f"error: {error}", FAILED)
    print(plain(f"{order.output}: {_said(recordings)}"))
    return 0


def _read(path: Path, stop: StopSignal) -> Recording:
    with BytesDisplay(sys.stderr, "read") as show:

        def progress(now: int, total: int) -> None:
            show(now, total)
            if stop.requested:
                raise _Stopped

        return read(path, progress)


def _check_target(order: Reporting) -> None:
    """Finds out before anything is read whether a page can go there: raises ConfigError where not."""
    path = order.output
    if path.is_dir():
        raise tiered.ConfigError(f"--output: got the folder {path}, expected a file, such as {path / 'run.html'}")
    if path.exists() and not path.is_file():
        raise tiered.ConfigError(f"--output: got {path}, which is no plain file; expected a path such as run.html")
    if not path.parent.is_dir():
        raise tiered.ConfigError(f"--output: there is no folder {path.parent} for {path.name}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise tiered.ConfigError(f"--output: cannot write in the folder {path.parent}; expected a writable one")
    if path.exists() and any(one.exists() and one.samefile(path) for one in order.timelines):
        raise tiered.ConfigError(f"--output: got {path}, which is the timeline; expected another file for the page")


def _said(recordings: list[Recording]) -> str:
    steps = max(len(steps_of(one)) for one in recordings)
    events = sum(one.events for one in recordings)
    ranks = f" of {len(recordings)} timelines" if len(recordings) > 1 else ""
    return f"{steps} step{'s' * (steps != 1)}, {events:,} event{'s' * (events != 1)}{ranks}"


def _fail(place: Place, text: str, code: int) -> int:
    if place.first:
        sys.stderr.write(plain(f"tiered report: {' '.join(text.split())}") + "\n")
    return code

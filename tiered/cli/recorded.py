"""What the file of `Config(trace=...)` holds, as values: events by row, bytes by tier, the bound of each step.

    read     a file -> Recording        group_of    an event's name -> the group it is about

Reads a line at a time and keeps columns of numbers, so a long run fits. What a killed run has left is a timeline too:
its last line may be cut. Whatever else is no line of a timeline is refused by name, with its number.

What a step was bound by is an instant event of category "limit", written between the beginning of its "step" event and
the beginning of the next one, with the args of `Limit`.
"""

import array
import collections
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiered
from tiered.cli.progress import TIERS
from tiered.config import format_size

MOST = 1_000_000
"""Events that a page shows; what comes later is counted only."""
_LOOP = "loop"  # what the row of the user's loop is called
_LINE = 1 << 20  # bytes of one line at most
_WHOLE = 256 << 20  # bytes of a file that is not written a line at a time
_LATEST = 1e16  # microseconds
_PROGRESS = 4096  # lines
_OF_GROUP = re.compile(r" of groups? \[?(\d+)\]?$")


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """What one step took, and what it could not have been faster than."""

    ts: float
    step: int
    seconds: float
    bound_s: float | None
    binding: str
    terms: Mapping[str, float]
    stalls: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """What events may share: a name, a kind, and the group they are about, "" for none."""

    name: str
    kind: str
    group: str


class Row:
    """One row: events that lie apart or inside of each other, as columns. Times are microseconds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"row {number}"
        self.start = array.array("d")
        self.duration = array.array("d")
        self.label = array.array("l")

    def add(self, start: float, duration: float, label: int) -> None:
        """One event more."""
        self.start.append(start)
        self.duration.append(duration)
        self.label.append(label)

    @property
    def is_loop(self) -> bool:
        """It is the user's loop."""
        return self.name == _LOOP


@dataclasses.dataclass(slots=True)
class Recording:
    """One file's contents."""

    path: Path
    rank: int = 0
    rows: dict[int, Row] = dataclasses.field(default_factory=dict)
    labels: list[Label] = dataclasses.field(default_factory=list)
    occupancy: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    """Time, and bytes of each tier."""
    limits: list[Limit] = dataclasses.field(default_factory=list)
    groups: Sequence[str] = ()
    """Names by index."""
    budgets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ended: bool = False
    """The run closed it."""
    events: int = 0
    left_out: int = 0

    def loop(self) -> Row | None:
        """The row of the user's loop."""
        return next((row for row in self.rows.values() if row.is_loop), None)


def read(path: Path, progress: Callable[[int, int], None] | None = None) -> Recording:
    """The timeline at `path`. progress: called with bytes read and in all.

    Raises StorageError where it cannot be read, ConfigError where it is no timeline or has no event yet.
    """
    reader = _Reader(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.readline(_LINE)
            if not first.strip():
                raise tiered.ConfigError(
                    f"{path} is empty: a run writes its timeline there when its first step begins; is it still to come?"
                )
            if first.strip() != b"[":
                reader.whole(first, file.read(max(0, _WHOLE - len(first))), size)
            else:
                for number, line in enumerate(iter(lambda: file.readline(_LINE), b""), 2):
                    reader.line(number, line)
                    if progress is not None and number % _PROGRESS == 0:
                        progress(file.tell(), size)
    except OSError as error:
        if isinstance(error, tiered.TieredError):
            raise
        raise tiered.StorageError(
            f"cannot read the timeline {path} ({os.strerror(error.errno or 0)}): give the file that "
            'Config(trace="run.json") or --trace wrote'
        ) from error
    return reader.done()


def group_of(name: str, kind: str, groups: Sequence[str]) -> str:
    """The name of the group that an event is about, "" where it is about none, or several."""
    if found := _OF_GROUP.search(name):
        index = int(found[1])
        return groups[index] if index < len(groups) else f"group {index}"
    if not kind or _is_place(kind):
        return ""
    return f" {name}".partition(f" {kind} ")[2].removeprefix("of ")


def _is_place(kind: str) -> bool:
    """What follows the kind in a name is no group."""
    return kind.startswith(("drive", "save", "ranks", "stall", "step"))


class _Reader:
    def __init__(self, path: Path) -> None:
        self._found = Recording(path)
        self._labels: dict[tuple[str, str], int] = {}
        self._torn: int | None = None  # number of a line that is no JSON: the last one, or the file is no timeline
        self._kinds: collections.Counter[str] = collections.Counter()

    def line(self, number: int, line: bytes) -> None:
        """One line of a file that has one event in each."""
        text = line.strip().rstrip(b",")
        if text in (b"", b"]"):
            return
        if self._torn is not None:
            raise self._foreign(f"line {self._torn} is no event")
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            self._torn = number
            return
        self._take(event, f"line {number}")

    def whole(self, first: bytes, rest: bytes, size: int) -> None:
        """A file that another program has written again."""
        if not first.lstrip().startswith(b"["):
            raise self._foreign("it does not begin with a list of events")
        if size > _WHOLE:
            raise self._foreign(f"its {format_size(size)} have more than one event a line")
        try:
            events = json.loads(first + rest)
        except (ValueError, RecursionError):
            raise self._foreign("it is no JSON") from None
        for number, event in enumerate(events, 1):
            self._take(event, f"event {number}")

    def done(self) -> Recording:
        """What was read. Raises ConfigError where nothing is there to show."""
        found = self._found
        if not found.events:
            if self._torn is not None:
                raise self._foreign(f"line {self._torn} is no event")
            raise tiered.ConfigError(
                f"{found.path} has no event yet: the run was closed or stopped before its first step, or has just begun"
            )
        found.labels = [
            dataclasses.replace(label, group=group_of(label.name, label.kind, found.groups)) for label in found.labels
        ]
        return found

    def _take(self, event: Any, where: str) -> None:
        try:
            phase = event["ph"]
            if phase == "X":
                self._span(event)
            elif phase == "M":
                self._about(event)
            elif phase == "C" and event["name"] == "occupancy":
                args = event["args"]
                self._found.occupancy.append((_time(event["ts"]), *(_number(args.get(tier, 0)) for tier in TIERS)))
            elif phase == "i" and event.get("cat") == "limit":
                self._found.limits.append(_limit(_time(event["ts"]), event["args"]))
            elif phase == "i" and event["name"] == "end":
                self._found.ended = True
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise self._foreign(f"{where} is no event") from None

    def _span(self, event: Any) -> None:
        found = self._found
        start, duration, number = _time(event["ts"]), _time(event["dur"]), int(event["tid"])
        name, kind = _text(event["name"]), _text(event.get("cat", ""))
        if kind == "drive":
            kind = f"drive {name.split(' ', 1)[0]}" if name.startswith(("read ", "write ")) else kind
        found.events += 1
        if found.events > MOST:
            found.left_out += 1
            return
        index = self._labels.setdefault((name, kind), len(found.labels))
        if index == len(found.labels):
            found.labels.append(Label(name, kind, ""))
        self._row(number).add(start, duration, index)

    def _about(self, event: Any) -> None:
        found, args = self._found, event["args"]
        if event["name"] == "thread_name":
            self._row(int(event["tid"])).name = _text(args["name"])
        elif event["name"] == "process_name":
            found.rank = int(event["pid"])
        elif event["name"] == "groups":
            found.groups = tuple(_text(name) for name in args["names"])
        elif event["name"] == "budgets":
            found.budgets = {tier: _number(args[tier]) for tier in TIERS if tier in args}

    def _row(self, number: int) -> Row:
        if number not in self._found.rows:
            self._found.rows[number] = Row(number)
        return self._found.rows[number]

    def _foreign(self, why: str) -> tiered.ConfigError:
        return tiered.ConfigError(
            f"{self._found.path} is not a timeline ({why}): give the file that "
            'Config(trace="run.json") or --trace wrote'
        )


def _limit(ts: float, args: Any) -> Limit:
    bound = args.get("bound_s")
    return Limit(
        ts=ts,
        step=int(args["step"]),
        seconds=_number(args["seconds"]),
        bound_s=None if bound is None else _number(bound),
        binding=_text(args.get("binding") or ""),
        terms={_text(name): _number(seconds) for name, seconds in (args.get("terms") or {}).items()},
        stalls={_text(cause): _number(seconds) for cause, seconds in (args.get("stalls") or {}).items()},
    )


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given


def _number(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given) or given < 0:
        raise ValueError
    return given


def _time(given: Any) -> float:
    if _number(given) > _LATEST:
        raise ValueError
    return float(given)

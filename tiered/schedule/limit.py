"""Limit: what each step took beside what it could not have been faster than, and which resource says so.

    bound = max(compute + update on the same cores, or each of them where a device computes,
                bytes read and written / best rate, for each drive,
                bytes / rate, for each direction of a device's link)

(The step's lower bound of the offloading literature, as in ZeRO-Infinity, SC 2021, section 4.) A step goes from one
`optimizer.step()` to the next. Compute is what a step spends neither waiting nor updating, at least: the fewest seconds
of recent steps count, so that work which slows computation down does not raise the bound. A drive's rate is the most
bytes, both ways together, that it has moved in a second with something in flight, by the best of recent steps: a drive
that has become slower is measured by what it can do now.

Invariants:
1. What a bound is made of errs towards too low: a share of it is never too good, but for rates that were never reached.
2. Recording costs a step a few reads of counters.
Leaves to whom: `stats` has what it gives; the timeline, where there is one, is told of each step.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tiered.stats import DriveUse, Meter, StepLimit

_RECENT = 16  # steps
_LEAST = 16 << 20  # bytes that a drive moves in a step whose rate says something
_DAY = 86400.0
Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True, slots=True)
class DriveCount:
    """What a drive has moved so far, in bytes, and for how long something was in flight."""

    path: str
    read: int
    written: int
    busy_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Account:
    """Everything that is counted, at one moment."""

    at: float
    stalls: Mapping[str, float]
    update: float
    moved: Mapping[str, int]
    """Bytes by name of a tier and direction."""
    drives: Sequence[DriveCount]


class Recorder:
    """See the file's contract."""

    def __init__(
        self,
        meter: Meter,
        drives: Callable[[], Sequence[DriveCount]],
        *,
        in_place: bool,
        links: Mapping[str, float],
        endurance: Sequence[int] = (),
    ) -> None:
        """in_place: the CPU computes and updates. links: bytes per second "to the device" and "from the device", as far
        as known. endurance: bytes each drive may be written in its life, in the order of `drives`; empty: unknown."""
        self._meter = meter
        self._drives = drives
        self._in_place = in_place
        self._links = links
        self._endurance = endurance
        self._before: _Account | None = None
        self._first: _Account | None = None
        self._compute: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._rates: dict[str, collections.deque[float]] = {}
        self._bound = 0.0
        self._steps = 0
        self._terms: collections.Counter[str] = collections.Counter()
        self.last: StepLimit | None = None

    def step(self) -> None:
        """A step begins, so the one before is over."""
        now, before = self._look(), self._before
        self._before = now
        if before is None:
            self._first = now
            return
        self._steps += 1
        self.last = last = self._limit(before, now)
        self._bound += last.bound_s
        self._terms.update(last.terms)
        if self._meter.timeline is not None:
            args = {"step": self._steps, "seconds": last.seconds, "bound_s": last.bound_s, "binding": last.binding}
            self._meter.timeline.limit({**args, "terms": dict(last.terms), "stalls": dict(last.stall_seconds)})

    def mean(self) -> StepLimit | None:
        """Of all steps that are over; None before there is one."""
        first, now = self._first, self._before
        if first is None or now is None or not self._steps:
            return None
        count = self._steps
        stalls = {cause: seconds / count for cause, seconds in _minus(now.stalls, first.stalls).items()}
        terms = {name: seconds / count for name, seconds in self._terms.items()}
        return StepLimit(
            seconds=(now.at - first.at) / count,
            bound_s=self._bound / count,
            binding=max(terms, key=lambda name: terms[name]),
            terms=terms,
            stall_seconds=stalls,
        )

    def moved(self) -> Mapping[str, float]:
        """Bytes of a step on average, by "TIER read" and "TIER written"."""
        if self._first is None or self._before is None or not self._steps:
            return {}
        return {name: n / self._steps for name, n in _minus(self._before.moved, self._first.moved).items()}

    def drives(self) -> tuple[DriveUse, ...]:
        """What each drive does in a step on average."""
        first, now = self._first, self._before
        if first is None or now is None or not self._steps:
            return ()
        found = []
        for number, (was, drive) in enumerate(zip(first.drives, now.drives, strict=True)):
            written, seconds = drive.written - was.written, now.at - first.at
            rated = self._endurance[number] if number < len(self._endurance) else None
            days = rated * seconds / written / _DAY if rated is not None and written else None
            found.append(
                DriveUse(
                    path=drive.path,
                    read_bytes=(drive.read - was.read) / self._steps,
                    written_bytes=written / self._steps,
                    bytes_per_s=max(self._rates[drive.path]) if drive.path in self._rates else None,
                    endurance_days=days,
                )
            )
        return tuple(found)

    def _look(self) -> _Account:
        meter = self._meter
        moved = {f"{tier} read": n for tier, n in meter.read.items()}
        moved |= {f"{tier} written": n for tier, n in meter.written.items()}
        return _Account(time.perf_counter(), dict(meter.stalls), meter.spent["update"], moved, tuple(self._drives()))

    def _limit(self, before: _Account, now: _Account) -> StepLimit:
        seconds = now.at - before.at
        stalls = _minus(now.stalls, before.stalls)
        update = now.update - before.update
        waited = sum(stalls.values()) - (0.0 if self._in_place else stalls.get("norm", 0.0))  # there for the device
        self._compute.append(max(0.0, seconds - waited - update))
        compute = min(self._compute)
        terms = {"compute and update": compute + update} if self._in_place else {"compute": compute, "update": update}
        moved = _minus(now.moved, before.moved)
        for direction, name in (("to the device", "device written"), ("from the device", "device read")):
            if direction in self._links:
                terms[direction] = moved.get(name, 0) / self._links[direction]
        for was, drive in zip(before.drives, now.drives, strict=True):
            nbytes, busy = drive.read + drive.written - was.read - was.written, drive.busy_s - was.busy_s
            if nbytes >= _LEAST and busy > 0:
                self._rates.setdefault(drive.path, collections.deque(maxlen=_RECENT)).append(nbytes / busy)
            if drive.path in self._rates:
                terms[f"drive {drive.path}"] = nbytes / max(self._rates[drive.path])
        binding = max(terms, key=lambda name: terms[name])
        return StepLimit(
            seconds=seconds, bound_s=min(seconds, terms[binding]), binding=binding, terms=terms, stall_seconds=stalls
        )


def _minus(now: Mapping[str, Number], before: Mapping[str, Number]) -> dict[str, Number]:
    return {name: number - before.get(name, 0) for name, number in now.items()}

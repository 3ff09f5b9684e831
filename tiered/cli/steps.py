"""The steps of a recorded run: when each was, what it waited for, and how near it came to its bound.

A step ends where the loop's "step" event ends, and the next one begins there: what the loop does after an update, up to
the next forward, is part of that step. What a killed run began is no step. Times are seconds since the run began.
"""

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tiered.cli.recorded import Limit, Recording

_WAIT = "wait: "


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step."""

    number: int
    start: float
    end: float
    stalls: Mapping[str, float]
    """Seconds by cause: as the run has told, or else the sum of the events, of all threads."""
    limit: Limit | None

    @property
    def seconds(self) -> float:
        """As the run has told, or else from one end to the next."""
        return self.limit.seconds if self.limit is not None else self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """The mean of all steps; of the bound and its terms over those that have one."""

    seconds: float
    settled_s: float
    """Median of the steps after the first, which also learns the order of use."""
    bound_s: float | None
    share: float | None
    """Of the mean bound in the mean time of those steps."""
    binding: str
    """The one that bound most steps."""
    bound_steps: int
    binding_steps: int
    terms: Mapping[str, float]
    stalls: Mapping[str, float]


def steps_of(recording: Recording) -> list[Step]:
    """Every whole step, in order."""
    loop = recording.loop()
    if loop is None:
        return []
    kinds = [recording.labels[label].kind for label in loop.label]
    order = sorted(range(len(kinds)), key=lambda index: loop.start[index])
    updates = [(loop.start[i] / 1e6, (loop.start[i] + loop.duration[i]) / 1e6) for i in order if kinds[i] == "step"]
    if not updates:
        return []
    edges = [loop.start[order[0]] / 1e6, *(end for _, end in updates)]
    limits = _limits([start for start, _ in updates], recording.limits)
    stalls = _stalls(edges, recording)
    numbers = _numbers(len(updates), limits)
    return [
        Step(
            number=numbers[index],
            start=edges[index],
            end=edges[index + 1],
            stalls=limit.stalls if (limit := limits.get(index)) is not None and limit.stalls else stalls[index],
            limit=limit,
        )
        for index in range(len(updates))
    ]


def mean_of(steps: Sequence[Step]) -> Mean | None:
    """None where there is no step."""
    if not steps:
        return None
    bound = [step.limit for step in steps if step.limit is not None and step.limit.bound_s is not None]
    total = sum(limit.bound_s or 0.0 for limit in bound)
    spent = sum(limit.seconds for limit in bound)
    binding, times = collections.Counter(limit.binding for limit in bound).most_common(1)[0] if bound else ("", 0)
    return Mean(
        seconds=statistics.fmean(step.seconds for step in steps),
        settled_s=statistics.median(step.seconds for step in steps[1:] or steps),
        bound_s=total / len(bound) if bound else None,
        share=total / spent if spent else None,
        binding=binding,
        bound_steps=len(bound),
        binding_steps=times,
        terms=_mean([limit.terms for limit in bound]),
        stalls=_mean([step.stalls for step in steps]),
    )


def _mean(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = collections.defaultdict(float)
    for table in tables:
        for name, seconds in table.items():
            total[name] += seconds
    return {name: seconds / len(tables) for name, seconds in total.items()}


def _limits(begins: Sequence[float], given: Sequence[Limit]) -> dict[int, Limit]:
    """Each with the step whose update began last before it; of two the first: the other's never ended."""
    found: dict[int, Limit] = {}
    for limit in sorted(given, key=lambda limit: limit.ts):
        index = bisect.bisect_right(begins, limit.ts / 1e6) - 1
        if index >= 0:
            found.setdefault(index, limit)
    return found


def _numbers(count: int, limits: Mapping[int, Limit]) -> list[int]:
    """As the run has told, which may have gone on from another; else from 1."""
    told = min(limits, default=None)
    number = 0 if told is None else limits[told].step - told - 1
    numbers = []
    for index in range(count):
        number = limits[index].step if index in limits else number + 1
        numbers.append(number)
    return numbers


def _stalls(edges: Sequence[float], recording: Recording) -> list[dict[str, float]]:
    """Seconds of waits inside of each interval between two edges, by cause."""
    found: list[dict[str, float]] = [collections.defaultdict(float) for _ in edges[1:]]
    causes = {
        index: label.name.removeprefix(_WAIT) for index, label in enumerate(recording.labels) if label.kind == "stall"
    }
    for row in recording.rows.values():
        for start, duration, label in zip(row.start, row.duration, row.label, strict=True):
            if label not in causes:
                continue
            begin, end = start / 1e6, (start + duration) / 1e6
            index = max(0, bisect.bisect_right(edges, begin) - 1)
            while index < len(found) and edges[index] < end:
                inside = min(end, edges[index + 1]) - max(begin, edges[index])
                found[index][causes[label]] += max(0.0, inside)
                index += 1
    return found

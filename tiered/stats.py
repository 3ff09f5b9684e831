"""Counters of a run, and the frozen snapshot the user sees.

`Meter` is the one mutable account that every layer adds to; `Stats` is what `tiered.stats(model)` returns. Times are
seconds of the calling thread spent waiting, by cause; bytes are counted where they move, per tier.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tiered.timeline import Ending, Timeline

COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLimit:
    """What a step took beside what it could not have been faster than; see `schedule.limit` for the formula.

    seconds: from one optimizer.step() to the next. bound_s: the largest of `terms`, the seconds that each resource
        needs by itself. binding: whose it is. stall_seconds: seconds that the training loop waited, by cause.
    """

    seconds: float
    bound_s: float
    binding: str
    terms: Mapping[str, float]
    stall_seconds: Mapping[str, float]

    @property
    def share(self) -> float:
        """Of the bound in what the step took: 1.0 is as fast as this machine can."""
        return self.bound_s / self.seconds if self.seconds else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriveUse:
    """What one drive does in a step, on average.

    path: of the swap file. read_bytes, written_bytes: of a step. bytes_per_s: the most that it has moved in a second,
        both ways together; None where it has moved too little to say. endurance_days: how long its rated endurance
        (`Config.drive_endurance`) lasts at this rate of writing, day and night; None where that is not given.
    """

    path: str
    read_bytes: float
    written_bytes: float
    bytes_per_s: float | None
    endurance_days: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a sharded model's counters, since it was sharded.

    steps, skipped_steps: optimizer steps taken, and those skipped for a non-finite gradient.
    read_bytes, written_bytes: bytes read from and written to each tier ("device", "host", "nvme"): "device" counts
        copies over the device's link (reads leave the device), "nvme" counts the drives.
    resident_bytes, peak_bytes: bytes charged to each tier's budget now, and at most so far; for "nvme" the bytes of
        the swap files.
    staging_buffers: buffers for bytes on their way that are out at this moment.
    stall_seconds: seconds the training loop waited, by cause.
    hit_rate: share of a moving group's uses that found it present or on its way (an update under the next forward that
        hands it over is on its way, too); 1.0 when nothing moves.
    placement: kind of state -> tier name -> bytes whose home is there.
    pinned_bytes: page-locked bytes of RAM now; they are part of the host's.
    activation_bytes: the most that anything beside the budget's own bytes has taken on the device, as measured between
        uses of groups: activations, temporaries, gradients, inputs. 0 where the device measures nothing.
    device_allocated_bytes, device_peak_allocated_bytes: bytes of the device allocated for tensors of this process, now
        and at most so far; 0 where the device measures nothing.
    device_fragmentation_bytes: bytes of the device that torch's allocator holds beyond what is allocated.
    rank, ranks: this process's place among the ranks of the run, and how many there are.
    collective_elements, collective_bytes: by "all_gather", "reduce_scatter" and "broadcast", elements and bytes of the
        whole (padded) tensors that this rank took part in moving, as the ZeRO papers count; of N ranks each sends and
        receives (N - 1) / N of them.
    last_step, mean_step: what the last step took, and steps on average (but the first), beside their bound; None before
        the second optimizer step.
    bytes_per_parameter: by "TIER read" and "TIER written", bytes of a step for each parameter of the model, on average.
    drives: what each drive does in a step, and how long it lasts at that.
    drive_retries, drive_stalls: reads from drives that were made once more, as they failed, came with other bytes than
        were written, or were late; transfers that were late (`Config.drive_timeout_s`). Both 0 on healthy drives.
    """

    steps: int
    skipped_steps: int
    read_bytes: Mapping[str, int]
    written_bytes: Mapping[str, int]
    resident_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    staging_buffers: int
    stall_seconds: Mapping[str, float]
    hit_rate: float
    placement: Mapping[str, Mapping[str, int]]
    pinned_bytes: int = 0
    activation_bytes: int = 0
    device_allocated_bytes: int = 0
    device_peak_allocated_bytes: int = 0
    device_fragmentation_bytes: int = 0
    rank: int = 0
    ranks: int = 1
    collective_elements: Mapping[str, int] = dataclasses.field(default_factory=dict)
    collective_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drive_retries: int = 0
    drive_stalls: int = 0
    last_step: StepLimit | None = None
    mean_step: StepLimit | None = None
    bytes_per_parameter: Mapping[str, float] = dataclasses.field(default_factory=dict)
    drives: tuple[DriveUse, ...] = ()


class Meter:
    """The running account behind `Stats`, and the way to the timeline where there is one. Thread-safe."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self.steps = 0
        self.skipped_steps = 0
        self.uses = 0
        self.hits = 0
        self.read: collections.Counter[str] = collections.Counter()
        self.written: collections.Counter[str] = collections.Counter()
        self.collective_elements: collections.Counter[str] = collections.Counter(dict.fromkeys(COLLECTIVES, 0))
        self.collective_bytes: collections.Counter[str] = collections.Counter(dict.fromkeys(COLLECTIVES, 0))
        self.stalls: dict[str, float] = collections.defaultdict(float)
        self.spent: dict[str, float] = collections.defaultdict(float)  # seconds inside spans, by kind
        self._lock = threading.Lock()
        self._occupancy: Callable[[], Mapping[str, int]] | None = None

    def watch(
        self, groups: Sequence[str], budgets: Mapping[str, int], occupancy: Callable[[], Mapping[str, int]]
    ) -> None:
        """Tell the timeline, where there is one, what the groups are called, the bytes each tier may hold, and those it
        does hold whenever the loop moves on. occupancy: cheap, as it is called that often."""
        if self.timeline is not None:
            self.timeline.about("groups", {"names": list(groups)})
            self.timeline.about("budgets", budgets)
            self._occupancy = occupancy

    def count(self, tier: str, *, read: int = 0, written: int = 0) -> None:
        """Add bytes moved from (`read`) or to (`written`) a tier."""
        with self._lock:
            self.read[tier] += read
            self.written[tier] += written

    def communicated(self, collective: str, elements: int, nbytes: int) -> None:
        """Add a whole tensor of `elements` that ranks have moved by `collective`."""
        with self._lock:
            self.collective_elements[collective] += elements
            self.collective_bytes[collective] += nbytes

    @contextlib.contextmanager
    def stalled(self, cause: str) -> Iterator[None]:
        """Charge the time spent inside to `cause`."""
        start = time.perf_counter()
        try:
            with self.span(f"wait: {cause}", "stall"):
                yield
        finally:
            with self._lock:
                self.stalls[cause] += time.perf_counter() - start

    def at(self, kind: str, what: str = "") -> None:
        """The user's loop is at `what` now, as a `kind` of use."""
        if self.timeline is None:
            return
        moved = self.timeline.at(f"{kind} {what}".strip(), kind)
        if moved and self._occupancy is not None:
            self.timeline.occupied(self._occupancy())

    def close(self) -> None:
        """The account is closed; it can still be read."""
        if self.timeline is not None:
            self.timeline.close()

    @contextlib.contextmanager
    def span(self, what: str, kind: str) -> Iterator[None]:
        """`what` goes on inside."""
        start = time.perf_counter()
        try:
            with contextlib.nullcontext() if self.timeline is None else self.timeline.span(what, kind):
                yield
        finally:
            with self._lock:
                self.spent[kind] += time.perf_counter() - start

    def flight(self, what: str, kind: str, ticket: Ending) -> None:
        """`what` goes on beside, until `ticket` is done."""
        if self.timeline is not None and not ticket.done():
            ticket.add_done_callback(self.timeline.flight(what, kind))

"""Simulate: what is planned, run on virtual time: the second interpreter of what `schedule.execute` decides.

    Simulation(shape, costs).step() -> StepTime       one training step
    predict(shape, costs) -> StepTime                 a steady one

The executor, with its trace, outlook and plan, is the runtime's own; its pages are here, and arrive when a clock says
so. Updates go through slots as `optim.pipeline` has them: in the step ("none", "prefetch"), each group before its next
forward computes ("forward"), or as far as the share of `schedule.choice.Balance` goes in backward ("backward").

Invariants:
1. Nothing is asked of a machine: equal arguments give equal times, to the last bit.
2. Every byte that the runtime would move for a page or an update is moved on the clock, once.
Leaves to whom: what things cost is `schedule.cost`'s; when the loop and the drive get on, `schedule.clock`'s.
"""

from __future__ import annotations

import dataclasses
import statistics

from tiered.schedule.choice import Balance
from tiered.schedule.clock import Clock, Moving
from tiered.schedule.cost import Costs, Group, Shape
from tiered.schedule.execute import Executor
from tiered.schedule.trace import Phase
from tiered.schedule.updates import Chunk, Updates
from tiered.stats import Meter

_STEPS, _BALANCED = 8, 24  # steps of a prediction, and of one in which a share has to be found first
_LAST = 5  # of them: it gives the median


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What a simulated step took, in seconds, with what of it was in forward, in backward and in the step's own call;
    of all, seconds waited for the drive, those of them in the step's own call, and bytes that it moved."""

    seconds: float
    forward_s: float
    backward_s: float
    step_s: float
    waited_s: float
    step_waited_s: float
    moved_bytes: float


class SimulatedPage:
    """`schedule.execute.Page` of one group, with a clock for a drive."""

    def __init__(self, index: int, group: Group, run: Simulation) -> None:
        self.index = index
        self.group = group
        self.name = group.name
        self.nbytes = group.page_bytes
        self.pins = 0
        self.stale = False  # a lazy update has its parameters
        self.present = not self.nbytes
        self._run = run
        self.moving: Moving | None = None
        """The fetch that brings it, until somebody has looked whether it is over."""

    @property
    def promised(self) -> bool:
        return self.stale

    @property
    def evictable(self) -> bool:
        return self.nbytes > 0 and self.present and not self.pins

    @property
    def left(self) -> float:
        """Bytes that have not arrived of a fetch on its way."""
        return 0.0 if self.moving is None else self.moving.left

    def begin_fetch(self, *, hint: bool = False) -> None:
        """Start to read it, or have its update hand it over. Raises MemoryError where it cannot come now."""
        if (self.stale and hint) or self._run.free() < self.nbytes:
            raise MemoryError(f"no room for {self.name}")
        self._run.taken += self.nbytes
        if self.stale:
            self._run.hand_over(self)
        else:
            self.moving = self._run.clock.move(self.nbytes, into_page=True)
        self.present = True

    def wait(self) -> None:
        """Until it is there."""
        if self.moving is not None:
            self._run.clock.wait(self.moving)
            self.moving = None

    def poll(self) -> bool:
        """It has arrived."""
        if self.moving is not None and self.moving.over:
            self.moving = None
        return self.moving is None

    def drop(self) -> None:
        """Let it go."""
        self.wait()
        self.present = False
        self._run.taken -= self.nbytes


class Simulation:
    """See the file's contract; it is the `schedule.execute.Room` of its pages."""

    def __init__(self, shape: Shape, costs: Costs) -> None:
        self.shape = shape
        self.clock = Clock(costs)
        self.taken = 0  # bytes of pages that are present or on their way
        self.meter = Meter()
        self.pages = [SimulatedPage(index, group, self) for index, group in enumerate(shape.groups)]
        self.executor = Executor(self.pages, self, self.meter, stale=False, ahead=shape.overlap != "none")
        self._costs = costs
        self._lazy: Updates | None = None
        self._early: Updates | None = None
        self._planned: dict[int, SimulatedPage] = {}  # groups whose update is begun in backward
        self._balance = Balance()
        self._handing: SimulatedPage | None = None

    # --- room ---

    def capacity(self) -> int:
        return self.shape.window_bytes

    def free(self) -> int:
        return self.shape.window_bytes - self.taken

    def observe(self) -> None:
        pass

    def coming(self) -> list[SimulatedPage]:
        """The pages on their way, in order."""
        queue = self.clock.backlog
        return sorted((page for page in self.pages if page.left), key=lambda page: queue.index(page.moving))

    # --- a step ---

    def step(self) -> StepTime:
        """A forward, a backward and an optimizer step."""
        clock, begun = self.clock, self.clock.now
        waited, moved = clock.waited, clock.moved
        for page in self.pages:
            self.forward(page)
        forward, waited_forward = clock.now, clock.waited
        for page in reversed(self.pages):
            self.backward(page)
        backward, waited_backward = clock.now, clock.waited
        self.update()
        seconds = clock.now - begun
        if self._planned:
            self._balance.took(seconds, waited_forward - waited, waited_backward - waited_forward)
            self._planned = {}
        return StepTime(
            seconds=seconds,
            forward_s=forward - begun,
            backward_s=backward - forward,
            step_s=clock.now - backward,
            waited_s=clock.waited - waited,
            step_waited_s=clock.waited - waited_backward,
            moved_bytes=clock.moved - moved,
        )

    def forward(self, page: SimulatedPage) -> None:
        """One group's forward: its parameters, its update if that waits for it, and what it computes."""
        page.pins += 1
        self.executor.use(page, Phase.FORWARD)
        self.bring_up_to_date(page)
        self.clock.work(page.group.forward_s + self._use_s(page))
        page.pins -= 1

    def backward(self, page: SimulatedPage) -> None:
        """One group's backward; its gradients arrive in equal parts of it, and after each what is early goes on."""
        group = page.group
        if group.in_backward:
            self.executor.touch(page, Phase.BACKWARD)
            self.clock.work(self._use_s(page))
        for number in range(max(group.gradients, 1)):
            self.clock.work(group.backward_s / max(group.gradients, 1))
            if self.shape.overlap == "backward":
                if number == group.gradients - 1:
                    self._queue(page)
                if self._early is not None:
                    self._early.pump()

    def update(self) -> None:
        """The optimizer's step: what of it is not lazy, or has not been done in backward."""
        self.clock.work(self._costs.step_s)
        kept, early = self._keep()
        trained = [page for page in self.pages if page.group.gradients and page.index not in kept]
        lazily = self.shape.overlap in ("forward", "backward")
        later = [page for page in trained if lazily and page.group.moved]
        run = Updates(self)
        for page in trained:
            if page not in later:
                run.add(page)
        run.finish()
        if later:
            self._lazy = early or Updates(self)
            for page in later:
                page.stale = True
                self._lazy.add(page)
            self._lazy.read_ahead()
        elif early is not None:
            self._lazy = early
        self.executor.stepped()

    def _use_s(self, page: SimulatedPage) -> float:
        return self._costs.use_s if page.nbytes else 0.0

    # --- lazy updates ---

    def hand_over(self, page: SimulatedPage) -> None:
        """Update a group into its page, which is not there yet."""
        self._handing = page
        self.bring_up_to_date(page)
        self._handing = None

    def bring_up_to_date(self, page: SimulatedPage) -> None:
        """The group's update is computed on return; behind the last one everything is written."""
        lazy = self._lazy
        if lazy is None or not page.stale:
            return
        while lazy.advance() is not page:
            pass
        if lazy.over:
            self._end_lazy()

    def computed(self, chunk: Chunk) -> None:
        """A chunk's bytes are there: update them."""
        costs = self._costs
        self.clock.work(chunk.elements * costs.update_s_per_element + (costs.chunk_s if chunk.takes_slot else 0.0))
        if chunk.page is self._handing:
            self.copied(chunk)

    def copied(self, chunk: Chunk) -> None:
        """Parameters of a chunk are copied in memory."""
        self.clock.work(chunk.part(chunk.page.nbytes) * self._costs.copy_s_per_byte)

    def _end_lazy(self) -> None:
        lazy, self._lazy = self._lazy, None
        if lazy is not None:
            lazy.finish()

    # --- early updates ---

    def _queue(self, page: SimulatedPage) -> None:
        """A group's last gradient is there: begin to update it, as far as the share goes."""
        group = page.group
        trained = sum(each.elements for each in self.shape.groups if each.gradients and each.state_bytes)
        planned = sum(each.group.elements for each in self._planned.values())
        share = self._balance.share if self.shape.early_share is None else self.shape.early_share
        if not group.state_bytes or not page.nbytes or planned + group.elements > share * trained:
            return
        if self._early is None:
            self._end_lazy()
            self._early = Updates(self)
        self._planned[page.index] = page
        self._early.add(page, beside=True)

    def _keep(self) -> tuple[set[int], Updates | None]:
        """The groups whose update has been computed, and what may still write some of it."""
        early, self._early = self._early, None
        if early is None:
            self._end_lazy()
            return set(), None
        whole = early.hand_over()
        for page in self._planned.values():
            if page.index in whole:
                self.executor.evict(page)
            else:
                early.settle(page)
        return whole, early


def predict(shape: Shape, costs: Costs) -> StepTime:
    """A steady training step: of the last ones of a simulated run, that of the median time."""
    run = Simulation(shape, costs)
    balanced = shape.overlap == "backward" and shape.early_share is None
    steps = [run.step() for _ in range(_BALANCED if balanced else _STEPS)][-_LAST:]
    middle = statistics.median_low(step.seconds for step in steps)
    return next(step for step in steps if step.seconds == middle)

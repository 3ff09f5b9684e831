"""What is simulated is what can be worked out by hand, gets no worse with more, and never beats the optimum."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.errors import ConfigError
from tiered.schedule.clock import Clock
from tiered.schedule.cost import LARGEST_CHUNK, Costs, Group, Overlap, Shape, staging
from tiered.schedule.optimum import gap
from tiered.schedule.simulate import Simulation, StepTime, predict

MB = 1e6
DRIVE = Costs(drive_bytes_per_s=1000 * MB, fetch_bytes_per_s=500 * MB)


def group(page: int = 100, states: int = 200, forward: float = 1.0, backward: float = 2.0, **more: Any) -> Group:
    """A group of `page` and `states` MB on the drive, of 25 million elements."""
    sizes = {"page_bytes": int(page * MB), "state_bytes": int(states * MB)}
    return Group(name="", elements=25_000_000, forward_s=forward, backward_s=backward, **sizes, **more)


def chain(groups: int, fitting: int, overlap: Overlap = "prefetch", **each: Any) -> Shape:
    """Equal groups, `fitting` of which fit, with staging for as many slots as there may be."""
    one = group(**each)
    slots, chunk = staging([one], 1 << 40)
    window = fitting * one.page_bytes
    return Shape(groups=(one,) * groups, window_bytes=window, slots=slots, chunk_elements=chunk, overlap=overlap)


def steady(shape: Shape, **costs: float) -> StepTime:
    return predict(shape, dataclasses.replace(DRIVE, **costs))


# --- by hand ---


@pytest.mark.parametrize("overlap", ["none", "prefetch", "forward", "backward"])
def test_in_memory_a_step_is_what_it_computes(overlap: Overlap) -> None:
    step = steady(chain(4, 4, overlap, page=0, states=0), update_s_per_element=1e-8, use_s=0.01, step_s=0.1)
    assert step.seconds == pytest.approx(4 * (1 + 2 + 0.25) + 0.1)
    assert step.waited_s == step.moved_bytes == 0


def test_what_uses_and_chunks_cost_is_added() -> None:
    shape = chain(2, 2, "none", forward=0, backward=0)
    chunks = 2 * -(-25_000_000 // shape.chunk_elements)
    step = steady(shape, use_s=0.01, chunk_s=0.02)
    assert step.seconds - step.waited_s == pytest.approx(4 * 0.01 + chunks * 0.02)


def test_what_stays_in_the_window_is_fetched_once_and_never_again() -> None:
    run = Simulation(chain(3, 3, gradients=0), DRIVE)
    assert run.step().moved_bytes == 300 * MB
    assert run.step().moved_bytes == 0


def test_without_overlap_every_fetch_is_waited_for() -> None:
    step = steady(chain(4, 1, "none", gradients=0))  # the last of a pass is the first of the next
    assert step.moved_bytes == 6 * 100 * MB
    assert step.seconds == pytest.approx(4 * 3.0 + 6 * 0.2)


def test_fetches_ahead_hide_under_longer_computing() -> None:
    step = steady(chain(6, 3, gradients=0))
    assert step.moved_bytes > 0
    assert step.seconds == pytest.approx(6 * 3.0)
    assert step.waited_s == pytest.approx(0)


def test_a_window_of_one_group_hides_nothing() -> None:
    ahead, on_demand = (steady(chain(4, 1, overlap, gradients=0)) for overlap in ("prefetch", "none"))
    assert ahead.seconds == pytest.approx(on_demand.seconds)


def test_a_step_that_the_drive_binds_takes_bytes_over_rate() -> None:
    step = steady(chain(4, 4, "none", forward=0, backward=0))  # parameters stay, and are written with the states
    assert step.moved_bytes == 4 * (200 + 300) * MB
    assert step.seconds == pytest.approx(4 * 0.5)


def test_updates_under_forward_hide_as_far_as_slots_go() -> None:
    at_once, beside = (steady(chain(6, 3, overlap)) for overlap in ("prefetch", "forward"))
    assert beside.step_s == pytest.approx(0)
    assert at_once.step_s > 2
    assert beside.seconds < at_once.seconds
    assert beside.moved_bytes <= at_once.moved_bytes  # an update hands its parameters over


def test_an_update_hands_over_what_forward_would_read() -> None:
    step = steady(chain(4, 1, "forward", forward=0, backward=0))
    updates, fetches = 4 * 600 - 100, 3 * 100  # the first is there from backward; the last stays for backward
    assert step.moved_bytes == (updates + fetches) * MB


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_updates_in_backward_go_as_far_as_their_share(share: float) -> None:
    shape = dataclasses.replace(chain(4, 2, "backward"), early_share=share)
    forward = steady(dataclasses.replace(shape, overlap="forward"))
    step = steady(shape)
    assert (step.moved_bytes > forward.moved_bytes) == (share > 0), "parameters of those in backward are read"
    assert step.seconds <= forward.seconds + 1e-9


def test_computing_is_stretched_by_what_moves_meanwhile() -> None:
    clock = Clock(dataclasses.replace(DRIVE, io_cpu_s_per_byte=5e-10))
    moving = clock.move(1000 * MB)
    clock.work(1.0)  # a second of bytes at half of the pace, then alone
    assert clock.now == pytest.approx(1.5)
    assert moving.over


def test_the_drive_is_slower_beside_computing() -> None:
    clock = Clock(dataclasses.replace(DRIVE, beside=0.5))
    moving = clock.move(1000 * MB)
    clock.work(1.0)
    clock.wait(moving)
    assert clock.now == pytest.approx(1.5)
    assert clock.waited == pytest.approx(0.5)


def test_transfers_are_over_in_the_order_in_which_they_came() -> None:
    clock = Clock(DRIVE)
    first, second = clock.move(100 * MB), clock.move(100 * MB, into_page=True)
    clock.wait(second)
    assert first.over
    assert clock.now == pytest.approx(0.1 + 0.2)


@pytest.mark.parametrize(
    ("room", "slots", "chunk"),
    [
        (1 << 40, 8, LARGEST_CHUNK),
        (4 * 24 << 20, 4, LARGEST_CHUNK),
        (3 * 12 << 20, 3, LARGEST_CHUNK // 2),
        (0, 3, 1 << 19),
    ],
)
def test_staging_takes_fewer_and_then_smaller_slots(room: int, slots: int, chunk: int) -> None:
    elements = 16 << 20
    one = Group(
        name="", elements=elements, page_bytes=4 * elements, state_bytes=8 * elements, forward_s=0, backward_s=0
    )
    assert staging([one], room) == (slots, chunk)


@pytest.mark.parametrize(
    "change",
    [{"drive_bytes_per_s": 0}, {"beside": 1.5}, {"step_s": -1}, {"use_s": math.nan}, {"io_cpu_s_per_byte": 1e-9}],
)
def test_impossible_costs_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(DRIVE, **change)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="window_bytes"):
        Shape(groups=(group(),), window_bytes=1)
    with pytest.raises(ConfigError, match="slots"):
        dataclasses.replace(chain(1, 1), slots=0)
    with pytest.raises(ConfigError, match="overlap"):
        dataclasses.replace(chain(1, 1), overlap="auto")
    with pytest.raises(ConfigError, match="6 or fewer"):
        gap(chain(7, 3, gradients=0), DRIVE)
    with pytest.raises(ConfigError, match="gradients"):
        gap(chain(2, 2), DRIVE)


# --- whatever the shape ---

SHAPES = st.builds(
    lambda sizes, fitting, overlap, spread: Shape(
        groups=tuple(group(size, 2 * size, spread * (1 + i % 3), 2 * spread) for i, size in enumerate(sizes)),
        window_bytes=int(max(sizes) * MB * fitting),
        slots=4,
        overlap=overlap,
    ),
    st.lists(st.integers(20, 200), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from(["none", "prefetch", "forward", "backward"]),
    st.floats(0.0, 0.5),
)


@settings(max_examples=40, deadline=None)
@given(SHAPES)
def test_a_step_takes_what_it_computes_and_what_it_moves_at_least(shape: Shape) -> None:
    step = steady(shape)
    computed = sum(each.forward_s + each.backward_s for each in shape.groups)
    assert step.seconds == pytest.approx(computed + step.waited_s)
    assert step.seconds == pytest.approx(step.forward_s + step.backward_s + step.step_s)
    if shape.overlap in ("none", "prefetch"):  # nothing of a step's states is left for the next
        assert step.moved_bytes / DRIVE.drive_bytes_per_s <= step.seconds + 1e-9


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.floats(1.0, 8.0))
def test_a_faster_drive_makes_no_step_slower(shape: Shape, factor: float) -> None:
    shape = dataclasses.replace(shape, early_share=0.5)
    rates = {"drive_bytes_per_s": factor * 1000 * MB, "fetch_bytes_per_s": factor * 500 * MB}
    assert steady(shape, **rates).seconds <= 1.1 * steady(shape).seconds + 1e-9


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.floats(1.0, 4.0))
def test_a_wider_window_makes_no_step_much_slower(shape: Shape, factor: float) -> None:
    shape = dataclasses.replace(shape, early_share=0.5)
    wider = dataclasses.replace(shape, window_bytes=int(factor * shape.window_bytes))
    assert steady(wider).seconds <= 1.1 * steady(shape).seconds + 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(20, 200), min_size=1, max_size=4),
    st.integers(1, 3),
    st.floats(0.01, 0.5),
    st.sampled_from([1.0, 0.7]),
)
def test_the_executor_is_never_better_than_the_optimum(
    sizes: list[int], fitting: int, spread: float, beside: float
) -> None:
    groups = tuple(group(size, 0, spread, 2 * spread, gradients=0) for size in sizes)
    shape = Shape(groups=groups, window_bytes=int(max(sizes) * MB * fitting))
    executed, best = gap(shape, dataclasses.replace(DRIVE, beside=beside, fetch_cpu_s_per_byte=3e-10))
    computed = 3 * spread * len(sizes)
    assert computed - 1e-6 <= best <= executed + 1e-6


def test_the_optimum_of_what_can_hide_is_what_is_computed() -> None:
    executed, best = gap(chain(5, 3, gradients=0), DRIVE, steps=2)
    assert executed == pytest.approx(best) == pytest.approx(2 * 5 * 3.0)

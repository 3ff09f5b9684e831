"""What makes steps faster is found out, kept, and looked at again; where work goes follows the waits."""

import random

import pytest

from tiered.schedule.choice import Balance, Choice


def run(choice: Choice, steps: int, without: float, with_it: float, noise: float = 0.0) -> list[bool]:
    draw = random.Random(1)
    ways = []
    for _ in range(steps):
        ways.append(choice.on)
        choice.took((with_it if choice.on else without) * (1 + noise * draw.random()), choice.on)
    return ways


@pytest.mark.parametrize(("without", "with_it", "expected"), [(1.0, 0.8, True), (0.8, 1.0, False), (1.0, 1.0, False)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_faster_way_is_taken_in_most_steps(without: float, with_it: float, expected: bool, noise: float) -> None:
    ways = run(Choice(), 400, without, with_it, noise)
    taken = sum(way == expected for way in ways[8:]) / len(ways[8:])
    assert taken > 0.9 if without != with_it else taken > 0.4


def test_both_ways_are_tried_first_and_the_other_again_now_and_then() -> None:
    ways = run(Choice(), 200, 1.0, 0.5)
    assert set(ways[:4]) == {False, True}
    assert 3 <= sum(not way for way in ways[8:]) <= 12


def test_a_machine_that_changes_is_followed() -> None:
    choice = Choice()
    run(choice, 50, 1.0, 0.5)
    assert run(choice, 150, 0.5, 1.0)[-20:].count(False) >= 18


def test_a_single_slow_step_decides_nothing() -> None:
    choice = Choice()
    run(choice, 20, 1.0, 0.7)
    choice.took(50.0, choice.on)
    assert run(choice, 8, 1.0, 0.7).count(True) >= 7


def test_what_is_always_or_never_wanted_is_not_tried() -> None:
    assert run(Choice(True), 50, 0.1, 1.0) == [True] * 50
    assert run(Choice(False), 50, 1.0, 0.1) == [False] * 50


def test_work_goes_where_less_is_waited_for() -> None:
    balance = Balance()
    first = balance.share
    balance.took(1.0, 0.3, 0.1)
    assert balance.share > first
    for _ in range(50):
        balance.took(1.0, 0.0, 0.3)
    assert balance.share == 0.0
    for _ in range(50):
        balance.took(1.0, 0.3, 0.0)
    assert balance.share == 1.0
    balance.took(1.0, 0.004, 0.009)
    assert balance.share == 1.0, "such waits are none"

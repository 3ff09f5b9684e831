"""What a trace predicts: the order it has seen, for training and evaluation apart, repaired where it changed."""

import itertools
import random
from collections.abc import Iterable

import pytest

from tiered.schedule.trace import Phase, Trace, Use

F, B, E = Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION


def uses(pages: Iterable[int], phase: Phase) -> list[Use]:
    return [Use(page, phase) for page in pages]


def step(layers: int) -> list[Use]:
    """One training step: forward up, backward down."""
    return uses(range(layers), F) + uses(reversed(range(layers)), B)


def watch(trace: Trace, seen: Iterable[Use]) -> None:
    for use in seen:
        trace.observe(use)


def predicted(trace: Trace, count: int) -> list[Use]:
    return list(itertools.islice(trace.predict(), count))


def missed(trace: Trace, seen: Iterable[Use]) -> int:
    """How many of the uses were not the one predicted just before."""
    misses = 0
    for use in seen:
        misses += predicted(trace, 1) != [use]
        trace.observe(use)
    return misses


def test_nothing_is_predicted_before_anything_was_seen_twice() -> None:
    trace = Trace()
    assert predicted(trace, 5) == []
    watch(trace, uses([3, 1, 2], F))
    assert predicted(trace, 5) == []


def test_one_pass_teaches_the_order_and_the_prediction_has_no_end() -> None:
    trace = Trace()
    watch(trace, step(5) + uses([0], F))
    assert predicted(trace, 40) == (step(5) * 5)[1:41]


def test_predicting_changes_nothing() -> None:
    trace = Trace()
    watch(trace, step(4) * 2)
    assert predicted(trace, 30) == predicted(trace, 30)


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_after_one_step_every_use_of_the_next_is_predicted(layers: int) -> None:
    trace = Trace()
    watch(trace, step(layers) + uses([0], F))
    assert missed(trace, (step(layers) * 3)[1:]) == 0


def test_a_page_used_twice_in_different_places_is_predicted_by_what_came_before() -> None:
    """A tied embedding: 0 comes before 1, and after 3."""
    trace = Trace()
    order = uses([0, 1, 2, 3, 0], F) + uses([0, 3, 2, 1, 0], B)
    watch(trace, order * 2)
    assert missed(trace, order * 2) == 0


def test_two_backwards_per_step_are_learnt_with_few_misses() -> None:
    trace = Trace()
    watch(trace, step(6) * 4)
    assert missed(trace, step(6) * 4) == 0


def test_evaluation_between_training_disturbs_neither() -> None:
    trace = Trace()
    evaluation = uses(range(6), E)
    watch(trace, step(6) + step(6) + evaluation + evaluation + step(6) + evaluation)
    misses = missed(trace, (step(6) + evaluation) * 3)
    assert misses <= 1, "at most the first use after an odd change of phase is unknown"
    assert predicted(trace, 1) != []


def test_an_order_of_evaluation_that_differs_leaves_training_predicted() -> None:
    trace = Trace()
    watch(trace, step(5) * 2 + uses([4, 2, 0], E))
    assert missed(trace, uses([0], F)) <= 1
    assert missed(trace, step(5)[1:]) == 0


def test_a_change_costs_misses_around_the_change_alone_and_only_once() -> None:
    trace = Trace()
    old = uses([0, 1, 2, 3, 4, 5, 6, 7], F)
    new = uses([0, 1, 2, 9, 4, 5, 6, 7], F)
    watch(trace, old * 3)
    assert missed(trace, new) <= 3
    assert missed(trace, new * 3) == 0
    assert missed(trace, old) <= 3


def test_two_alternating_orders_cost_misses_at_the_branch_alone() -> None:
    trace = Trace()
    left, right = uses([0, 1, 2, 3, 4], F), uses([0, 1, 7, 8, 3, 4], F)
    watch(trace, (left + right) * 2)
    assert missed(trace, (left + right) * 10) <= 20 + 10, "one a branch, and one where the branches meet"


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_is_survived_and_predictions_are_pages_that_were_seen(seed: int) -> None:
    draw = random.Random(seed)
    trace = Trace()
    seen = set()
    for _ in range(300):
        use = Use(draw.randrange(6), draw.choice(list(Phase)))
        seen.add(use.page)
        trace.observe(use)
        assert {expected.page for expected in predicted(trace, 20)} <= seen


@pytest.mark.parametrize("kind", ["one long pass", "many passes", "every order"])
def test_memory_is_bounded_whatever_is_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("LONGEST", 64), ("PASSES", 8), ("REMEMBERED", 256), ("TABLE", 128)):
        monkeypatch.setattr(f"tiered.schedule.trace.{name}", bound)
    draw, trace = random.Random(0), Trace()
    for number in range(3000):
        page = {"one long pass": number, "many passes": draw.choice([0, number]), "every order": draw.randrange(40)}[
            kind
        ]
        trace.observe(Use(page, F if kind != "every order" else draw.choice([F, B, E])))
    assert len(trace._now.uses) <= 64
    assert len(trace._passes) == len(trace._numbers) <= 8
    assert sum(len(each.uses) for each in trace._passes.values()) == trace._remembered <= 256
    assert len(trace._following) <= 128
    assert len(trace._successors._after_two) <= 128 >= len(trace._successors._after_one)
    assert len(trace._recent) <= 32


def test_after_something_new_what_was_expected_before_it_is_still_expected() -> None:
    trace = Trace()
    watch(trace, step(6) * 3 + uses([0, 1, 2, 9], F))
    assert predicted(trace, 3) == uses([3, 4, 5], F)
    watch(trace, uses([4], F))
    assert predicted(trace, 3) == uses([5], F) + uses([5, 4], B)


def test_observing_tells_whether_the_use_was_expected() -> None:
    trace = Trace()
    watch(trace, step(4) * 3)
    assert [trace.observe(use) for use in uses([0, 1, 3, 7, 2], F)] == [True, True, False, False, False]

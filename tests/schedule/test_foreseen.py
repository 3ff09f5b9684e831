"""How much of what models use is foreseen: hits as the executor counts them, over pages that only count.

Four of a dozen pages fit. Each case is what a model does: a changed order, a branch, an evaluation, layers left out,
steps that alternate, accumulation, generation.
"""

import random
from collections.abc import Iterable, Sequence

import pytest
from schedule.pages import Run

from tiered.schedule.trace import Phase, Use

F, B, E = Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION
STEP = Use(-1, Phase.STEP)
LAYERS, SPARE, FITTING = 12, 8, 4
EVERY = tuple(range(LAYERS))
Step = list[Use]


def train(*orders: Sequence[int]) -> Step:
    """A step of training: for each order a forward, and a backward in the other direction."""
    passes = [[*(Use(page, F) for page in order), *(Use(page, B) for page in reversed(order))] for order in orders]
    return [use for each in passes for use in each] + [STEP]


def evaluate(order: Iterable[int]) -> Step:
    return [Use(page, E) for page in order]


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(EVERY, LAYERS)


def rotated(by: int) -> tuple[int, ...]:
    return EVERY[by:] + EVERY[:by]


def without(*left_out: int) -> list[int]:
    return [layer for layer in EVERY if layer not in left_out]


class Training:
    """Steps, and the share of each one's uses that was foreseen."""

    def __init__(self) -> None:
        self._run = Run([10] * (LAYERS + SPARE), 10 * FITTING)

    def rate(self, *steps: Step) -> float:
        """Of all these steps together."""
        meter = self._run.meter
        before = meter.uses, meter.hits
        for use in (use for step in steps for use in step):
            if use == STEP:
                self._run.executor.stepped()
            else:
                self._run.use(use.page, use.phase)
        return (meter.hits - before[1]) / (meter.uses - before[0])

    @property
    def fetches(self) -> int:
        return self._run.fetches


@pytest.mark.parametrize("seed", range(3))
def test_a_new_order_is_foreseen_from_its_third_step_on(seed: int) -> None:
    training, new = Training(), train(shuffled(seed))
    training.rate(*[train(EVERY)] * 6)
    training.rate(new, new)
    assert training.rate(*[new] * 3) == 1


def test_a_branch_taken_for_good_costs_its_own_pages_alone() -> None:
    training, new = Training(), train([*EVERY[:4], 12, 13, *EVERY[6:]])
    training.rate(*[train(EVERY)] * 6)
    assert training.rate(new) >= 20 / 24, "two pages were never seen before; backward goes by forward"
    assert training.rate(new) >= 22 / 24
    assert training.rate(new, new) == 1


def test_a_branch_taken_once_costs_its_own_pages_alone() -> None:
    training = Training()
    training.rate(*[train(EVERY)] * 6)
    assert training.rate(train([*EVERY[:4], 12, 13, *EVERY[4:]])) >= 24 / 28
    assert training.rate(*[train(EVERY)] * 2) == 1


def test_an_evaluation_between_steps_costs_what_is_new_in_it_and_nothing_after_it() -> None:
    training = Training()
    training.rate(*[train(EVERY)] * 6)
    training.rate(evaluate(shuffled(1)))
    assert training.rate(train(EVERY), train(EVERY)) >= 47 / 48, "at most the turn back is a miss"
    assert training.rate(evaluate(shuffled(1))) >= 11 / 12, "at most the turn to it"


def test_an_evaluation_after_every_second_step_is_foreseen() -> None:
    training = Training()
    steps = [train(EVERY), train(EVERY) + evaluate(shuffled(1))]
    training.rate(*steps * 2)
    assert training.rate(*steps * 4) == 1


def test_layers_left_out_from_now_on_cost_nothing_and_neither_does_their_return() -> None:
    training, few = Training(), train(without(2, 5, 6, 10))
    training.rate(*[train(EVERY)] * 6)
    assert training.rate(*[few] * 3) >= 0.95
    assert training.rate(*[train(EVERY)] * 2) >= 0.8
    assert training.rate(*[train(EVERY)] * 4) >= 0.97, "a guess may go by what came after as many such steps before"


@pytest.mark.parametrize("seed", range(5))
def test_layers_left_out_at_random_are_mostly_foreseen_and_little_is_fetched_in_vain(seed: int) -> None:
    draw, training = random.Random(seed), Training()
    steps = [train([layer for layer in EVERY if draw.random() >= 0.2]) for _ in range(50)]
    training.rate(*steps[:10])
    before = training.fetches
    assert training.rate(*steps[10:]) >= 0.93
    assert training.fetches - before <= 0.95 * sum(len(step) for step in steps[10:])


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([train(EVERY), train(rotated(4))], id="two orders"),
        pytest.param([train(without(0, 4, 8)), train(without(1, 5, 9))], id="two masks"),
        pytest.param([train(EVERY), train(without(6))], id="one layer"),
        pytest.param([train(EVERY), train(rotated(4)), train(rotated(8))], id="three orders"),
        pytest.param([train(without(0, 4)), train(without(1, 5)), train(without(2, 6))], id="three masks"),
        pytest.param([train(EVERY), train(EVERY), train(shuffled(5))], id="two of one and one of another"),
        pytest.param([train(EVERY), evaluate(shuffled(2))], id="training and evaluation"),
        pytest.param([train(EVERY), train(EVERY, rotated(6))], id="one and two backwards"),
    ],
)
def test_steps_that_alternate_are_foreseen_once_each_was_seen_twice(steps: list[Step]) -> None:
    training = Training()
    training.rate(*steps * 2)
    assert training.rate(*steps) > 0.8
    assert training.rate(*steps * 4) == 1


def test_steps_that_alternate_are_remembered_over_a_time_of_others() -> None:
    training = Training()
    steps = [train(EVERY), train(rotated(4))]
    training.rate(*steps * 3)
    training.rate(*[train(shuffled(3))] * 5)
    assert training.rate(*steps * 3) > 0.8
    assert training.rate(*steps * 3) >= 0.97


def test_more_backwards_in_every_step_are_foreseen() -> None:
    training = Training()
    training.rate(train(EVERY))
    assert training.rate(*(train(*[EVERY] * count) for count in range(2, 9))) >= 0.95
    two = train(EVERY, rotated(6))
    training.rate(two, two)
    assert training.rate(*[two] * 3) == 1


def test_generation_repeats_one_order_and_is_foreseen_however_often() -> None:
    draw, training = random.Random(0), Training()
    steps = [train(EVERY) + evaluate(EVERY) * draw.randint(5, 20) for _ in range(8)]
    training.rate(*steps[:2])
    assert training.rate(*steps[2:]) >= 0.99


def test_a_backward_goes_by_its_forward_even_the_first_time() -> None:
    draw, training = random.Random(0), Training()
    training.rate(*(train(shuffled(seed)) for seed in range(3)))
    for _ in range(5):
        order = draw.sample(EVERY, LAYERS)
        training.rate([Use(page, F) for page in order])
        assert training.rate([*(Use(page, B) for page in reversed(order)), STEP]) == 1

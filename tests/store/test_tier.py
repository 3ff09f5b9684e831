"""A budget is never exceeded, by however many threads, and says what it would need."""

import random
import threading

import pytest

from tiered.errors import BudgetError
from tiered.store.tier import Budget, Tier


def test_a_charge_up_to_the_limit_is_taken_and_one_byte_more_is_refused_with_nothing_taken() -> None:
    budget = Budget(Tier.HOST, 100)
    budget.charge(60, "weights")
    budget.charge(40, "moments")
    with pytest.raises(BudgetError, match=r"moments needs 1 B of host memory, but only 0 B .* at least 101 bytes"):
        budget.charge(1, "moments")
    assert (budget.used, budget.free, budget.peak) == (100, 0, 100)
    budget.refund(60)
    assert (budget.used, budget.free, budget.peak) == (40, 60, 100)


def test_the_limit_that_a_refusal_names_is_enough() -> None:
    small = Budget(Tier.DEVICE, 1000)
    small.charge(700, "kept")
    with pytest.raises(BudgetError, match="device_budget to at least 1200 bytes"):
        small.charge(500, "wanted")
    enough = Budget(Tier.DEVICE, 1200)
    enough.charge(700, "kept")
    enough.charge(500, "wanted")


def test_a_refusal_is_a_memory_error_too() -> None:
    with pytest.raises(MemoryError):
        Budget(Tier.HOST, 0).charge(1, "anything")


def test_charges_of_many_threads_never_pass_the_limit_and_all_come_back() -> None:
    budget = Budget(Tier.HOST, 1000)
    failures: list[str] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            nbytes = draw.randint(1, 400)
            try:
                budget.charge(nbytes, "a thread")
            except BudgetError:
                continue
            if budget.used > budget.limit:
                failures.append(f"{budget.used} used of {budget.limit}")
            budget.refund(nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert budget.used == 0
    assert 400 <= budget.peak <= 1000

"""Placement and eviction decide by sizes alone; random cases are checked against what any right answer must satisfy."""

import random
import re

import pytest

from tiered.errors import ConfigError
from tiered.store.policy import Candidate, Demand, place, victims
from tiered.store.tier import Tier

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
CHOICES = [(H,), (D,), (D, H), (D, H, N), (H, N), (N,)]


def test_the_fastest_tier_is_filled_first_and_what_does_not_fit_goes_down() -> None:
    demands = [Demand(group, "param", 10, (D, H, N)) for group in range(5)]
    homes = place(demands, {D: 25, H: 10})
    assert [homes[group, "param"] for group in range(5)] == [D, D, H, N, N]


def test_a_small_block_still_uses_the_room_a_large_one_could_not() -> None:
    homes = place([Demand(0, "param", 30, (H, N)), Demand(1, "param", 5, (H, N))], {H: 10})
    assert homes == {(0, "param"): N, (1, "param"): H}


def test_what_may_live_in_one_place_only_is_not_crowded_out_by_what_has_a_choice() -> None:
    demands = [Demand(0, "grad", 10, (H, N)), Demand(0, "exp_avg", 10, (H,))]
    assert place(demands, {H: 10}) == {(0, "grad"): N, (0, "exp_avg"): H}


def test_a_refusal_names_the_block_the_budget_and_bytes_that_work() -> None:
    demands = [Demand(group, kind, 10, (H,)) for group in range(3) for kind in ("param", "grad")]
    with pytest.raises(ConfigError, match=r"host_budget leaves 45 bytes .* 60 bytes .*of group.*at least 15 bytes"):
        place(demands, {H: 45})
    place(demands, {H: 60})


def test_placement_changes_nothing_it_was_given() -> None:
    demands, free = [Demand(0, "param", 10, (H, N))], {H: 10, D: 3}
    place(demands, free)
    assert (demands, free) == ([Demand(0, "param", 10, (H, N))], {H: 10, D: 3})


@pytest.mark.parametrize("seed", range(4))
def test_random_placements_fit_allow_and_leave_nothing_out_and_refusals_name_what_works(seed: int) -> None:
    draw = random.Random(seed)
    refused = 0
    for _ in range(200):
        demands = [
            Demand(group, "param", draw.choice([0, 1, 7, 20, 50]), draw.choice(CHOICES))
            for group in range(draw.randint(0, 8))
        ]
        free = {D: draw.randint(0, 100), H: draw.randint(0, 100)}
        while True:
            try:
                homes = place(demands, free)
                break
            except ConfigError as error:
                message = str(error)
            refused += 1
            found = re.search(r"(host|device)_budget by at least (\d+) bytes", message)
            assert found, message
            assert int(found[2]) > 0, f"a raise by nothing: {message}"
            free[Tier(found[1])] += int(found[2])
        assert homes.keys() == {(d.group, d.kind) for d in demands}
        assert all(homes[d.group, d.kind] in d.tiers for d in demands)
        for tier in (D, H):
            assert sum(d.nbytes for d in demands if homes[d.group, d.kind] is tier) <= free[tier]
    assert refused > 20, "the cases were too easy"


@pytest.mark.parametrize("seed", range(3))
def test_random_victims_free_enough_take_the_furthest_and_none_too_many(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        candidates = [Candidate(key, draw.randint(1, 30), draw.randint(0, 9)) for key in range(draw.randint(0, 8))]
        need = draw.randint(-5, 120)
        chosen = victims(candidates, need)
        if sum(c.nbytes for c in candidates) < need:
            assert chosen is None
            continue
        assert chosen is not None
        taken = [c for c in candidates if c.key in chosen]
        kept = [c for c in candidates if c.key not in chosen]
        assert len(taken) == len(chosen)
        assert sum(c.nbytes for c in taken) >= need
        assert not taken or sum(c.nbytes for c in taken) - min(c.nbytes for c in taken if c.key == chosen[-1]) < need
        assert all(t.next_use >= k.next_use for t in taken for k in kept)

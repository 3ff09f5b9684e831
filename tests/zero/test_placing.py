"""What place_groups gives fits the budgets; what it refuses names bytes that then fit. Pure arithmetic, no model."""

import itertools
import random
import re
from typing import Any

import pytest

from tiered.config import Config
from tiered.device.memory import page_ceil
from tiered.errors import ConfigError
from tiered.store.tier import Tier
from tiered.zero.placing import GroupSizes, Placement, place_groups, slot_bytes

PAGE = 4096


def group(index: int, numel: int, *, trains: bool = True, itemsize: int = 4) -> GroupSizes:
    """One rank's group of `numel` elements in `itemsize` bytes."""
    shard = {"param": numel * itemsize}
    if trains:
        shard |= {"grad": numel * itemsize, "exp_avg": numel * 4, "exp_avg_sq": numel * 4}
        if itemsize < 4:
            shard["master"] = numel * 4
    return GroupSizes(index, numel * itemsize, shard, numel)


def placed(
    groups: list[GroupSizes], host: int, *, device: str = "cpu", paths: list[list[int]] | None = None, **settings: Any
) -> Placement:
    found = paths if paths is not None else [[g.index] for g in groups]
    in_place, ranks = settings.pop("in_place", device == "cpu"), settings.pop("ranks", 1)
    config = Config(device=device, nvme=settings.pop("nvme", "/swap"), **settings)
    return place_groups(groups, found, config, host, in_place=in_place, apart=device != "cpu", ranks=ranks)


def tier_bytes(groups: list[GroupSizes], placement: Placement, tier: Tier) -> int:
    return sum(
        page_ceil(nbytes) for g in groups for kind, nbytes in g.shard.items() if placement.homes[g.index, kind] is tier
    )


SIX = [group(index, 10_000) for index in range(6)]
GIB = 1 << 30


def test_with_room_everything_lives_on_the_host_and_nothing_on_a_drive() -> None:
    placement = placed(SIX, GIB)
    assert set(placement.homes.values()) == {Tier.HOST}
    assert placement.homes.keys() == {(g.index, kind) for g in SIX for kind in g.shard}


def test_tiers_that_are_asked_for_are_kept() -> None:
    placement = placed(SIX, GIB, param_tier="nvme", optimizer_tier="nvme")
    assert all(placement.homes[g.index, kind] is Tier.NVME for g in SIX for kind in ("param", "exp_avg", "exp_avg_sq"))
    placement = placed(SIX, GIB, param_tier="host", optimizer_tier="nvme")
    assert {placement.homes[g.index, "param"] for g in SIX} == {Tier.HOST}


def test_parameters_take_the_room_before_optimizer_states() -> None:
    placement = placed(SIX, 900 << 10)
    kinds = {kind: sum(placement.homes[g.index, kind] is Tier.HOST for g in SIX) for kind in SIX[0].shard}
    assert kinds["param"] == 6
    assert kinds["exp_avg_sq"] < 6


def test_a_frozen_group_has_a_parameter_block_alone() -> None:
    groups = [group(0, 1000, trains=False), group(1, 1000)]
    assert [kind for index, kind in placed(groups, GIB).homes if index == 0] == ["param"]


def test_without_a_device_budget_a_cpu_run_gets_a_window_of_the_three_largest() -> None:
    groups = [group(index, numel) for index, numel in enumerate((1000, 5000, 3000))]
    assert placed(groups, GIB, param_tier="nvme").device_limit == 3 * page_ceil(20_000)


def test_the_window_is_the_largest_sum_of_groups_that_are_inside_each_other() -> None:
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [4], [5, 5]]
    need = 3 * page_ceil(40_000)
    placement = placed(SIX, GIB, param_tier="nvme", paths=paths, device_budget=need)
    assert placement.device_limit == need
    with pytest.raises(ConfigError, match=rf"device_budget={need - 1} .*at least {need}, or make groups smaller"):
        placed(SIX, GIB, param_tier="nvme", paths=paths, device_budget=need - 1)


def test_on_a_device_of_its_own_memory_only_what_was_told_to_stays_for_good() -> None:
    one = page_ceil(40_000)
    for tier in ("auto", "host", "nvme"):
        assert placed(SIX, GIB, device="emulated", device_budget=6 * one, param_tier=tier).sticky == frozenset()
    with pytest.raises(ConfigError, match=f"at least {one},"):
        placed(SIX, GIB, device="emulated", device_budget=one - 1)


def test_states_on_the_device_take_their_whole_group_there() -> None:
    mixed = [group(0, 10_000), group(1, 10_000, trains=False), group(2, 10_000, itemsize=2)]
    states = [page_ceil(n) for g in (mixed[0], mixed[2]) for n in g.shard.values()]
    need = sum(states) + page_ceil(40_000)  # and a window for the one that moves
    placement = placed(mixed, GIB, device="emulated", optimizer_tier="device", device_budget=need)
    assert {placement.homes[0, kind] for kind in mixed[0].shard} == {Tier.DEVICE}
    assert {placement.homes[2, kind] for kind in mixed[2].shard} == {Tier.DEVICE}
    assert placement.homes[1, "param"] is Tier.HOST
    assert placement.device_limit == need
    for short in (need - 1, sum(states) - 1, 1):
        with pytest.raises(ConfigError, match=rf"device_budget={short} .*at least {need}"):
            placed(mixed, GIB, device="emulated", optimizer_tier="device", device_budget=short)


@pytest.mark.parametrize("how", [{"ranks": 2}, {"param_tier": "host"}, {"param_tier": "nvme", "nvme": "/swap"}])
def test_states_are_on_the_device_though_their_group_moves(how: dict[str, Any]) -> None:
    mixed = [group(0, 10_000), group(1, 10_000, trains=False), group(2, 10_000, itemsize=2)]
    states = {
        (g.index, kind): page_ceil(n) for g in mixed for kind, n in g.shard.items() if kind not in ("param", "grad")
    }
    need = sum(states.values()) + page_ceil(40_000)  # and a window for the largest
    placement = placed(mixed, GIB, device="emulated", optimizer_tier="device", device_budget=need, **how)
    assert {key for key, home in placement.homes.items() if home is Tier.DEVICE} == states.keys()
    assert placement.device_limit == need
    with pytest.raises(ConfigError, match=rf"device_budget={need - 1} .*at least {need}"):
        placed(mixed, GIB, device="emulated", optimizer_tier="device", device_budget=need - 1, **how)


def test_a_device_without_memory_of_its_own_has_no_states_beside_what_moves() -> None:
    homes = placed(SIX, GIB, device="cpu", optimizer_tier="device", ranks=2, in_place=False).homes
    assert set(homes.values()) == {Tier.HOST}


def test_without_a_budget_what_the_device_has_free_is_the_budget() -> None:
    found = [[g.index] for g in SIX]
    config = Config(device="emulated")
    assert place_groups(SIX, found, config, GIB, in_place=False, free=1 << 20).device_limit == 1 << 20


def test_a_device_tier_that_does_not_hold_every_parameter_is_refused_with_the_bytes() -> None:
    need = 6 * page_ceil(40_000)
    with pytest.raises(ConfigError, match=rf"device_budget={need - 1} .*{need} bytes"):
        placed(SIX, GIB, device="emulated", param_tier="device", device_budget=need - 1)
    assert placed(SIX, GIB, device="emulated", param_tier="device", device_budget=need).sticky == frozenset(range(6))


def test_a_slot_is_the_pages_of_every_kind_for_one_chunk() -> None:
    shard = group(0, 10_000).shard
    assert slot_bytes(shard, 10_000, 1024) == 4 * PAGE
    assert slot_bytes(shard, 10_000, 1025) == 8 * PAGE
    assert slot_bytes(shard, 10_000, 1 << 20) == 4 * page_ceil(40_000)
    assert slot_bytes({"param": 0}, 0, 1024) == 0


def followed(message: str, budgets: dict[str, int]) -> None:
    """Changes the budget that a refusal names to the bytes it names."""
    field = re.search(r"(host|device)_budget", message)
    assert field, message
    if by := re.search(r"_budget by at least (-?\d+) bytes", message):
        wanted = budgets[field[0]] + int(by[1])
    else:
        number = re.search(r"_budget to at least (\d+)", message) or re.search(r"takes? (\d+) bytes", message)
        assert number, message
        wanted = int(number[1])
    assert wanted > budgets[field[0]], f"no more than was given: {message}"
    budgets[field[0]] = wanted


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("seed", range(3))
def test_random_placements_fit_and_each_budget_is_refused_once_at_most(seed: int, device: str) -> None:
    draw = random.Random(seed)
    tiers = list(itertools.product(("auto", "device", "host", "nvme"), ("auto", "host", "nvme")))
    refusals = 0
    for number in range(60):
        param, optimizer = tiers[number % len(tiers)]
        drive = "/swap" if "nvme" in (param, optimizer) or draw.random() < 0.6 else None
        groups = [
            group(index, 32 * draw.randint(1, 40_000), trains=draw.random() < 0.8, itemsize=draw.choice([2, 4]))
            for index in range(draw.randint(1, 7))
        ]
        paths = [[0, g.index] for g in groups]
        budgets = {"host_budget": draw.randint(1, 8 << 20), "device_budget": draw.randint(1, 8 << 20)}
        said: list[str] = []
        while True:
            try:
                placement = placed(
                    groups, budgets["host_budget"], device=device, paths=paths, nvme=drive, param_tier=param,
                    optimizer_tier=optimizer, device_budget=budgets["device_budget"],
                )  # fmt: skip
                break
            except ConfigError as error:
                said.append(str(error))
                followed(said[-1], budgets)
                fields = [re.search(r"(host|device)_budget", message)[0] for message in said]  # type: ignore[index]
                assert len(set(fields)) == len(fields), f"the first number did not work: {said}"
        refusals += len(said)
        assert placement.homes.keys() == {(g.index, kind) for g in groups for kind in g.shard}
        assert tier_bytes(groups, placement, Tier.HOST) <= budgets["host_budget"]
        assert drive or Tier.NVME not in placement.homes.values()
        moving = [
            g for g in groups
            if g.index not in placement.sticky and (device != "cpu" or placement.homes[g.index, "param"] is Tier.NVME)
        ]  # fmt: skip
        stays = sum(page_ceil(g.gathered) for g in groups if g.index in placement.sticky)
        window = max((sum(page_ceil(g.gathered) for g in moving if g.index in path) for path in paths), default=0)
        assert stays + window <= placement.device_limit <= budgets["device_budget"]
    assert refusals > 10, "the cases were too easy"

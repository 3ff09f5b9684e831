"""What all ranks conclude from what each says of itself: every rule, and the same conclusion on every rank."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tiered.zero.agreement import COMPUTING_FACTOR, Call, Conclusion, Flag, Header, conclude, decode, describe, encode

TIMEOUT_S = 30.0
LATE_S = TIMEOUT_S + 1
IDLE = Header(Call.NONE, 0, False, False, 0.0, 0.0, "forward 3", b"\0\0\0")
NOTHING = Conclusion((), (), (), False, False, None)


def header(*flags: tuple[int, Flag], **said: Any) -> Header:
    """Of a rank that is idle but for what is `said`; `flags` by group."""
    by_group = bytearray(3)
    for group, flag in flags:
        by_group[group] |= flag
    return dataclasses.replace(IDLE, flags=bytes(by_group), **said)


def concluded(*headers: Header) -> Conclusion:
    return conclude(headers, TIMEOUT_S)


def want(*groups: int, **said: Any) -> Header:
    return header(*((group, Flag.WANT) for group in groups), **said)


def step(**said: Any) -> Header:
    return header(**{"call": Call.STEP, "waited_s": 0.1, **said})


# --- what is done ---


def test_where_nobody_says_anything_nothing_is_done() -> None:
    assert concluded(IDLE, IDLE, IDLE) == NOTHING


def test_a_group_is_gathered_for_the_ranks_that_want_it_whatever_the_others_do() -> None:
    found = concluded(want(0, 2), IDLE, want(2))
    assert found == dataclasses.replace(NOTHING, gathers=((0, (0,)), (2, (0, 2))))
    assert concluded(step(), want(1)).gathers == ((1, (1,)),), "a rank that waits in a call gives out its shards"


@pytest.mark.parametrize("closed", [0, 1])
def test_nothing_is_gathered_while_any_rank_is_closed(closed: int) -> None:
    headers = [want(0), want(0)]
    headers[closed] = dataclasses.replace(headers[closed], closed=True)
    assert concluded(*headers) == NOTHING


@pytest.mark.parametrize(("flag", "field"), [(Flag.GRADIENT, "gradients"), (Flag.VALUES, "values")])
def test_what_is_offered_is_done_for_the_groups_that_all_offer(flag: Flag, field: str) -> None:
    first, second = header((0, flag), (1, flag)), header((1, flag), (2, flag))
    assert concluded(first, second) == dataclasses.replace(NOTHING, **{field: (1,)})
    assert concluded(first, second, IDLE) == NOTHING


def test_values_are_exchanged_while_ranks_are_closed() -> None:
    offering = header((0, Flag.VALUES), (1, Flag.GRADIENT), closed=True)
    assert concluded(offering, offering) == dataclasses.replace(NOTHING, gradients=(1,), values=(0,))


def test_one_kind_of_a_group_says_nothing_of_another() -> None:
    assert concluded(header((0, Flag.GRADIENT)), header((0, Flag.VALUES))) == NOTHING
    everything = header((0, Flag.GRADIENT), (0, Flag.VALUES), (0, Flag.WANT))
    assert concluded(everything, everything) == Conclusion(((0, (0, 1)),), (0,), (0,), False, False, None)


def test_a_call_is_granted_once_all_have_made_it() -> None:
    assert not concluded(step(), step(), IDLE).granted
    assert concluded(step(), step(), step()).granted


@pytest.mark.parametrize("other", [{"call": Call.VALUES}, {"detail": 7}])
def test_different_calls_are_a_disagreement_at_once(other: dict[str, Any]) -> None:
    differing = dataclasses.replace(step(), doing="reading 'weight'", **other)
    found = concluded(step(), differing, step())
    assert not found.granted
    assert found.disagreement is not None
    assert found.disagreement.startswith("the ranks wait for different things: rank 0: waits 0 s in forward 3; rank 1:")
    assert "rank 1: waits 0 s in reading 'weight'; rank 2:" in found.disagreement
    assert concluded(step(), differing, IDLE) == NOTHING, "the third may still make either call"


def test_who_waits_for_memory_that_gradients_hold_is_refused_once_nobody_else_can_move() -> None:
    short = step(call=Call.ROOM)
    refused = dataclasses.replace(NOTHING, refused=True)
    assert concluded(short, step(), short) == refused
    assert concluded(short, short) == refused
    assert concluded(short, IDLE) == NOTHING, "the other may still offer what the first waits for"
    offering = header((0, Flag.GRADIENT), call=Call.ROOM)
    assert concluded(offering, offering) == dataclasses.replace(NOTHING, gradients=(0,)), "there is memory after it"
    wanting = header((1, Flag.WANT), call=Call.ROOM)
    assert concluded(wanting, step()) == dataclasses.replace(NOTHING, gathers=((1, (0,)),))


# --- who is waited for too long ---


def test_nobody_is_overdue_before_the_limit_or_where_nobody_waits() -> None:
    waiting = step(doing="step()")
    assert (
        concluded(dataclasses.replace(waiting, waited_s=TIMEOUT_S), dataclasses.replace(IDLE, quiet_s=1e9)) == NOTHING
    )
    assert concluded(IDLE, dataclasses.replace(IDLE, quiet_s=1e9)) == NOTHING


def test_a_rank_that_is_waited_for_and_makes_no_call_is_named() -> None:
    late = header(quiet_s=LATE_S, doing="forward 9")
    found = concluded(step(), late, dataclasses.replace(step(), waited_s=LATE_S)).disagreement
    assert found is not None
    assert found.startswith("ranks have waited 31 s for rank 1, which made no call (rank_timeout_s=30): rank 0: waits")
    assert "; rank 1: 31 s ago it was in forward 9; rank 2: waits 31 s in" in found


def test_a_rank_that_waits_itself_is_not_overdue_however_long_it_has_made_no_call() -> None:
    waiting = dataclasses.replace(step(), waited_s=LATE_S, quiet_s=LATE_S)
    assert concluded(waiting, header(quiet_s=1.0)) == NOTHING


def test_a_rank_that_makes_calls_is_not_overdue_however_long_others_wait() -> None:
    waiting = dataclasses.replace(step(), waited_s=100 * LATE_S)
    assert concluded(waiting, header(quiet_s=TIMEOUT_S)) == NOTHING
    assert concluded(waiting, header(quiet_s=LATE_S)) != NOTHING


def test_a_rank_that_computes_has_ten_times_as_long() -> None:
    waiting = dataclasses.replace(step(), waited_s=100 * LATE_S)
    assert COMPUTING_FACTOR == 10
    assert concluded(waiting, header(quiet_s=10 * TIMEOUT_S, computing=True)) == NOTHING
    found = concluded(waiting, header(quiet_s=10 * TIMEOUT_S + 1, computing=True)).disagreement
    assert found is not None
    assert "for rank 1, which made no call" in found
    assert "rank 1: is inside forward 3" in found


def test_ranks_that_all_wait_for_what_none_gives_say_so() -> None:
    offering = [header((rank, Flag.GRADIENT), waited_s=LATE_S) for rank in range(2)]
    found = concluded(*offering).disagreement
    assert found is not None
    assert found.startswith("the ranks have waited 31 s for each other: rank 0: waits 31 s in")
    assert concluded(offering[0], dataclasses.replace(offering[1], waited_s=0.1, quiet_s=LATE_S)).disagreement, (
        "it is enough that one has waited so long"
    )


@pytest.mark.parametrize(
    "progress",
    [
        (want(0), IDLE),
        (header((0, Flag.GRADIENT)), header((0, Flag.GRADIENT))),
        (header((0, Flag.VALUES)), header((0, Flag.VALUES))),
        (step(), step()),
    ],
)
def test_nobody_is_overdue_in_a_round_that_does_something(progress: Sequence[Header]) -> None:
    late = [dataclasses.replace(each, waited_s=LATE_S, quiet_s=1e9) for each in progress]
    assert concluded(*late).disagreement is None


# --- on every rank ---


def random_headers(chance: random.Random) -> list[Header]:
    times = (0.0, 0.5, TIMEOUT_S, LATE_S, 20 * LATE_S)
    return [
        Header(
            call=Call(chance.choice([0, 0, 1, 2])),
            detail=chance.choice([0, 0, 0, -(1 << 40)]),
            closed=chance.random() < 0.2,
            computing=chance.random() < 0.5,
            waited_s=chance.choice(times),
            quiet_s=chance.choice(times),
            doing=f"call {chance.randrange(3)} of 'größe'",
            flags=bytes(chance.choice([0, 0, 1, 2, 4, 7]) for _ in range(3)),
        )
        for _ in range(chance.choice([2, 3]))
    ]


def test_every_rank_concludes_the_same_from_what_has_been_sent() -> None:
    chance, kinds = random.Random(0), set()
    for _ in range(2000):
        headers = random_headers(chance)
        rows = torch.stack([encode(each) for each in headers])
        received = [[decode(row) for row in rows.clone()] for _ in headers]  # on each rank
        assert all(each == headers for each in received)
        found = [conclude(each, TIMEOUT_S) for each in received]
        assert all(each == found[0] for each in found)
        assert found[0].disagreement is None or not found[0].granted
        if found[0].disagreement is not None:
            assert describe(headers) in found[0].disagreement
            assert all(f"rank {rank}: " in found[0].disagreement for rank in range(len(headers)))
        parts = found[0].gathers, found[0].gradients, found[0].values, found[0].granted, found[0].disagreement
        kinds.add(tuple(map(bool, parts)))
    assert len(kinds) > 12, "of few kinds"


def test_a_header_is_as_long_whatever_it_says_and_comes_back_as_it_was() -> None:
    one = Header(Call.GATHER, (1 << 63) - 1, True, True, 1.25, 1e-9, "", b"\1\2\4")
    assert decode(encode(one)) == one
    long = dataclasses.replace(one, doing="ä" * 300)
    assert encode(long).shape == encode(one).shape
    assert decode(encode(long)).doing == "ä" * 100
    assert decode(encode(dataclasses.replace(one, doing="." + "ä" * 300))).doing == "." + "ä" * 99, "cut in a letter"

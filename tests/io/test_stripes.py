"""Stripes and weights: where pieces lie, in what shares, and how weights come from speeds and from room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.errors import ConfigError
from tiered.io.drive import BLOCK
from tiered.io.extent import Stripes
from tiered.io.weights import MOST, checked, cut, reached, rounded

PIECE = 3 * BLOCK
WEIGHTS = st.lists(st.integers(0, 16), min_size=1, max_size=5).filter(any).map(tuple)


@st.composite
def stripes(draw: st.DrawFn) -> Stripes:
    weights = draw(WEIGHTS)
    return Stripes(draw(st.integers(0, 150 * PIECE)), PIECE, weights, draw(st.integers(0, sum(weights) - 1)))


@given(st.integers(0, 40 * PIECE), st.integers(1, 6), st.integers(0, 5))
def test_with_equal_weights_pieces_are_dealt_in_turn(nbytes: int, drives: int, first: int) -> None:
    first %= drives
    laid = Stripes(nbytes, PIECE, (1,) * drives, first)
    for piece in range(laid.pieces):
        assert laid.place(piece) == ((first + piece) % drives, piece // drives * PIECE)
        assert Stripes(nbytes, PIECE, (3,) * drives, first).place(piece) == laid.place(piece)


@settings(deadline=None)
@given(stripes())
def test_every_piece_has_bytes_of_its_own_and_ranges_have_no_gap(laid: Stripes) -> None:
    taken = [0] * len(laid.weights)
    for piece in range(laid.pieces):
        drive, offset = laid.place(piece)
        assert laid.weights[drive] > 0
        assert offset == taken[drive], "pieces of a drive follow each other"
        taken[drive] += laid.size(piece)
    assert sum(taken) == laid.nbytes
    assert [laid.span(drive) for drive in range(len(taken))] == [-(-nbytes // BLOCK) * BLOCK for nbytes in taken]


@settings(deadline=None)
@given(stripes(), st.data())
def test_any_window_of_pieces_is_shared_in_proportion(laid: Stripes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, laid.pieces))
    stop = data.draw(st.integers(start, laid.pieces))
    found = np.zeros(len(laid.weights), int)
    for piece in range(start, stop):
        found[laid.place(piece)[0]] += 1
    shares = (stop - start) * np.array(laid.weights) / sum(laid.weights)
    assert (abs(found - shares) < 2).all()


SPEEDS = st.lists(st.floats(1e6, 1e10), min_size=2, max_size=6).map(tuple)


@given(SPEEDS)
def test_weights_reach_nine_tenths_of_the_sum_of_the_drives_in_use(speeds: tuple[float, ...]) -> None:
    weights = rounded(speeds)
    used = [speed if weight else 0.0 for speed, weight in zip(speeds, weights, strict=True)]
    assert reached(weights, used) >= 0.87
    if len(speeds) == 2:
        assert reached(weights, used) >= 0.9
    assert all(weight > 0 or speed < max(speeds) / 16 for speed, weight in zip(speeds, weights, strict=True))
    assert checked(weights, len(speeds)) == weights


@pytest.mark.parametrize(
    ("speeds", "weights"),
    [
        ((2.0, 2.0), (1, 1)),
        ((2.0, 2.29), (1, 1)),
        ((3e9, 2.7e9, 3.1e9), (1, 1, 1)),
        ((3.0, 1.0), (3, 1)),
        ((3.1, 0.98), (3, 1)),
        ((1.0, 2.0, 1.95), (1, 2, 2)),
        ((7.0, 3.0), (5, 2)),
        ((5.0, 5.0, 0.2), (1, 1, 0)),
    ],
)
def test_speeds_become_the_smallest_weights_that_serve(speeds: tuple[float, ...], weights: tuple[int, ...]) -> None:
    assert rounded(speeds) == weights


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 10**6)), min_size=2, max_size=5).filter(
        lambda pairs: any(weight for weight, _ in pairs)
    ),
    st.integers(1, 10**6),
)
def test_cut_weights_fit_the_room_there_is(pairs: list[tuple[int, int]], nbytes: int) -> None:
    weights, rooms = tuple(zip(*pairs, strict=True))
    found = cut(weights, rooms, nbytes)
    if found is None:
        assert sum(rooms) * 0.95 < nbytes + len(rooms)
        return
    shares = np.array(found) / sum(found) * nbytes
    step = nbytes / sum(found)
    assert (shares <= np.array(rooms) + step).all()
    assert checked(found, len(rooms)) == found
    if all(nbytes * weight / sum(weights) <= room for weight, room in pairs):
        assert reached(found, [float(weight) for weight in weights]) > 0.6, "nothing was to be cut"


def test_a_small_fast_drive_gives_what_it_has_and_one_left_out_helps_last() -> None:
    assert cut((3, 1), (100, 10_000), 1000) == (3, 29)
    assert cut((1, 0), (100, 10_000), 1000) == (3, 29)
    assert cut((1, 1, 0), (300, 10_000, 10_000), 1000)[2] == 0
    assert cut((1, 1), (300, 300), 1000) is None


@pytest.mark.parametrize("weights", [(), (1,), (0, 0), (1, -1), (1, 2.0), (True, 1), (MOST, 1), (2**70, 1), "11", None])
def test_absurd_weights_are_refused_by_name(weights: object) -> None:
    with pytest.raises(ConfigError, match="weights"):
        checked(weights, 2)

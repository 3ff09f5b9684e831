"""Drives of different speeds: pieces are shared in proportion, wherever the weights are from, and bytes come back.

How long drives take is counted in their own time, bytes by speed, and never by this machine's clock, which only the
measuring of speeds has to do with.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from bad_drives import Error, bad_drives
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from throttle import Throttle

from tiered.errors import ConfigError, CorruptDataError, SwapFullError
from tiered.io import Extent, SwapSpace, probe, swapfile
from tiered.io.commit import Identity, decode, encode
from tiered.io.drive import Drive
from tiered.io.generations import Generations
from tiered.io.look import look
from tiered.io.weights import reached

PIECE = 4096
WHO = Identity("model", "layout", "in words")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for folder in made:
        folder.mkdir()
    return made


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    st.lists(st.integers(1, 40 * PIECE), min_size=1, max_size=4),
    st.data(),
)
def test_bytes_come_back_for_any_weights_sizes_and_parts(
    mode: str, tmp_path: Path, weights: list[int], sizes: list[int], data: st.DataObject
) -> None:
    names = [tmp_path / name for name in ("x", "y", "z")]
    for name in names:
        name.mkdir(exist_ok=True)
    with SwapSpace(names, piece_bytes=PIECE, threads=2, weights=weights) as space:
        held = []
        for seed, nbytes in enumerate(sizes):
            memory = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
            extent = space.allocate(nbytes, "states")
            space.write(extent, memory.ctypes.data, nbytes).wait(60)
            first = data.draw(st.integers(0, extent.pieces - 1))
            start, stop = first * PIECE, min(nbytes, data.draw(st.integers(first + 1, extent.pieces)) * PIECE)
            memory[start:stop] ^= 0xFF
            space.write(extent, memory[start:].ctypes.data, stop - start, start).wait(60)
            held.append((extent, memory, start, stop))
        for extent, memory, start, stop in held:
            whole, part = np.zeros_like(memory), np.zeros(stop - start, np.uint8)
            space.read(extent, whole.ctypes.data, whole.nbytes).wait(60)
            space.read(extent, part.ctypes.data, part.nbytes, start).wait(60)
            assert (whole == memory).all()
            assert (part == memory[start:stop]).all()
    assert [list(name.iterdir()) for name in names] == [[], [], []]


def seconds(space: SwapSpace, way: str) -> float:
    """That the last of the drives takes over what was moved, where a drive's weight is its speed."""
    moved = {"read": lambda d: d.bytes_read, "write": lambda d: d.bytes_written}
    moved["both"] = lambda d: d.bytes_read + d.bytes_written
    return max(moved[way](drive) / drive.weight for drive in space.stats().drives)


@pytest.mark.parametrize("weights", [(3, 1), (1, 2), (7, 3), (5, 2, 1), (16, 1), (1, 1, 1)])
def test_a_large_transfer_goes_at_the_sum_of_the_speeds_both_ways_and_at_once(
    open_space: Callable, memory: Callable, weights: tuple[int, ...]
) -> None:
    space = open_space(*"abc"[: len(weights)], piece_bytes=PIECE, weights=weights)
    data = memory(200 * PIECE)
    one, two = (space.allocate(data.nbytes, name) for name in ("one", "two"))
    ideal = data.nbytes / sum(weights)
    space.write(one, data.ctypes.data, data.nbytes).wait(60)
    assert seconds(space, "write") <= ideal / 0.9
    into = np.zeros_like(data)
    space.read(one, into.ctypes.data, into.nbytes).wait(60)
    assert seconds(space, "read") <= ideal / 0.9
    tickets = [
        space.write(two, data.ctypes.data, data.nbytes),
        space.read(one, into.ctypes.data, into.nbytes),
    ]
    for ticket in tickets:
        ticket.wait(60)
    assert seconds(space, "both") <= 4 * ideal / 0.9
    assert (into == data).all()


@pytest.mark.parametrize("weights", [(3, 1), (5, 2), (13, 6, 2)])
def test_chunks_of_several_kinds_keep_all_drives_busy(open_space: Callable, weights: tuple[int, ...]) -> None:
    space = open_space(*"abc"[: len(weights)], piece_bytes=PIECE, weights=weights)
    groups = [[space.allocate(pieces * PIECE, f"group of {pieces}") for _ in range(4)] for pieces in (40, 37, 8, 61)]
    free_at, ends, moved = np.zeros(len(weights)), [0.0] * 3, 0
    for group in groups:
        for start in range(0, group[0].pieces, 8):
            begun, ended = ends[-3], 0.0  # three chunks are under way at once
            for extent in group:
                for piece in range(start, min(start + 8, extent.pieces)):
                    drive = extent.stripes.place(piece)[0]
                    free_at[drive] = max(free_at[drive], begun) + 1 / weights[drive]
                    ended, moved = max(ended, free_at[drive]), moved + 1
            ends.append(max(ended, ends[-1]))
    assert ends[-1] <= moved / sum(weights) / 0.9


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 3), min_size=150, max_size=200), st.sampled_from([(3, 1), (5, 2), (9, 4)]))
def test_small_extents_have_their_shares_together(
    folders: list[Path], pieces: list[int], weights: tuple[int, ...]
) -> None:
    with SwapSpace(folders, piece_bytes=PIECE, threads=1, weights=weights) as space:
        for count in pieces:
            space.allocate(count * PIECE, "small")
        held = [drive.file_bytes / PIECE for drive in space.stats().drives]
        ideal = sum(pieces) / sum(weights)
        assert [bytes_ / weight for bytes_, weight in zip(held, weights, strict=True)] == pytest.approx(
            [ideal] * 2, rel=0.1
        )


def test_absurd_weights_are_refused_before_anything_is_made(folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"weights: expected a list of whole numbers .* for the 2 drives"):
        SwapSpace(folders, weights=(1, 2, 3))
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.parametrize("speeds", [(24e6, 8e6), (10e6, 20e6)])
def test_drives_are_measured_and_a_large_transfer_reaches_nine_tenths_of_their_sum(
    folders: list[Path], speeds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PASS_SECONDS", 0.5)  # what this machine's clock adds is small beside it
    with bad_drives() as drives:
        drives.rule = throttle = Throttle(dict(zip(("a", "b"), speeds, strict=True)))
        with contextlib.ExitStack() as stack:
            for _ in range(3):  # what is measured while other programs have the processors may be wrong
                stack.pop_all().close()
                space = stack.enter_context(SwapSpace(folders, piece_bytes=1 << 17, threads=4))
                found = space.stats()
                assert (found.bytes_read, found.bytes_written) == (0, 0), "measuring is not counted"
                assert [drive.file_bytes for drive in found.drives] == [0, 0], "and its space is given back"
                if not all(drive.direct for drive in found.drives):
                    pytest.skip("no direct I/O here")
                if reached([drive.weight for drive in found.drives], speeds) >= 0.9:
                    break
            data = np.zeros(120 << 17, np.uint8)
            extent = space.allocate(data.nbytes, "states")
            other = space.allocate(data.nbytes, "others")
            ideal = data.nbytes / sum(speeds)
            for moves in ([space.write], [space.read], [space.read, space.write]):
                throttle.busy = dict.fromkeys(throttle.busy, 0.0)
                tickets = [
                    move(each, data.ctypes.data, data.nbytes)
                    for move, each in zip(moves, (extent, other), strict=False)
                ]
                for ticket in tickets:
                    ticket.wait(60)
                assert max(throttle.busy.values()) <= len(moves) * ideal / 0.9
            shares = np.array([drive.bytes_written for drive in space.stats().drives]) / data.nbytes / 2
            assert shares == pytest.approx(np.array(speeds) / sum(speeds), rel=0.1)


@pytest.mark.native
def test_a_drive_that_fails_while_it_is_measured_is_no_error_of_opening(folders: list[Path]) -> None:
    with bad_drives() as drives:
        drives.rule = lambda call: Error(5) if "/b/" in call.path else None
        with SwapSpace(folders, piece_bytes=PIECE) as space:
            assert [drive.weight for drive in space.stats().drives] == [1, 1]


@pytest.mark.native
@pytest.mark.parametrize("write", [True, False])
def test_a_drive_that_does_not_answer_while_it_is_measured_holds_up_nothing_for_ever(
    folders: list[Path], write: bool
) -> None:
    with bad_drives() as drives:
        drives.rule = lambda call: drives.stall() if "/b/" in call.path and call.write == write else None
        with SwapSpace(folders, piece_bytes=PIECE, timeout_s=0.1) as space:
            assert [drive.weight for drive in space.stats().drives] == [1, 1]
            drives.release()


def test_one_drive_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapfile, "measured", lambda *_, **__: pytest.fail("measured"))
    with SwapSpace([tmp_path]) as space:
        assert space.stats().drives[0].weight == 1


def test_a_drive_that_is_far_slower_is_left_out_and_named(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "_speeds", lambda _: [2e9, 1e8])
    with SwapSpace(folders, piece_bytes=PIECE) as space:
        if not all(drive.direct for drive in space.stats().drives):
            pytest.skip("no direct I/O here")
        assert [drive.weight for drive in space.stats().drives] == [1, 0]
        space.allocate(10 * PIECE, "states")
        assert [drive.file_bytes for drive in space.stats().drives] == [10 * PIECE, 0]
    assert [record.args[0] for record in caplog.records if record.levelno == logging.WARNING] == [
        space.stats().drives[1].path
    ]


# --- what is committed ------------------------------------------------------------------------------------------------


def filled(space: SwapSpace, pieces: int, value: int) -> Extent:
    space.generations.choose(None, "0" * 16, 0)
    extent = space.allocate(pieces * PIECE, "states", kept=True)
    data = np.full(pieces * PIECE, value, np.uint8)
    space.write(extent, data.ctypes.data, data.nbytes).wait(60)
    return extent


@pytest.fixture
def left(mode: str, folders: list[Path]) -> list[Path]:
    """Directories that a run of weights 3 and 1 has left with one generation."""
    with SwapSpace(folders, piece_bytes=PIECE, threads=2, identity=WHO, weights=(3, 1)) as space:
        filled(space, 20, 7)
        space.commit(b"seven")
        space.generations.left = True
    return folders


@pytest.mark.parametrize("weights", [None, (1, 5)])
def test_a_run_that_goes_on_keeps_the_committed_layout_whatever_the_drives_are_by_now(
    left: list[Path], weights: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapfile, "measured", lambda *_, **__: pytest.fail("what is committed would be overwritten"))
    with SwapSpace(left, piece_bytes=PIECE, threads=2, identity=WHO, weights=weights) as space:
        space.generations.choose(1, "0" * 16, 1)
        extent = space.allocate(20 * PIECE, "states", kept=True)
        space.revert()
        into = np.zeros(20 * PIECE, np.uint8)
        space.read(extent, into.ctypes.data, into.nbytes).wait(60)
        assert (into == 7).all()
        assert extent.stripes.weights == (3, 1)
        other = space.allocate(20 * PIECE, "more", kept=True)
        assert other.stripes.weights == (weights or (3, 1))
        assert tuple(drive.weight for drive in space.stats().drives) == (weights or (3, 1))
        data = np.full(20 * PIECE, 8, np.uint8)
        for each in (extent, other):
            space.write(each, data.ctypes.data, data.nbytes).wait(60)
        space.commit(b"eight")
        (commit,) = [found for found in look(space.generations.path).sound if found.serial == 2]
        assert [kept.stripes.weights for kept in commit.extents] == [(3, 1), weights or (3, 1)]
        assert commit.weights == (weights or (3, 1))


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The record at `path` with another header, and a hash that fits."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[32:40], "little")
    header = json.loads(whole[40 : 40 + length])
    change(header)
    text = json.dumps(header).encode()
    end = 32 + int.from_bytes(whole[16:24], "little")
    body = len(text).to_bytes(8, "little") + text + whole[40 + length : end]
    return whole[:16] + len(body).to_bytes(8, "little") + xxhash.xxh3_64_digest(body) + body


def the_record(folders: list[Path]) -> Path:
    """Of the one generation that was left."""
    return next(path for path in folders[0].glob("*/commit-*") if any(path.read_bytes()[:16]))


def test_a_record_without_weights_is_of_pieces_dealt_in_turn(mode: str, folders: list[Path]) -> None:
    def older(header: dict[str, Any]) -> None:
        header["version"] = 1
        del header["weights"]
        for extent in header["extents"]:
            assert extent.pop() == [1, 1]

    with SwapSpace(folders, piece_bytes=PIECE, threads=2, identity=WHO, weights=(1, 1)) as space:
        filled(space, 9, 3)
        space.commit(b"three")
        space.generations.left = True
    path = the_record(folders)
    path.write_bytes(rewritten(path, older))
    with SwapSpace(folders, piece_bytes=PIECE, threads=2, identity=WHO) as space:
        assert [serial for serial, _ in space.generations.offers] == [1]
        space.generations.choose(1, "0" * 16, 1)
        extent = space.allocate(9 * PIECE, "states", kept=True)
        space.revert()
        into = np.zeros(9 * PIECE, np.uint8)
        space.read(extent, into.ctypes.data, into.nbytes).wait(60)
        assert (into == 3).all()


ABSURD = [[0, 0], [3, -1], [3], [3, 1, 1], [1, 2**60], [2**70, 1], [1.5, 1], [True, 1], "31", None, {"a": 1}, [[3], 1]]


@pytest.mark.parametrize("weights", ABSURD, ids=str)
@pytest.mark.parametrize("where", ["extent", "run"])
def test_a_record_of_absurd_weights_is_refused_by_name_and_nothing_is_touched(
    mode: str, left: list[Path], weights: object, where: str
) -> None:
    def change(header: dict[str, Any]) -> None:
        if where == "run":
            header["weights"] = weights
        else:
            header["extents"][0][5] = weights

    path = the_record(left)
    path.write_bytes(rewritten(path, change))
    with pytest.raises(CorruptDataError, match=r"not a sound commit record.*weights"):
        decode(path.read_bytes(), str(path))
    before = {each: each.read_bytes() for folder in left for each in folder.glob("*/*") if each.name != "lock"}
    with SwapSpace(left, piece_bytes=PIECE, threads=2, identity=WHO, weights=(1, 1)) as space:
        assert space.generations.offers == []
    assert {each: each.read_bytes() for folder in left for each in folder.glob("*/*") if each.name != "lock"} == before


def test_a_place_outside_of_the_pattern_is_refused(left: list[Path]) -> None:
    path = the_record(left)
    for phase in (4, -1, None):
        with pytest.raises(CorruptDataError, match="not a sound commit record"):
            decode(rewritten(path, lambda header, phase=phase: header["extents"][0].__setitem__(3, phase)), "path")
    made = decode(path.read_bytes(), "path")
    assert encode(made) == path.read_bytes()


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SwapSpace]]:
    """Opens a space on drives of so many bytes each."""
    sizes: dict[str, int] = {}
    monkeypatch.setattr(
        Drive,
        "_known_free",
        lambda drive: next(size for name, size in sizes.items() if name in drive.path) - drive.nbytes,
    )
    opened = []

    def open_one(weights: tuple[int, int], *bytes_: int, **how: Any) -> SwapSpace:
        sizes.update(zip([f"/{folder.name}/" for folder in folders], bytes_, strict=True))
        opened.append(SwapSpace(folders, piece_bytes=PIECE, threads=2, weights=weights, **how))
        return opened[-1]

    yield open_one
    for space in opened:
        space.close()


def test_a_small_fast_drive_is_filled_and_the_other_takes_the_rest(
    small: Callable, memory: Callable, store: Callable, load: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    space = small((3, 1), 50 * PIECE, 1000 * PIECE)
    assert space.free_bytes() >= 900 * PIECE
    held = []
    for seed in range(12):
        data = memory(40 * PIECE + 13, seed=seed)
        held.append((store(space, data), data))
    fast, slow = (drive.file_bytes / PIECE for drive in space.stats().drives)
    assert 45 <= fast <= 50
    assert slow <= 12 * 41 - 45
    assert all((load(space, extent) == data).all() for extent, data in held)
    told = [record for record in caplog.records if "no room for its share" in record.message]
    assert len(told) == 1
    assert "/a/" in told[0].message
    with pytest.raises(SwapFullError):
        space.allocate(1000 * PIECE, "too large")
    assert [drive.file_bytes / PIECE for drive in space.stats().drives] == [fast, slow]
    space.free(held[0][0])
    assert space.allocate(38 * PIECE, "again").stripes.weights == (3, 1)


def test_an_extent_larger_than_the_fast_drive_is_cut_to_it_in_both_its_slots(small: Callable, memory: Callable) -> None:
    space = small((3, 1), 50 * PIECE, 1000 * PIECE, identity=WHO)
    extent = filled(space, 200, 4)
    assert len(extent.starts) == 2
    held = [extent.stripes.span(drive) // PIECE for drive in (0, 1)]
    assert 18 <= held[0] <= 25
    assert sum(held) == 200
    space.commit(b"")
    (commit,) = look(space.generations.path).sound
    assert commit.extents[0].stripes == extent.stripes
    assert commit.weights == (3, 1)


def test_a_drive_that_is_left_out_helps_where_the_others_are_full(
    small: Callable, store: Callable, memory: Callable
) -> None:
    space = small((1, 0), 10 * PIECE, 100 * PIECE)
    store(space, memory(8 * PIECE))
    assert space.stats().drives[1].file_bytes == 0
    store(space, memory(30 * PIECE))
    assert space.stats().drives[1].file_bytes >= 28 * PIECE


def test_what_may_be_taken_evenly_can_be(small: Callable) -> None:
    space = small((3, 1), 300 * PIECE, 100 * PIECE)
    assert space.free_bytes() == 400 * PIECE
    space.allocate(400 * PIECE, "all of it")
    with pytest.raises(SwapFullError, match="no room to grow the swap file"):
        space.allocate(PIECE, "more")


def test_the_identity_says_nothing_of_weights(left: list[Path]) -> None:
    with SwapSpace(left, piece_bytes=PIECE, threads=2, identity=WHO, weights=(9, 4)) as space:
        assert isinstance(space.generations, Generations)
        assert len(space.generations.offers) == 1
        assert not os.path.samefile(left[0], left[1])

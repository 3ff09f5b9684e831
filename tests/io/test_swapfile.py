"""SwapSpace keeps its promises: bytes come back, ranges are checked, space is reused, close leaves nothing."""

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tiered.errors import ConfigError, TieredError, UsageError
from tiered.io import SwapSpace
from tiered.io.engine import PieceState

PIECE = 16384
SIZES = [1, 511, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 7 * PIECE + 4096 + 13]


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize("misalignment", [0, 64, 1])
def test_bytes_come_back_for_any_size_alignment_and_number_of_drives(
    open_space: Callable, memory: Callable, names: tuple[str, ...], misalignment: int
) -> None:
    space = open_space(*names, piece_bytes=PIECE, threads=3)
    held = []
    for seed, nbytes in enumerate(SIZES):
        data = memory(nbytes, misalignment, seed)
        extent = space.allocate(nbytes, f"extent of {nbytes}")
        space.write(extent, data.ctypes.data, nbytes).wait(60)
        held.append((extent, data))
    for extent, data in held:
        guarded = memory(extent.nbytes + 8192, misalignment, fill=0xA5)
        space.read(extent, guarded.ctypes.data + 4096, extent.nbytes).wait(60)
        assert (guarded[4096 : 4096 + extent.nbytes] == data).all()
        assert (guarded[:4096] == 0xA5).all()
        assert (guarded[4096 + extent.nbytes :] == 0xA5).all()


def test_parts_are_written_and_read_at_any_piece(open_space: Callable, memory: Callable, load: Callable) -> None:
    space = open_space("a", "b", piece_bytes=PIECE)
    expected = memory(5 * PIECE + 100)
    extent = space.allocate(expected.nbytes, "weights")
    for start, stop in [(2, 4), (0, 1), (4, 6), (1, 2)]:
        part = expected[start * PIECE : stop * PIECE]
        space.write(extent, part.ctypes.data, part.nbytes, start * PIECE).wait(60)
    assert (load(space, extent) == expected).all()
    tail = np.zeros(PIECE + 100, np.uint8)
    space.read(extent, tail.ctypes.data, tail.nbytes, 4 * PIECE).wait(60)
    assert (tail == expected[4 * PIECE :]).all()


def test_what_was_never_written_reads_as_zeros_without_any_io(
    open_space: Callable, memory: Callable, load: Callable
) -> None:
    space = open_space(piece_bytes=PIECE)
    extent = space.allocate(3 * PIECE + 5, "moments")
    assert extent.blank
    assert not load(space, extent).any()
    assert space.stats().bytes_read == 0
    middle = memory(PIECE)
    space.write(extent, middle.ctypes.data, PIECE, PIECE).wait(60)
    assert not extent.blank
    found = load(space, extent)
    assert (found[PIECE : 2 * PIECE] == middle).all()
    assert not found[:PIECE].any()
    assert not found[2 * PIECE :].any()
    assert space.stats().bytes_read == PIECE


def test_space_reused_after_free_is_blank_again(open_space: Callable, memory: Callable, store: Callable) -> None:
    space = open_space(piece_bytes=PIECE)
    before = store(space, memory(4 * PIECE))
    space.free(before)
    space.free(before)
    after = space.allocate(4 * PIECE, "next")
    assert after.blank
    assert space.stats().drives[0].file_bytes == 4 * PIECE


def test_an_empty_extent_has_nothing_to_move(open_space: Callable) -> None:
    space = open_space()
    extent = space.allocate(0, "empty parameter")
    ran = []
    ticket = space.write(extent, 0, 0)
    ticket.add_done_callback(lambda: ran.append(True))
    ticket.wait(0)
    assert ticket.done()
    assert ran == [True]
    space.read(extent, 0, 0).wait(0)
    space.free(extent)


def test_a_large_extent_uses_every_drive_alike(open_space: Callable, memory: Callable, store: Callable) -> None:
    space = open_space("a", "b", "c", piece_bytes=PIECE)
    store(space, memory(30 * PIECE))
    assert [drive.bytes_written for drive in space.stats().drives] == [10 * PIECE] * 3


def test_small_extents_spread_over_the_drives(open_space: Callable, memory: Callable, store: Callable) -> None:
    space = open_space("a", "b", piece_bytes=PIECE)
    for _ in range(10):
        store(space, memory(100))
    assert [drive.file_bytes for drive in space.stats().drives] == [5 * 4096] * 2


def test_stats_count_the_bytes_asked_for(
    open_space: Callable, memory: Callable, store: Callable, load: Callable
) -> None:
    space = open_space("a", "b", piece_bytes=PIECE)
    extent = store(space, memory(5 * PIECE + 1))
    load(space, extent)
    load(space, extent)
    space.close()
    stats = space.stats()
    assert (stats.bytes_written, stats.bytes_read) == (5 * PIECE + 1, 2 * (5 * PIECE + 1))
    assert sum(drive.bytes_read for drive in stats.drives) == stats.bytes_read
    assert all(drive.busy_seconds > 0 for drive in stats.drives)


@pytest.mark.parametrize(
    ("nbytes", "offset"), [(PIECE, 1), (PIECE - 1, 0), (PIECE, 4096), (3 * PIECE, PIECE), (-PIECE, PIECE), (1, -1)]
)
def test_ranges_that_are_not_whole_pieces_inside_the_extent_are_refused(
    open_space: Callable, nbytes: int, offset: int
) -> None:
    space = open_space(piece_bytes=PIECE)
    extent = space.allocate(3 * PIECE, "layers.3.weight")
    for transfer in (space.read, space.write):
        with pytest.raises(UsageError, match=r"layers\.3\.weight"):
            transfer(extent, 0, nbytes, offset)


def test_freed_foreign_and_closed_use_is_refused(open_space: Callable, memory: Callable, store: Callable) -> None:
    space, other = open_space("a"), open_space("b")
    data = memory(4096)
    freed, foreign = store(space, data), store(other, data)
    space.free(freed)
    for extent in (freed, foreign):
        with pytest.raises(UsageError, match="freed, or belongs to another"):
            space.read(extent, data.ctypes.data, 4096)
    with pytest.raises(UsageError, match="at least 0"):
        space.allocate(-1, "negative")
    space.close()
    with pytest.raises(UsageError, match="closed"):
        space.allocate(1, "late")
    with pytest.raises(UsageError, match="closed"):
        space.write(foreign, data.ctypes.data, 4096)
    space.free(foreign)


@pytest.mark.parametrize(
    ("directories", "settings", "named"),
    [
        ([], {}, "directories"),
        ("/tmp", {}, "directories"),
        (["/tmp"], {"rank": -1}, "rank"),
        (["/tmp"], {"threads": 0}, "threads"),
        (["/tmp"], {"piece_bytes": 0}, "piece_bytes"),
        (["/tmp"], {"piece_bytes": 5000}, "piece_bytes"),
    ],
)
def test_impossible_settings_are_named(directories: list[str], settings: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SwapSpace(directories, **settings)


def test_a_piece_being_written_takes_no_second_transfer(
    open_space: Callable, memory: Callable, store: Callable
) -> None:
    space = open_space(piece_bytes=4096)
    data = memory(3 * 4096)
    extent = store(space, data)
    extent.records["state"][1] = PieceState.WRITING  # as during a write that takes its time
    for transfer in (space.read, space.write):
        with pytest.raises(UsageError, match="being written"):
            transfer(extent, data.ctypes.data, data.nbytes)
        transfer(extent, data.ctypes.data, 4096).wait(60)
    space.read(extent, data.ctypes.data, 4096, 8192).wait(60)


def test_every_one_of_many_callbacks_runs_once(open_space: Callable, memory: Callable) -> None:
    space = open_space("a", "b", piece_bytes=4096, threads=1)
    data = memory(64 * 4096)
    extent = space.allocate(data.nbytes, "weights")
    ran: list[int] = []
    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    for index in range(50):
        ticket.add_done_callback(functools.partial(ran.append, index))
    space.close()  # after the last callback
    assert sorted(ran) == list(range(50))


def test_callbacks_run_once_each_on_success_and_when_late(open_space: Callable, memory: Callable) -> None:
    space = open_space("a", "b", piece_bytes=4096, threads=1)
    data = memory(64 * 4096)
    extent = space.allocate(data.nbytes, "weights")
    calls = itertools.count()
    second_read = threading.Event()

    def read_again() -> None:
        next(calls)
        space.read(extent, data.ctypes.data, data.nbytes).wait(60)  # a callback may start and await other I/O
        second_read.set()

    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    ticket.add_done_callback(read_again)
    ticket.wait(60)
    assert second_read.wait(60)
    late: list[int] = []
    ticket.add_done_callback(lambda: late.append(next(calls)))
    assert late == [1]


def test_an_exception_in_a_callback_is_logged_and_stops_nothing(
    open_space: Callable, memory: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    space = open_space(piece_bytes=4096, threads=1)
    data = memory(64 * 4096)
    extent = space.allocate(data.nbytes, "weights")
    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    ran: list[bool] = []
    ticket.add_done_callback(lambda: 1 / 0)
    ticket.add_done_callback(lambda: ran.append(True))
    space.close()  # after the last callback
    assert ran == [True]
    assert "ZeroDivisionError" in caplog.text


def test_close_waits_for_callbacks(open_space: Callable, memory: Callable) -> None:
    space = open_space(piece_bytes=4096, threads=1)
    data = memory(64 * 4096)
    extent = space.allocate(data.nbytes, "weights")
    ran: list[bool] = []
    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    ticket.add_done_callback(lambda: (time.sleep(0.2), ran.append(True)))
    space.close()
    assert ran == [True]


def test_closing_from_a_callback_is_refused(open_space: Callable, memory: Callable) -> None:
    space = open_space(piece_bytes=4096, threads=1)
    data = memory(256 * 4096)
    extent = space.allocate(data.nbytes, "weights")
    outcome: list[BaseException | None] = []
    seen, threads = threading.Event(), []

    def close() -> None:
        threads.append(threading.current_thread())
        try:
            space.close()
            outcome.append(None)
        except UsageError as error:
            outcome.append(error)
        seen.set()

    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    ticket.add_done_callback(close)
    assert seen.wait(60)
    assert threads == [threading.current_thread()] or isinstance(outcome[0], UsageError)


def test_many_threads_at_once_get_their_own_bytes(
    open_space: Callable, memory: Callable, store: Callable, load: Callable
) -> None:
    space = open_space("a", "b", piece_bytes=4096, threads=4)

    def work(seed: int) -> None:
        for turn in range(10):
            data = memory(1 + 4096 * (seed % 5) + 37 * turn, seed % 2, seed * 100 + turn)
            extent = store(space, data)
            assert (load(space, extent) == data).all()
            space.free(extent)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))


def test_free_waits_for_what_is_in_flight(
    open_space: Callable, memory: Callable, store: Callable, load: Callable
) -> None:
    space = open_space(piece_bytes=4096, threads=2)
    for seed in range(10):
        old, new = memory(40 * 4096, seed=seed), memory(40 * 4096, seed=seed + 1000)
        extent = space.allocate(old.nbytes, "old")
        ticket = space.write(extent, old.ctypes.data, old.nbytes)
        space.free(extent)
        assert ticket.done()
        after = store(space, new)  # in the same place, so a late write of `old` would show
        assert after.starts == extent.starts
        assert (load(space, after) == new).all()
        space.free(after)


def test_close_waits_for_io_and_leaves_nothing(open_space: Callable, memory: Callable, tmp_path: Path) -> None:
    descriptors, threads = _descriptors(), _threads()
    space = open_space("a", "b", piece_bytes=4096, threads=2)
    data = memory(500 * 4096)
    extent = space.allocate(data.nbytes, "weights")
    finished = threading.Event()
    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    ticket.add_done_callback(finished.set)
    space.close()
    assert ticket.done()
    ticket.wait(0)
    assert finished.is_set()
    assert list(tmp_path.glob("*/*")) == []
    assert _descriptors() == descriptors
    assert _settled_threads(threads) == threads
    space.close()


def test_a_collected_space_closes_itself(open_space: Callable, mode: str, tmp_path: Path) -> None:
    descriptors, threads = _descriptors(), _threads()
    space = SwapSpace([tmp_path])
    space.allocate(1 << 20, "weights")
    del space
    assert list(tmp_path.iterdir()) == []
    assert _descriptors() == descriptors
    assert _settled_threads(threads) == threads


def test_opening_fails_as_a_whole(mode: str, tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    descriptors, threads = _descriptors(), _threads()
    with pytest.raises(TieredError, match="missing"):
        SwapSpace([tmp_path / "good", tmp_path / "missing"])
    assert list((tmp_path / "good").iterdir()) == []
    assert _descriptors() == descriptors
    assert _settled_threads(threads) == threads


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # those of the extension count too


def _settled_threads(expected: int) -> int:
    """How many threads there are, once those that have ended are out of the system's list too."""
    deadline = time.monotonic() + 10
    while _threads() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return _threads()

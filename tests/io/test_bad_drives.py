"""A drive that is slow or fails, by both engines: right bytes or an error by name, no hang, and memory that is safe."""

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from bad_drives import BadDrives, Call, Effect, Error, Flip, Short, Torn, bad_drives

from tiered.errors import CorruptDataError, StorageError
from tiered.io import SwapSpace

PIECE = 8192
LIMIT_S = 0.2  # of a drive's patience; what follows is waited for, and never measured
TRANSIENT = [errno.EIO, errno.ENODATA, errno.EILSEQ, errno.ETIMEDOUT, errno.ENOLINK, errno.EREMOTEIO]


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far, without the notices of the engine."""
    caplog.set_level(logging.WARNING, "tiered")
    return lambda: [m for m in caplog.messages if "portable I/O" not in m and "direct I/O" not in m]


@pytest.fixture
def drives() -> Iterator[BadDrives]:
    with bad_drives() as made:
        yield made


@pytest.fixture
def open_space(drives: BadDrives, open_space: Callable[..., SwapSpace]) -> Callable[..., SwapSpace]:
    """Opens spaces that close before the drives are well again."""
    return open_space


def times(count: int, effect: Effect, *, write: bool = False, at: int | None = None) -> Callable[[Call], Effect]:
    """A rule that gives `effect` to the first `count` reads (or writes), where given only of those at offset `at`."""
    left = iter(range(count))

    def rule(call: Call) -> Effect:
        hit = call.write == write and at in (None, call.offset)
        return effect if hit and next(left, None) is not None else None

    return rule


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Waits for what another thread brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


# --- failing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", TRANSIENT)
def test_a_read_that_fails_on_its_way_is_made_once_more_and_counted_and_said(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, said: Callable,
    number: int,
) -> None:  # fmt: skip
    space = open_space(piece_bytes=PIECE)
    data = memory(3 * PIECE)
    extent = store(space, data)
    drives.rule = times(1, Error(number), at=PIECE)
    assert (load(space, extent) == data).all()
    stats = space.stats()
    assert (stats.retries, stats.stalls, stats.drives[0].retries) == (1, 0, 1)
    (warning,) = said()
    assert warning.startswith(f"{stats.drives[0].path}: the read of {PIECE} bytes at byte {PIECE} failed")
    assert os.strerror(number) in warning


def test_a_read_that_fails_twice_is_an_error_that_names_the_very_drive_the_file_and_the_offset(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives
) -> None:
    space = open_space("a", "b", piece_bytes=PIECE)
    data = memory(4 * PIECE)
    extent = store(space, data, "layers.3.weight")
    ailing = space.stats().drives[1].path
    drives.rule = lambda call: Error(errno.EIO) if call.path == ailing and not call.write else None
    with pytest.raises(StorageError, match=rf"at byte \d+ \(layers\.3\.weight\) failed: {os.strerror(5)}") as caught:
        load(space, extent)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, ailing)
    assert [drive.retries for drive in space.stats().drives] == [0, 2]
    drives.rule = lambda call: None
    assert (load(space, extent) == data).all()


@pytest.mark.parametrize("number", [errno.EBADF, errno.EFAULT, errno.EPERM])
def test_an_error_that_no_second_read_can_mend_is_raised_at_once(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, number: int
) -> None:
    space = open_space(piece_bytes=PIECE)
    extent = store(space, memory(PIECE))
    drives.rule = times(1, Error(number))
    with pytest.raises(StorageError) as caught:
        load(space, extent)
    assert (caught.value.errno, space.stats().retries) == (number, 0)


def test_a_bad_transfer_is_read_again_and_never_shown(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, said: Callable
) -> None:
    space = open_space(piece_bytes=PIECE)
    data = memory(2 * PIECE + 17)
    extent = store(space, data)
    drives.rule = times(1, Flip(3))
    assert (load(space, extent) == data).all()
    assert space.stats().retries == 1
    assert "other bytes than were written" in said()[0]


@pytest.mark.parametrize("effect", [Flip(5000), Torn(4096)], ids=["flipped", "torn"])
def test_a_write_that_reached_the_drive_wrong_is_corrupt_data_whenever_it_is_read(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, effect: Effect
) -> None:
    space = open_space(piece_bytes=PIECE)
    extent = store(space, memory(PIECE, fill=1))
    drives.rule = times(1, effect, write=True)
    data = memory(PIECE, fill=2)
    space.write(extent, data.ctypes.data, data.nbytes).wait(60)
    for times_read in (1, 2):
        with pytest.raises(CorruptDataError, match="differ from those written"):
            load(space, extent)
        assert space.stats().retries == times_read


@pytest.mark.parametrize("nbytes", [1, 512, 4096, PIECE - 1])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("misalignment", [0, 8])
def test_a_transfer_cut_short_is_continued(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, nbytes: int,
    write: bool, misalignment: int,
) -> None:  # fmt: skip
    space = open_space(piece_bytes=PIECE)
    data = memory(2 * PIECE + 4096, misalignment)
    cut = set[tuple[bool, int]]()

    def rule(call: Call) -> Effect:
        """Cuts the first call at each place; direct I/O is cut at whole blocks, as the system does."""
        first = (call.write, call.offset) not in cut
        cut.add((call.write, call.offset))
        whole = nbytes % 4096 and call.offset % PIECE == 0 and space.mode == "native" and space.stats().drives[0].direct
        return Short(4096 if whole else nbytes) if first and call.write == write and call.nbytes > 4096 else None

    drives.rule = rule
    extent = store(space, data)
    assert (load(space, extent) == data).all()
    assert space.stats().retries == 0


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_transfer_that_moves_nothing_is_an_error_by_name_and_no_loop(
    open_space: Callable, memory: Callable, store: Callable, drives: BadDrives, write: bool
) -> None:
    space = open_space(piece_bytes=PIECE)
    data = memory(PIECE)
    extent = store(space, data)
    drives.rule = lambda call: Short(0) if call.write == write else None
    with pytest.raises(StorageError, match="ends before") as caught:
        (space.write if write else space.read)(extent, data.ctypes.data, data.nbytes).wait(60)
    assert caught.value.filename == space.stats().drives[0].path


def test_a_write_that_fails_is_not_made_again_and_its_piece_is_unreadable(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives
) -> None:
    space = open_space(piece_bytes=PIECE)
    data = memory(3 * PIECE)
    extent = store(space, data)
    drives.rule = times(1, Error(errno.EIO), write=True, at=PIECE)
    with pytest.raises(StorageError, match=f"write of {PIECE} bytes at byte {PIECE}") as caught:
        space.write(extent, data.ctypes.data, data.nbytes).wait(60)
    assert caught.value.errno == errno.EIO
    assert space.stats().retries == 0
    with pytest.raises(CorruptDataError, match="write it again first"):
        load(space, extent)


# --- late -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [PIECE, PIECE - 5], ids=["whole", "with a tail"])
@pytest.mark.parametrize("misalignment", [0, 8])
def test_a_read_that_stalls_and_then_fails_has_the_bytes_of_the_one_made_again(
    open_space: Callable,
    memory: Callable,
    store: Callable,
    drives: BadDrives,
    said: Callable,
    nbytes: int,
    misalignment: int,
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S, threads=1)
    data = memory(5 * PIECE + nbytes)
    extent = store(space, data)
    stall = drives.stall(errno.EBADMSG)  # that no second read of the first would mend
    drives.rule = times(1, stall, at=5 * PIECE)
    room = memory(6 * PIECE + misalignment, fill=0)
    into = room[misalignment : misalignment + data.nbytes]
    ticket = space.read(extent, into.ctypes.data, into.nbytes)
    until(lambda: sum(not call.write and call.offset == 5 * PIECE for call in drives.calls) > 1)
    other = store(space, memory(PIECE, fill=3), "other")  # its thread was replaced: the only one there is works on
    space.read(other, memory(PIECE, fill=0).ctypes.data, PIECE).wait(60)
    assert not ticket.done(), "the first read may still fill the memory"
    stall.until.set()
    ticket.wait(60)
    assert (into == data).all()
    assert not ticket.stranded()
    path = space.stats().drives[0].path
    (warning,) = said()
    assert warning.startswith(f"{path}: the read of {nbytes} bytes at byte {5 * PIECE} has taken")
    assert (space.stats().stalls, space.stats().retries) == (1, 1)


def test_a_read_that_stalls_and_then_fails_as_the_one_made_again_did_is_an_error_by_name(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S)
    data = memory(PIECE)
    extent = store(space, data)
    stall = drives.stall(errno.EBADMSG)
    effects = iter([stall, Error(errno.EBADMSG)])
    drives.rule = lambda call: next(effects, None)
    ticket = space.read(extent, memory(PIECE).ctypes.data, PIECE)
    until(lambda: len(drives.calls) == 3)  # the write, and two reads
    stall.until.set()
    with pytest.raises(StorageError) as caught:
        ticket.wait(60)
    assert (caught.value.errno, ticket.stranded()) == (errno.EBADMSG, False)
    assert (load(space, extent) == data).all()


def test_a_read_that_comes_back_late_counts_and_the_second_does_not(
    open_space: Callable, memory: Callable, store: Callable, drives: BadDrives, said: Callable
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S)
    data = memory(PIECE)
    extent = store(space, data)
    first, second = drives.stall(), drives.stall()
    stalls = iter([first, second])
    drives.rule = lambda call: next(stalls, None)
    into = memory(PIECE, fill=0)
    ticket = space.read(extent, into.ctypes.data, into.nbytes)
    until(lambda: len(drives.calls) == 3)  # the write, and two reads
    first.until.set()
    ticket.wait(60)
    assert (into == data).all()
    into[:] = 9
    second.until.set()
    space.close()
    assert (into == 9).all()
    assert len(said()) == 1


def test_a_read_that_stalls_and_then_fails_on_its_way_is_not_made_a_third_time_where_its_bytes_are_there(
    open_space: Callable, memory: Callable, store: Callable, drives: BadDrives
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S)
    data = memory(PIECE)
    extent = store(space, data)
    first, third = drives.stall(errno.EIO), drives.stall()
    effects = iter([first, None, third])
    drives.rule = lambda call: next(effects, None)
    into = memory(PIECE, fill=0)
    ticket = space.read(extent, into.ctypes.data, PIECE)
    until(lambda: len(drives.calls) == 3)  # the write, and two reads
    time.sleep(LIMIT_S / 4)  # the second is over, most likely
    first.until.set()
    ticket.wait(60)
    assert (into == data).all()
    assert len(drives.calls) == 3


def test_a_call_that_was_given_up_begins_nothing_when_it_comes_back(
    open_space: Callable, memory: Callable, store: Callable, drives: BadDrives
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S)
    extent = store(space, memory(PIECE))
    stall = drives.stall(errno.EIO)
    drives.rule = lambda call: stall
    ticket = space.read(extent, memory(PIECE).ctypes.data, PIECE)
    with pytest.raises(StorageError, match="has not come back"):
        ticket.wait(60)
    drives.release()
    until(lambda: _answers(space, extent, memory(PIECE)))
    assert [call.write for call in drives.calls] == [True, False, False, True]


def test_a_second_read_that_is_lost_costs_no_thread(
    open_space: Callable, memory: Callable, store: Callable, drives: BadDrives
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S, threads=1)
    data = memory(PIECE)
    extent = store(space, data)
    for _ in range(2):
        drives.calls.clear()
        first, lost = drives.stall(), drives.stall()
        effects = iter([first, lost])
        drives.rule = lambda call: next(effects, None)  # noqa: B023
        into = memory(PIECE, fill=0)
        ticket = space.read(extent, into.ctypes.data, PIECE)
        until(lambda: len(drives.calls) == 2)
        first.until.set()
        ticket.wait(60)
        assert (into == data).all()
        space.write(extent, data.ctypes.data, PIECE).wait(60)


def test_a_drive_that_answers_no_read_is_a_timeout_by_name_and_says_that_the_memory_is_not_the_callers(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives
) -> None:
    space = open_space("good", "dead", piece_bytes=PIECE, timeout_s=LIMIT_S, threads=2)
    data = memory(16 * PIECE)
    extent = store(space, data, "layers.1.weight")
    dead = space.stats().drives[1].path
    drives.rule = lambda call: drives.stall() if call.path == dead else None
    into = memory(16 * PIECE, fill=0)
    ticket = space.read(extent, into.ctypes.data, into.nbytes)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"\(layers\.1\.weight\) has not come back for \d+ s .*dmesg") as caught:
            ticket.wait(60)
        assert (caught.value.errno, caught.value.filename) == (errno.ETIMEDOUT, dead)
    assert ticket.done()
    assert ticket.stranded()
    for call in (space.read, space.write):
        refused = call(extent, data.ctypes.data, data.nbytes)
        with pytest.raises(StorageError, match="was not begun") as caught:
            refused.wait(60)
        assert (caught.value.errno, caught.value.filename, refused.stranded()) == (errno.ETIMEDOUT, dead, False)
    drives.release()
    until(lambda: _answers(space, extent, data))
    assert (load(space, extent) == data).all()
    assert ticket.stranded(), "for good: nobody asks a call whether it has come back"


def _answers(space: SwapSpace, extent: object, data: np.ndarray) -> bool:
    try:
        space.write(extent, data.ctypes.data, data.nbytes).wait(60)
    except StorageError:
        return False
    return True


def test_a_write_that_stalls_is_said_once_and_not_made_again_and_may_come_back(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, said: Callable
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S, threads=1)
    data = memory(2 * PIECE)
    extent = store(space, data)
    stall = drives.stall()
    drives.rule = times(1, stall, write=True, at=0)
    ticket = space.write(extent, data.ctypes.data, data.nbytes)
    until(said)
    stall.until.set()
    ticket.wait(60)
    (warning,) = said()
    assert warning.startswith(f"{space.stats().drives[0].path}: the write of {PIECE} bytes at byte 0 has taken")
    assert (space.stats().stalls, space.stats().retries) == (1, 0)
    assert sum(call.write and call.offset == 0 for call in drives.calls) == 2
    assert (load(space, extent) == data).all()


@pytest.mark.parametrize("misalignment", [0, 8])
def test_a_write_that_was_given_up_leaves_its_piece_unreadable_and_lands_before_any_other(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, misalignment: int
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=LIMIT_S)
    extent = store(space, memory(PIECE, fill=1))
    stall = drives.stall()
    drives.rule = times(1, stall, write=True)
    late = memory(PIECE, misalignment, fill=2)
    with pytest.raises(StorageError, match=r"write of .* has not come back") as caught:
        space.write(extent, late.ctypes.data, late.nbytes).wait(60)
    assert caught.value.errno == errno.ETIMEDOUT
    late[:] = 3  # the memory is the caller's again
    data = memory(PIECE, fill=4)
    with pytest.raises(StorageError, match="was not begun"):
        space.write(extent, data.ctypes.data, data.nbytes).wait(60)
    space.free(extent)
    again = space.allocate(PIECE, "in the same place")
    with pytest.raises(StorageError, match="was not begun"):
        space.write(again, data.ctypes.data, data.nbytes).wait(60)
    stall.until.set()
    until(lambda: _answers(space, again, data))
    assert (load(space, again) == data).all()


def test_what_waits_behind_a_dead_drive_fails_with_it_and_callbacks_run(
    open_space: Callable, memory: Callable, store: Callable, drives: BadDrives
) -> None:
    space = open_space(piece_bytes=4096, timeout_s=LIMIT_S, threads=2)
    data = memory(500 * 4096)
    extent = store(space, data)
    drives.rule = lambda call: drives.stall()
    tickets = [space.read(extent, data.ctypes.data, data.nbytes) for _ in range(4)]
    told = threading.Semaphore(0)
    for ticket in tickets:
        ticket.add_done_callback(told.release)
    for ticket in tickets:
        with pytest.raises(StorageError) as caught:
            ticket.wait(60)
        assert caught.value.errno == errno.ETIMEDOUT
    for _ in tickets:
        assert told.acquire(timeout=60)
    assert sum(not call.write for call in drives.calls) <= 2 * 2, "reads were begun on a drive that does not answer"


def test_without_a_limit_nothing_is_late(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, drives: BadDrives, said: Callable
) -> None:
    space = open_space(piece_bytes=PIECE, timeout_s=None)
    data = memory(2 * PIECE + 5)
    extent = store(space, data)
    stall = drives.stall()
    drives.rule = times(1, stall)
    into = memory(2 * PIECE + 5, fill=0)
    ticket = space.read(extent, into.ctypes.data, into.nbytes)
    with pytest.raises(TimeoutError):
        ticket.wait(1.5)  # more than the time between two looks
    stall.until.set()
    ticket.wait(60)
    assert (into == data).all()
    assert (space.stats().stalls, said()) == (0, [])


# --- the end ----------------------------------------------------------------------------------------------------------

DEAD = """
import logging, os, sys, time
def tasks():
    return len(os.listdir("/proc/self/task"))
sys.path.append(sys.argv[2])
logging.basicConfig(format="%(message)s")
import numpy as np
from bad_drives import bad_drives
from tiered.errors import StorageError
from tiered.io import SwapSpace, engine, portable
engine._CLOSE_SECONDS = portable._CLOSE_SECONDS = 0.3
write = sys.argv[3] == "write"
before = tasks()
data = np.zeros(1 << 16, np.uint8)
with bad_drives() as drives:
    good, dead = (os.path.join(sys.argv[1], name) for name in ("good", "dead"))
    for path in (good, dead):
        os.mkdir(path)
    space = SwapSpace([good, dead], piece_bytes=4096, threads=2, timeout_s=0.2)
    extent = space.allocate(data.nbytes, "weights")
    space.write(extent, data.ctypes.data, data.nbytes).wait()
    drives.rule = lambda call: drives.stall() if dead in call.path and call.write == write else None
    ticket = (space.write if write else space.read)(extent, data.ctypes.data, data.nbytes)
    WAIT
    space.close()
    space.close()
    assert ticket.done()
    assert os.listdir(good) == [] and len(os.listdir(dead)) == 1
    print("closed", flush=True)
    END
deadline = time.monotonic() + 60
while tasks() > before and time.monotonic() < deadline:
    time.sleep(0.01)
assert tasks() == before, "a thread that was left behind has come back and not ended"
print("over", flush=True)
"""


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("wait", ["", "try: ticket.wait()\n    except StorageError: pass"], ids=["busy", "told"])
@pytest.mark.parametrize("end", ["", "sys.stdout.flush(); os._exit(0)"], ids=["released", "exit"])
def test_closing_a_space_with_a_dead_drive_ends_names_what_is_left_and_gives_the_others_back(
    mode: str, tmp_path: Path, run_python: Callable, kind: str, wait: str, end: str
) -> None:
    tests = Path(__file__).parents[1]
    code = DEAD.replace("WAIT", wait or "pass").replace("END", end or "pass")
    result = run_python(code, tmp_path, tests, kind)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["closed", "over"][: 1 if end else 2]
    left = [line for line in result.stderr.splitlines() if "not back from the drive" in line]
    assert len(left) == 1
    assert re.match(rf"{tmp_path}/dead/tiered-\w+-r0/swap: not back from the drive: \d+ transfers", left[0])
    # whoever comes next there removes it
    again = run_python("from tiered.io import SwapSpace\nSwapSpace([sys.argv[1]]).close()", tmp_path / "dead")
    assert again.returncode == 0, again.stderr
    assert list((tmp_path / "dead").iterdir()) == []

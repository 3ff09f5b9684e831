"""Ranges of a swap file: whole, disjoint, reused, and preallocated on the drive."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered.errors import StorageError, SwapFullError
from tiered.io.directory import claim
from tiered.io.drive import BLOCK, Drive


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """A drive in tmp_path."""
    claimed = claim(tmp_path)
    opened = Drive(claimed)
    yield opened
    opened.close()
    claimed.release()


def test_a_range_is_preallocated(drive: Drive) -> None:
    start = drive.take(64 * BLOCK)
    status = os.stat(drive.path)
    assert start == 0
    assert status.st_size == drive.nbytes == 64 * BLOCK
    assert status.st_blocks * 512 >= 64 * BLOCK


def test_the_smallest_free_range_that_fits_is_used(drive: Drive) -> None:
    starts = [drive.take(blocks * BLOCK) for blocks in (8, 1, 3, 1, 5, 1)]
    for index, blocks in ((0, 8), (2, 3), (4, 5)):
        drive.give_back(starts[index], blocks * BLOCK)
    assert drive.take(4 * BLOCK) == starts[4]
    assert drive.take(3 * BLOCK) == starts[2]
    assert drive.take(8 * BLOCK) == starts[0]
    assert drive.take(1 * BLOCK) == starts[4] + 4 * BLOCK


def test_neighbours_join_whatever_the_order(drive: Drive) -> None:
    starts = [drive.take(BLOCK) for _ in range(5)]
    for index in (1, 3, 2, 0, 4):
        drive.give_back(starts[index], BLOCK)
    assert drive.take(5 * BLOCK) == 0
    assert drive.nbytes == 5 * BLOCK


def test_a_free_end_that_is_too_short_grows(drive: Drive) -> None:
    drive.take(BLOCK)
    end = drive.take(2 * BLOCK)
    drive.give_back(end, 2 * BLOCK)
    assert drive.take(5 * BLOCK) == end
    assert drive.nbytes == 6 * BLOCK


def test_live_ranges_never_overlap_and_all_space_comes_back(drive: Drive) -> None:
    generator = random.Random(0)
    live: dict[int, int] = {}
    owner: dict[int, int] = {}  # block -> start of the range that holds it
    for _ in range(600):
        if live and generator.random() < 0.5:
            start = generator.choice(list(live))
            blocks = live.pop(start)
            drive.give_back(start, blocks * BLOCK)
            for block in range(start // BLOCK, start // BLOCK + blocks):
                del owner[block]
        else:
            blocks = generator.randint(1, 9)
            start = drive.take(blocks * BLOCK)
            live[start] = blocks
            for block in range(start // BLOCK, start // BLOCK + blocks):
                assert block not in owner
                owner[block] = start
        assert drive.taken_bytes == sum(live.values()) * BLOCK
        assert drive.nbytes == os.stat(drive.path).st_size
    whole = drive.nbytes
    for start, blocks in live.items():
        drive.give_back(start, blocks * BLOCK)
    assert drive.take(whole) == 0
    assert drive.nbytes == whole


def test_undoing_a_take_gives_the_space_back_to_the_drive(drive: Drive) -> None:
    drive.take(BLOCK)
    drive.undo_take(drive.take(7 * BLOCK), 7 * BLOCK)
    assert drive.nbytes == os.stat(drive.path).st_size == BLOCK
    assert drive.take(BLOCK) == BLOCK


def test_a_drive_without_room_names_the_file_and_the_bytes(drive: Drive) -> None:
    first = drive.take(3 * BLOCK)
    for _ in range(2):
        with pytest.raises(SwapFullError, match=rf"{1 << 60} bytes.*bytes are free") as caught:
            drive.take(1 << 60)
        assert caught.value.filename == drive.path
        assert drive.nbytes == os.stat(drive.path).st_size == 3 * BLOCK
    drive.give_back(first, 3 * BLOCK)
    assert drive.take(3 * BLOCK) == first


def test_more_than_a_drive_has_is_refused_without_filling_it_for_others(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: asked.append(given[2]))
    status = os.statvfs(drive.path)
    with pytest.raises(SwapFullError, match="bytes are free"):
        drive.take((status.f_bavail * status.f_frsize // BLOCK + (1 << 20)) * BLOCK)
    assert asked == []
    drive.take(BLOCK)
    assert asked == [BLOCK]


def test_what_a_drive_kept_of_a_failed_growth_is_given_back(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    drive.take(BLOCK)

    def half(descriptor: int, offset: int, nbytes: int) -> None:
        os.ftruncate(descriptor, offset + nbytes // 2)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(SwapFullError):
        drive.take(8 * BLOCK)
    assert os.stat(drive.path).st_size == drive.nbytes == BLOCK


def test_where_space_cannot_be_reserved_every_byte_is_written(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    first = drive.take(3 * BLOCK)
    os.pwrite(drive.buffered_fd, b"kept", first)
    drive.take((2 << 20) + BLOCK)
    status = os.stat(drive.path)
    assert status.st_size == drive.nbytes == (2 << 20) + 4 * BLOCK
    assert status.st_blocks * 512 >= drive.nbytes
    assert os.pread(drive.buffered_fd, 4, first) == b"kept"

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SwapFullError, match="bytes are free"):
        drive.take(BLOCK)
    assert os.stat(drive.path).st_size == drive.nbytes


def test_a_drive_that_fails_while_it_grows_is_not_called_full(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(StorageError, match="the drive needs a look") as caught:
        drive.take(BLOCK)
    assert not isinstance(caught.value, SwapFullError)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, drive.path)

"""What drives do to swap files: every fault is an error that names the file, never other bytes."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tiered.errors import CorruptDataError, StorageError
from tiered.io import Extent, SwapSpace

PIECE = 8192


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize("place", [0, PIECE - 1, 2 * PIECE + 17, 4 * PIECE + 99])
def test_one_flipped_bit_is_corrupt_data_with_file_and_offset(
    open_space: Callable, memory: Callable, store: Callable, load: Callable, names: tuple[str, ...], place: int
) -> None:
    space = open_space(*names, piece_bytes=PIECE)
    store(space, memory(4096))
    data = memory(4 * PIECE + 100)
    extent = store(space, data, "layers.0.weight")
    drive, offset = extent.stripes.place(place // PIECE)
    path, at = space.stats().drives[drive].path, extent.starts[0][drive] + offset
    _flip(path, at + place % PIECE)
    into = np.zeros_like(data)
    ticket = space.read(extent, into.ctypes.data, into.nbytes)
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=rf"at byte {at} \(layers\.0\.weight\).*checksum") as caught:
            ticket.wait(60)
        assert caught.value.filename == path
        assert ticket.done()
    store_again = space.write(extent, data.ctypes.data, data.nbytes)
    store_again.wait(60)
    assert (load(space, extent) == data).all()


def test_a_file_cut_short_is_a_named_error(open_space: Callable, memory: Callable, store: Callable) -> None:
    space = open_space(piece_bytes=PIECE)
    data = memory(4 * PIECE)
    extent = store(space, data)
    path = space.stats().drives[0].path
    os.truncate(path, 2 * PIECE + 5)
    with pytest.raises(StorageError, match=rf"at byte {2 * PIECE} .*ends before") as caught:
        space.read(extent, data.ctypes.data, data.nbytes).wait(60)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
    space.read(extent, data.ctypes.data, 2 * PIECE).wait(60)


def test_pieces_swapped_on_the_drive_are_noticed(open_space: Callable, memory: Callable, store: Callable) -> None:
    space = open_space(piece_bytes=PIECE)
    data = memory(2 * PIECE)
    extent = store(space, data)
    with Path(space.stats().drives[0].path).open("r+b", buffering=0) as file:
        content = file.read(2 * PIECE)
        file.seek(0)
        file.write(content[PIECE:] + content[:PIECE])
        os.fsync(file.fileno())
    with pytest.raises(CorruptDataError, match="at byte 0"):
        space.read(extent, data.ctypes.data, data.nbytes).wait(60)


def test_a_write_cut_short_by_the_system_is_an_error_and_poisons_its_piece(
    mode: str, tmp_path: Path, run_python: Callable
) -> None:
    code = """
import resource, signal, sys
import numpy as np
from tiered.errors import CorruptDataError, StorageError
from tiered.io import SwapSpace
PIECE = 8192
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
space = SwapSpace([sys.argv[1]], piece_bytes=PIECE)
old, new, into = (np.full(4 * PIECE, fill, np.uint8) for fill in (1, 2, 0))
extent = space.allocate(old.nbytes, "weights")
space.write(extent, old.ctypes.data, old.nbytes).wait(60)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PIECE + 100, limits[1]))
ticket = space.write(extent, new.ctypes.data, new.nbytes)
try:
    ticket.wait(60)
except StorageError as error:
    print(type(error).__name__, error.errno, error.filename == space.stats().drives[0].path, str(error))
assert ticket.done()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
space.read(extent, into.ctypes.data, 2 * PIECE).wait(60)
assert (into[:2 * PIECE] == 2).all()
for piece in (2, 3):
    try:
        space.read(extent, into.ctypes.data, PIECE, piece * PIECE).wait(60)
        print("stale bytes were read")
    except CorruptDataError as error:
        print(error)
space.write(extent, new.ctypes.data, new.nbytes).wait(60)
space.read(extent, into.ctypes.data, into.nbytes).wait(60)
assert (into == 2).all()
space.close()
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    first, *others = result.stdout.splitlines()
    assert first.startswith(f"StorageError {errno.EFBIG} True ")
    assert f"byte {2 * PIECE} (weights)" in first
    assert len(others) == 2
    assert all("write it again first" in line for line in others)
    assert list(tmp_path.iterdir()) == []


FULL = """
import subprocess, sys, os
full = sys.argv[-1]  # the last, so that the drives before it have to undo what they gave
for path in sys.argv[1:]:
    size = "2m" if path == full else "3m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)
import numpy as np
from tiered.errors import SwapFullError
from tiered.io import SwapSpace
space = SwapSpace(sys.argv[1:], piece_bytes=65536, weights=[1] * len(sys.argv[1:]))
free = os.statvfs(full).f_bavail * 4096
kept = space.allocate(1 << 20, "kept")
data = np.arange(1 << 20, dtype=np.uint8)
space.write(kept, data.ctypes.data, data.nbytes).wait(60)
before = [drive.file_bytes for drive in space.stats().drives], os.statvfs(full).f_bavail
for _ in range(2):
    try:
        space.allocate(len(sys.argv[1:]) * (2 << 20), "too large")
    except SwapFullError as error:
        assert error.filename.startswith(full), error.filename
        print(error.errno, error)
    assert before == ([drive.file_bytes for drive in space.stats().drives], os.statvfs(full).f_bavail)
into = np.zeros_like(data)
space.read(kept, into.ctypes.data, into.nbytes).wait(60)
assert (into == data).all()
space.allocate(free // 4, "fits")
space.close()
assert [os.listdir(path) for path in sys.argv[1:]] == [[]] * len(sys.argv[1:])
"""


@pytest.mark.parametrize("others", [0, 1])
def test_a_full_drive_refuses_the_allocation_and_keeps_nothing(
    mode: str, tmp_path: Path, run_mounted: Callable, others: int
) -> None:
    directories = [tmp_path / f"drive{index}" for index in range(1 + others)]
    for directory in directories:
        directory.mkdir()
    result = run_mounted(FULL, *directories)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all(
        re.match(rf"{errno.ENOSPC} .*grow the swap file by \d+ bytes.* \d+ bytes are free", line) for line in lines
    )


def test_a_drive_that_is_full_from_the_start_is_refused(mode: str, tmp_path: Path, run_mounted: Callable) -> None:
    code = """
import subprocess, sys, os
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
with open(os.path.join(sys.argv[1], "other"), "wb") as other:
    other.write(bytes(65536 - 4096))
from tiered.errors import StorageError
from tiered.io import SwapSpace
try:
    SwapSpace([sys.argv[1]]).allocate(8192, "weights")
except StorageError as error:
    print(type(error).__name__, error)
assert os.listdir(sys.argv[1]) == ["other"]
"""
    result = run_mounted(code, tmp_path)
    assert (result.returncode, result.stderr.replace(NOTICE, "").strip()) == (0, ""), result.stderr
    assert result.stdout.startswith("SwapFullError")


NOTICE = (
    "portable I/O (aiofiles): the compiled extension is missing or TIERED_PORTABLE is set; "
    "results are the same, transfers are slower"
)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A directory in /dev/shm."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_a_directory_in_memory_works_too(
    mode: str, shared_memory: Path, memory: Callable, store: Callable, load: Callable
) -> None:
    with SwapSpace([shared_memory], piece_bytes=PIECE) as space:
        data = memory(5 * PIECE + 1, 1)
        extent: Extent = store(space, data)
        assert (load(space, extent) == data).all()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.native
def test_without_direct_io_everything_works_and_one_notice_says_so(
    open_space: Callable,
    memory: Callable,
    store: Callable,
    load: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tiered.io.drive.Drive._open_direct", lambda self: -1)
    space = open_space(piece_bytes=PIECE)
    for nbytes in (1, 4095, PIECE, 3 * PIECE + 7):
        data = memory(nbytes, 1)
        assert (load(space, store(space, data)) == data).all()
    assert not space.stats().drives[0].direct
    if space.mode == "native":
        assert caplog.text.count("no direct I/O") == 1


def test_closing_after_failures_releases_everything(
    open_space: Callable, memory: Callable, store: Callable, tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    space = open_space(piece_bytes=PIECE)
    data = memory(4 * PIECE)
    extent = store(space, data)
    os.truncate(space.stats().drives[0].path, 0)
    ticket = space.read(extent, data.ctypes.data, data.nbytes)
    shutil.rmtree(tmp_path / "swap")
    space.close()
    with pytest.raises(StorageError):
        ticket.wait(0)
    assert len(os.listdir("/proc/self/fd")) == before


def _flip(path: str, offset: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
        os.fsync(file.fileno())

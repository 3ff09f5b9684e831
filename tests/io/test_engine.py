"""Which engine runs, what tickets say while it does, and the checksum it trusts."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tiered.io import SwapSpace
from tiered.io.engine import Failure, chosen_mode
from tiered.io.transfer import Transfer, TransferPart


@pytest.fixture
def native() -> ModuleType:
    """The extension."""
    return pytest.importorskip("tiered._native", exc_type=ImportError)


@pytest.mark.skipif(
    not (shutil.which("c++") and (Path(sysconfig.get_path("include")) / "Python.h").exists()),
    reason="no compiler or no Python headers here, so the extension may be missing",
)
def test_the_extension_is_there_where_it_can_be_built(run_python: Callable) -> None:
    result = run_python("import tiered._native")
    assert result.returncode == 0, "the build failed and the install fell back: run pip install -v . and read why"


def test_the_environment_and_a_missing_extension_choose_the_portable_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_PORTABLE", "1")
    assert chosen_mode() == "portable"
    monkeypatch.setenv("TIERED_PORTABLE", "0")
    monkeypatch.setitem(sys.modules, "tiered._native", None)  # so that importing it raises ImportError
    assert chosen_mode() == "portable"


def test_the_portable_engine_is_named_in_one_notice_per_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_python: Callable
) -> None:
    monkeypatch.setenv("TIERED_PORTABLE", "1")
    code = """
import logging
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
from tiered.io import SwapSpace
for _ in range(3):
    SwapSpace([sys.argv[1], sys.argv[1]]).close()
"""
    result = run_python(code, tmp_path)
    assert result.stderr.count("portable I/O") == 1
    assert result.stderr.startswith("tiered WARNING portable I/O")
    monkeypatch.setenv("TIERED_PORTABLE", "0")
    if chosen_mode() == "native":
        assert "portable" not in run_python(code, tmp_path).stderr


class _Pending:
    """A submission that never ends."""

    def done(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        return False

    def failure(self) -> Failure | None:
        return None

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        pass


def test_a_wait_that_runs_out_of_time_says_so_and_names_the_extent() -> None:
    ticket = Transfer([TransferPart(_Pending(), "/swap", [])], write=True, label="layers.1.weight")
    with pytest.raises(TimeoutError, match=r"write of layers\.1\.weight did not finish within 0\.01 s"):
        ticket.wait(0.01)
    assert not ticket.done()


@pytest.mark.native
def test_the_checksum_is_crc32c_by_both_implementations(native: ModuleType) -> None:
    published = {  # RFC 3720, appendix B.4
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(reversed(range(32))): 0x113FDB5C,
        b"": 0,
    }
    for data, expected in published.items():
        array = np.frombuffer(data + b"\0", np.uint8)  # one byte more, as an empty array may have no address
        assert native.crc32c(array.ctypes.data, len(data)) == expected
        assert native.crc32c_portable(array.ctypes.data, len(data)) == expected


@pytest.mark.native
def test_both_checksums_agree_at_every_length_and_alignment_around_their_block_sizes(native: ModuleType) -> None:
    array = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)
    lengths = [*range(70), *range(12_270, 12_310), *range(24_570, 24_600), 36_000]
    for start in range(9):
        for nbytes in lengths:
            address = array.ctypes.data + start
            assert native.crc32c(address, nbytes) == native.crc32c_portable(address, nbytes), (start, nbytes)


def test_one_thread_and_one_block_pieces_work_too(
    open_space: Callable[..., SwapSpace], memory: Callable, store: Callable, load: Callable
) -> None:
    space = open_space(threads=1, piece_bytes=4096)
    data = memory(50 * 4096 + 1, 3)
    assert (load(space, store(space, data)) == data).all()


@pytest.mark.parametrize("mode", [pytest.param("native", marks=pytest.mark.native)], indirect=True)
def test_direct_io_leaves_nothing_in_the_page_cache(
    open_space: Callable[..., SwapSpace], memory: Callable, store: Callable, load: Callable, tmp_path: Path
) -> None:
    space = open_space(piece_bytes=1 << 16)
    if not space.stats().drives[0].direct or "tmpfs" in _file_system(tmp_path):
        pytest.skip("no direct I/O, or a file system that is all page cache")
    data = memory(1 << 20)
    extent = store(space, data)
    load(space, extent)
    path = space.stats().drives[0].path
    fincore = shutil.which("fincore")
    if fincore is None:
        pytest.skip("fincore(1) is not installed")
    shown = subprocess.run(
        [fincore, "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, text=True
    )
    assert int(shown.stdout) == 0


def _file_system(path: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

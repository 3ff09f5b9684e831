"""A link gives a file the bytes of an extent without moving them, or says that only a copy can."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared_blocks import Shares, shared_blocks

from tiered.errors import UsageError
from tiered.io import share as sharing
from tiered.io.checksum import checksum
from tiered.io.drive import BLOCK
from tiered.io.engine import PieceState

PIECE = 2 * BLOCK
SIZES = [1, BLOCK, PIECE, PIECE + 1, 7 * PIECE + 100]
AT = 3 * BLOCK


@pytest.fixture
def shares() -> Iterator[Shares]:
    with shared_blocks() as made:
        yield made


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_link_has_the_bytes_and_zeros_to_the_end_of_the_block_and_their_checksums(
    open_space: Callable,
    memory: Callable,
    store: Callable,
    shares: Shares,
    target: int,
    nbytes: int,
    names: tuple[str, ...],
) -> None:
    space = open_space(*names, piece_bytes=PIECE)
    data = memory(nbytes)
    extent = store(space, data)
    sums = space.link(extent, target, AT)
    got = os.pread(target, 1 << 20, AT)
    assert got == data.tobytes() + bytes(-nbytes % BLOCK)
    pieces = [got[at : at + PIECE] for at in range(0, len(got), PIECE)]
    assert sums == [checksum(space.mode)(memoryview(piece), 0) for piece in pieces]
    assert os.pread(target, AT, 0) == bytes(AT)


def test_pieces_that_lie_one_after_the_other_take_one_call(
    open_space: Callable, memory: Callable, store: Callable, shares: Shares, target: int
) -> None:
    space = open_space(piece_bytes=PIECE)
    extent = store(space, memory(5 * PIECE + 1))
    space.link(extent, target, AT)
    assert [call[1:] for call in shares.calls] == [(5 * PIECE + BLOCK, AT)]


def test_what_is_blank_or_was_not_written_well_is_not_linked(
    open_space: Callable, memory: Callable, store: Callable, shares: Shares, target: int
) -> None:
    space = open_space(piece_bytes=PIECE)
    assert space.link(space.allocate(3 * PIECE, "blank"), target, 0) is None
    extent = store(space, memory(3 * PIECE))
    extent.records["state"][1] = PieceState.INVALID
    assert space.link(extent, target, 0) is None
    assert shares.calls == []
    space.free(extent)
    with pytest.raises(UsageError, match="was freed"):
        space.link(extent, target, 0)


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("refusal", ["EXDEV", "EOPNOTSUPP", "EINVAL", "ENOTTY", "EPERM", "ENOSYS"])
def test_a_refusal_is_no_error_whenever_it_comes(
    open_space: Callable, memory: Callable, store: Callable, shares: Shares, target: int, refusal: str, call: int
) -> None:
    shares.failing = {call: getattr(errno, refusal)}.get
    space = open_space("a", "b", piece_bytes=PIECE)
    extent = store(space, memory(6 * PIECE))
    assert space.link(extent, target, 0) is None
    assert len(shares.calls) == call


@pytest.mark.parametrize("failure", ["ENOSPC", "EDQUOT", "EIO"])
def test_a_file_system_that_fails_is_an_error(
    open_space: Callable, memory: Callable, store: Callable, shares: Shares, target: int, failure: str
) -> None:
    shares.failing = {1: getattr(errno, failure)}.get
    space = open_space(piece_bytes=PIECE)
    extent = store(space, memory(PIECE))
    with pytest.raises(OSError, match=os.strerror(getattr(errno, failure))):
        space.link(extent, target, 0)


def test_the_system_call_is_made_as_the_kernel_wants_it(tmp_path: Path) -> None:
    """On a file system that cannot share blocks it is refused, and nothing else; where it can, the bytes are there."""
    data = os.urandom(2 * BLOCK)
    (tmp_path / "source").write_bytes(data)
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "made", "w+b") as made:
        try:
            sharing._share(source.fileno(), BLOCK, BLOCK, made.fileno(), 0)
        except OSError as error:
            assert error.errno in sharing._REFUSED
        else:
            assert made.read() == data[BLOCK:]

"""File systems that share blocks between files: a stand-in where there is none, and a real one in a file.

    with shared_blocks() as shares:            # bytes are copied where blocks would be shared
        shares.failing = {3: errno.EXDEV}.get  # and the third call fails

Invariants: 1. a call has whole blocks, as the kernel wants them. 2. where `REAL` is set the calls are made: this
process is on a file system that can (`tests/checkpoint/test_linked.py` starts such processes).
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest import mock

from tiered.io import share
from tiered.io.drive import BLOCK

REAL = "TIERED_TEST_SHARES_BLOCKS"


class Shares:
    """The calls that were made, and those that fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # start there, bytes, start here
        self.failing: Callable[[int], int | None] = lambda number: None  # of a call, from 1 on: its errno
        self._genuine = share._share

    def share(self, source: int, start: int, nbytes: int, target: int, offset: int) -> None:
        assert not any(each % BLOCK for each in (start, nbytes, offset))
        self.calls.append((start, nbytes, offset))
        if (failure := self.failing(len(self.calls))) is not None:
            raise OSError(failure, os.strerror(failure))
        if os.environ.get(REAL):
            self._genuine(source, start, nbytes, target, offset)
        else:
            assert os.pwrite(target, os.pread(source, nbytes, start), offset) == nbytes


@contextlib.contextmanager
def shared_blocks() -> Iterator[Shares]:
    """Whatever is linked while the block lasts is."""
    shares = Shares()
    with mock.patch.object(share, "_share", shares.share):
        yield shares

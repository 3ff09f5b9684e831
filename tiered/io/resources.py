"""What a swap space holds of the system: directories, files, engines and the thread that watches them.

Apart from the space, so that it can be released after the space is collected.

Invariants:
1. `release` gives back all of it, each part also when another one failed: engines first, directories last.
2. Nothing of a drive that does not answer is touched: its threads and descriptors are left to the system, its directory
   to a later run, and one warning names them. Where something is committed it is left on the other drives too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Sequence

from tiered.errors import StorageError, TieredError
from tiered.io.directory import ClaimedDirectory, claim
from tiered.io.drive import Drive
from tiered.io.engine import Engine, chosen_mode, open_engine
from tiered.io.generations import Generations
from tiered.io.patience import Patience

_LOGGER = logging.getLogger("tiered")


class Resources:
    """See the file's contract."""

    def __init__(self, generations: Generations | None, timeout_s: float | None) -> None:
        self.claims: list[ClaimedDirectory] = []
        self.drives: list[Drive] = []
        self.engines: list[Engine] = []
        self.generations = generations
        self.patience = Patience(timeout_s)
        self._dead = False  # a drive does not answer

    def claim(self, directories: Sequence[str | os.PathLike[str]], rank: int) -> None:
        """Claims a place in each directory."""
        if self.generations is not None:
            self.claims = self.generations.open(directories, rank)
            return
        for path in directories:
            self.claims.append(claim(path, rank))

    def open(self, claimed: ClaimedDirectory, threads: int, piece_bytes: int) -> None:
        """Opens a drive and an engine in a directory."""
        existing = self.generations is not None and self.generations.untouched
        try:
            self.drives.append(Drive(claimed, direct=chosen_mode() == "native", existing=existing))
            self.engines.append(open_engine(self.drives[-1], threads=threads, piece_bytes=piece_bytes))
            self.patience.watch(self.engines[-1], self.drives[-1].path)
        except TieredError:
            raise
        except (OSError, RuntimeError) as error:
            number = getattr(error, "errno", None) or errno.EAGAIN
            what = f"{threads} I/O threads with their files cannot be had: {error}; give fewer, or raise the limits"
            raise StorageError(number, what, claimed.path) from error

    def in_callback(self) -> bool:
        """Whether the caller is a completion callback, or the thread that watches."""
        return self.patience.is_current() or any(engine.in_callback() for engine in self.engines)

    def release(self) -> None:
        """Waits for I/O, closes the files, removes the directories."""
        with contextlib.ExitStack() as stack:  # the last that is pushed comes first
            held = [contextlib.ExitStack() for _ in self.claims]  # by drive
            for each, claimed in zip(held, self.claims, strict=True):
                stack.callback(each.close)
                each.callback(self._part, claimed)
            if self.generations is not None and held:
                held[0].callback(self.generations.close)  # whose records are there
            for each, drive in zip(held, self.drives, strict=False):
                each.callback(drive.close)
            stack.callback(self.patience.stop)
            for each, drive, engine in zip(held, self.drives, self.engines, strict=False):
                stack.callback(self._end, engine, drive, each)

    def release_collected(self) -> None:
        """`release` for a space nobody closed, which the last callback of a ticket may have held."""
        if self.in_callback():
            threading.Thread(target=self.release, name="tiered-io-release").start()
        else:
            self.release()

    def _end(self, engine: Engine, drive: Drive, held: contextlib.ExitStack) -> None:
        """Closes an engine; what its drive holds is left where calls on it are still out."""
        behind = engine.close()
        stuck = self.generations is not None and self.generations.stuck
        if behind or stuck:
            held.pop_all()  # closing or removing a file there could wait for ever, and a late call may use a descriptor
            self._dead = True
            what = [f"{behind} transfers"] * bool(behind) + ["a commit"] * stuck
            _LOGGER.warning(
                "%s: not back from the drive: %s; threads and descriptors are left to the system, and the directory to "
                "the next run there",
                *(drive.path, " and ".join(what)),
            )

    def _part(self, claimed: ClaimedDirectory) -> None:
        generations = self.generations
        stays = generations is not None and (
            generations.untouched
            or (generations.committed and (generations.left or self._dead or _ending_by_an_error()))
        )
        (claimed.leave if stays else claimed.release)()


def _ending_by_an_error() -> bool:
    """The interpreter ends, and what ends it is an exception that nobody caught."""
    return not threading.main_thread().is_alive() and getattr(sys, "last_value", None) is not None

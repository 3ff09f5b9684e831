"""Background: the thread on which a save goes on beside training, and what waits for it.

    READING --the states are read--> FINISHING --every rank's data is there, rank 0 commits--> OVER
    what fails, on any rank -------------------------------------------------------------> OVER, with `failure`

Invariants:
1. States change only after READING: `hold`, which is `TieredStore.before_change`, waits for that and for no more.
2. It comes to its end on every rank, and alike, whatever the user's threads do; a program that ends waits for it.
3. A failure is logged when it happens, and raised once, by whoever asks next (`ShardedModel.end_saving`).
Leaves to whom: what is written is the job's, how ranks agree is `sidecar`'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tiered.checkpoint.share import Written
from tiered.checkpoint.sidecar import Sidecars
from tiered.errors import StorageError, TieredError
from tiered.zero.model import ShardedModel

_LOGGER = logging.getLogger("tiered")
_SIGN_S = 1.0  # between signs of life to other ranks


class Job(Protocol):
    """A save that every rank has begun."""

    where: str
    """The checkpoint's folder, for messages."""

    def write(self, *, alive: Callable[[], None], read: Callable[[], None]) -> Written:
        """Write this rank's share; see `share.Share.write`."""

    def commit(self, written: Sequence[Written]) -> None:
        """On rank 0: what all ranks have written is the checkpoint."""

    def drop(self) -> None:
        """On rank 0: remove what all ranks have written, unless it is the checkpoint."""

    def close(self) -> None:
        """Give back what writing has taken."""


class Background:
    """See the file's contract."""

    def __init__(self, sharded: ShardedModel, job: Job, sidecars: Sidecars) -> None:
        self.failure: TieredError | None = None
        self._sharded = sharded
        self._job = job
        self._sidecars = sidecars
        self._read = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="tiered-save")

    def start(self) -> None:
        """From now on the model waits for it where it has to."""
        self._sharded.saving = self
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left: then it is not in the background
            self._serve()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def hold(self) -> None:
        """Return once the states may change."""
        self._await(self._read)

    def wait(self) -> None:
        """Return once it is over. An interrupt (Ctrl-C) passes, and it goes on."""
        self._await(self._over)
        if self._thread.ident is not None:
            self._thread.join()

    # --- inside ---

    def _await(self, event: threading.Event) -> None:
        if event.is_set():
            return
        doing = "a wait for a save in the background"
        with self._sharded.runtime.meter.stalled("save"), self._sharded.computing(doing):
            while not event.wait(_SIGN_S):
                self._sharded.alive(doing)

    def _serve(self) -> None:
        try:
            self._go()
        except Exception as error:
            self.failure = _named(error, self._job.where)
            _LOGGER.error("%s", self.failure)
            self._give_up(str(self.failure))
        finally:
            self._read.set()
            self._job.close()
            self._over.set()

    def _go(self) -> None:
        ranks = self._sharded.runtime.ranks
        with self._sharded.runtime.meter.span(f"save to {self._job.where}", "save"):
            mine = self._job.write(alive=_nothing, read=self._read.set)
        if ranks.rank:
            self._sidecars.say(mine)
            self._sidecars.verdict()
        else:
            self._job.commit([mine, *self._sidecars.collect(ranks.size)])
            self._sidecars.dismiss(ranks.size)

    def _give_up(self, why: str) -> None:
        if self._sharded.runtime.ranks.rank:
            self._sidecars.fail(why)
        else:
            self._sidecars.refuse(self._sharded.runtime.ranks.size)
            self._job.drop()


def _nothing() -> None:
    return None


def _named(error: Exception, where: str) -> TieredError:
    """What the user is told, later and elsewhere; without frames, which would keep the model."""
    what = f"the save in the background to {where} failed"
    failure: TieredError
    if isinstance(error, OSError):
        failure = StorageError(error.errno or 0, f"{what}: {error.strerror or error}", error.filename or where)
    elif isinstance(error, TieredError):
        failure = type(error)(f"{what}: {error}")
    else:
        failure = StorageError(0, f"{what}: {type(error).__name__}: {error}", where)
    failure.__cause__ = error.with_traceback(None)
    return failure

"""Sidecars: how the ranks of a save in the background agree on its end, through the folder that all of them write to.

A thread beside training cannot call other ranks: what goes between ranks goes in the order of the users' calls.

    rank r > 0   writes rank-r.safetensors, then rank-r.json: what is where in it    or removes the data, having failed
    rank 0       has seen all of them: commits, then removes rank-*.json             or renames those, and removes all
    rank r > 0   rank-r.json is gone, and the data is there: committed               or it is not, or rank-r.json.new is

Invariants:
1. A sidecar is whole once it is there: it is renamed into place, after its data has been flushed.
2. All ranks end alike: with the checkpoint committed, or each with an error; but a rank that is lost, or from which
   nothing comes for `patience_s`, ends the waiting of the others with one.
3. Data that rank 0 has been told of is removed by rank 0 alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tiered.checkpoint.folder import Folder, listed
from tiered.errors import RankError, StorageError

T = TypeVar("T")
_POLL_S = (0.005, 0.25)  # at first, and at most


class Sidecars:
    """One rank's side; see the file's contract."""

    def __init__(self, folder: Folder, drawn: str, rank: int, *, check: Callable[[], None], patience_s: float) -> None:
        """check: raises RankError where a rank is lost."""
        self._folder = folder
        self._inside = folder.path / drawn
        self._rank = rank
        self._check = check
        self._patience_s = patience_s
        self._offered = False  # rank 0 may have been told, so the data may be the checkpoint

    def say(self, said: dict[str, Any]) -> None:
        """This rank's data is on the drive. Raises StorageError where it cannot be said, or rank 0 gave up."""
        path = self._inside / f"rank-{self._rank}.json"
        new = path.with_suffix(".json.new")
        with self._folder.named("what this rank has saved cannot be said"):
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as out:
                json.dump(said, out)
            try:
                self._offered |= "failed" not in said
                os.rename(new, path)
            except OSError:
                self._offered &= not new.exists()  # what is there still has not been renamed, whatever was answered
                raise

    def fail(self, why: str) -> None:
        """This rank has failed: rank 0 is told, with the reason if the drive still takes it."""
        with contextlib.suppress(OSError):
            os.unlink(self._inside / f"rank-{self._rank}.json.new")
        with contextlib.suppress(OSError):
            self.say({"failed": why})
        if not self._offered:
            with contextlib.suppress(OSError):
                os.unlink(self._data(self._rank))
        if not self._data(0).exists():  # rank 0 has failed too, and gone before
            self._folder.drop(self._inside.name)

    def verdict(self) -> None:
        """Wait for rank 0's. Raises StorageError where it has given up."""
        mine = self._inside / f"rank-{self._rank}.json"
        self._until(lambda: None if mine.exists() else True)
        if not self._data(self._rank).exists() or mine.with_suffix(".json.new").exists():
            raise StorageError(errno.EIO, "another rank failed, and rank 0 has given up", str(self._folder.path))

    def collect(self, ranks: int) -> list[dict[str, Any]]:
        """On rank 0: wait for what all the others say. Raises StorageError where one has failed."""
        return [self._until(lambda rank=rank: self._heard(rank)) for rank in range(1, ranks)]  # type: ignore[misc]

    def dismiss(self, ranks: int) -> None:
        """On rank 0: it is committed."""
        for rank in range(1, ranks):
            with contextlib.suppress(OSError):
                os.unlink(self._inside / f"rank-{rank}.json")

    def refuse(self, ranks: int) -> None:
        """On rank 0: it has given up."""
        for rank in range(1, ranks):
            path = self._inside / f"rank-{rank}.json"
            with contextlib.suppress(OSError):
                os.rename(path, path.with_suffix(".json.new"))

    # --- inside ---

    def _data(self, rank: int) -> Any:
        return self._inside / f"rank-{rank}.safetensors"

    def _heard(self, rank: int) -> dict[str, Any] | None:
        there = self._data(rank).exists()  # asked first: what a rank says that fails comes before its data goes
        try:
            said: dict[str, Any] = json.loads((self._inside / f"rank-{rank}.json").read_bytes())
        except FileNotFoundError:
            if there:
                return None
            said = {"failed": "it could not say why"}
        if "failed" in said:
            raise StorageError(errno.EIO, f"rank {rank} failed: {said['failed']}", str(self._folder.path))
        return said

    def _until(self, look: Callable[[], T | None]) -> T:
        """What `look` finds, as soon as it finds something."""
        wait, size, since = _POLL_S[0], -1, time.monotonic()
        while (found := look()) is None:
            try:
                self._check()
                size, before = self._size(), size
                since = time.monotonic() if size != before else since
                if time.monotonic() - since > self._patience_s:
                    raise RankError(f"no rank has written anything for {self._patience_s:g} s")
            except RankError:  # perhaps of one that left when all was done
                if (found := look()) is not None:
                    return found
                raise
            time.sleep(wait)
            wait = min(wait * 1.5, _POLL_S[1])
        return found

    def _size(self) -> int:
        """Of all that ranks have written: while it grows, they work."""
        with contextlib.suppress(OSError):
            return sum(entry.stat().st_size for entry in listed(self._inside))
        return -1

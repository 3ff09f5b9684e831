"""Generations: what of a swap space is committed, and what a dead run has left committed there.

    nothing --commit--> 1 --commit--> 2 --> ...          two records, written in turn: the last commit is always whole
    opened over a dead run's directory: found (its records) --choose one--> protected --revert--> the space's contents
                                                            --choose none--> forgotten

Invariants:
1. What is protected, or committed, is not overwritten until the next commit is whole on the drive.
2. A record that is neither is cleared before anything that it names may be overwritten.
3. The directories are kept only while there is a whole record: a kill leaves nothing that nobody goes on from.
4. Where the drives write past the page cache, a commit costs the drive one flush; in the "power" mode one more, before
   the record, so that no record is there before what it names; and so wherever something fresh was written, as what the
   file system knows of the file would else be older than the record.
5. While the drive holds a commit that was given up nothing is written to what it may still name.
Leaves to swapfile.py when nothing is in flight.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from tiered.errors import CorruptDataError, StorageError, UsageError
from tiered.io.commit import Commit, Identity, Kept, RecordFile, decode, encode, newest_first
from tiered.io.directory import ClaimedDirectory, adopt, claim
from tiered.io.drive import Drive
from tiered.io.engine import RECORD, PieceState
from tiered.io.errand import Errand
from tiered.io.extent import Extent
from tiered.io.weights import Weights

Durability = Literal["process", "power"]
_FILES = ("commit-0", "commit-1")


class Generations:
    """See the file's contract."""

    def __init__(self, identity: Identity, durability: Durability, limit_s: float | None) -> None:
        """limit_s: how long the drives may take over a commit, twice; None: for ever."""
        self.identity = identity
        self.run = "0" * 16
        self.strangers: list[str] = []
        """What dead runs of the same model, laid out otherwise, have left: in words, with its directory."""
        self._durability = durability
        self._limit_s = limit_s
        self._errand: Errand | None = None  # commits
        self._claims: list[ClaimedDirectory] = []
        self._drives: list[Drive] = []
        self._found: list[tuple[Commit, int]] = []  # newest first; and its file
        self._protected: Commit | None = None
        self._bound: dict[str, Kept] = {}  # of the protected generation, what no extent has been given yet
        self._files: list[RecordFile] = []
        self._last = 1  # the file of the last commit
        self._serial = 0
        self._unsynced = True  # something fresh has been written
        self._marked = False  # the directories are known to have a generation
        self.weights: Weights = ()
        """How this run shares its pieces out over the drives; what is found says it, where something is."""
        self.left = False
        """It is to stay on the drives when the space is closed."""
        self.untouched = False
        """What a dead run has left is there as it was: nothing has gone on from it, or taken its place."""

    # --- what a dead run has left ---

    def open(self, paths: Sequence[str | os.PathLike[str]], rank: int) -> list[ClaimedDirectory]:
        """A directory on each drive: those of a dead run of the same identity, or new ones."""
        found: list[tuple[Commit, int]] = []

        def fits(claimed: ClaimedDirectory) -> bool:
            read = _records(claimed)
            alike = [each for each in read if each[0].identity.layout == self.identity.layout]
            if not alike and read and read[0][0].identity.model == self.identity.model:
                self.strangers.append(f"{claimed.path}, {read[0][0].identity.words}")
            found[:] = alike
            return bool(alike)

        with contextlib.ExitStack() as undo:
            first = adopt(paths[0], rank, fits)
            if first is not None:
                undo.callback(first.leave)
                claims = [first]
                for path, name in zip(paths[1:], found[0][0].names[1:], strict=True):
                    other = adopt(path, rank, lambda claimed, name=name: claimed.name == name)  # type: ignore[misc]
                    if other is None:
                        break
                    undo.callback(other.leave)
                    claims.append(other)
                if len(claims) == len(paths):
                    undo.pop_all()
                    self._found, self._claims = found, claims
                    self._marked = self.untouched = True
                    return claims
        with contextlib.ExitStack() as undo:
            self._claims = []
            for path in paths:
                self._claims.append(claim(path, rank))
                undo.callback(self._claims[-1].release)
            undo.pop_all()
        return self._claims

    def attach(self, drives: list[Drive]) -> None:
        """The drives are open. What is found that does not lie on them is not offered."""
        self._drives = drives
        if self.untouched:
            self._files = [RecordFile(self._claims[0].reopen(name), self._path(name)) for name in _FILES]
        self._found = [each for each in self._found if self._lies_there(each[0])]
        if self._found:
            self.weights = self._found[0][0].weights

    @property
    def path(self) -> str:
        """Of the directory on the first drive."""
        return self._claims[0].path

    @property
    def offers(self) -> list[tuple[int, str]]:
        """The serial and the run of what can be gone on from, the newest first."""
        return [(commit.serial, commit.run) for commit, _ in self._found]

    def choose(self, serial: int | None, run: str, after: int) -> None:
        """Protect the generation `serial` of what was found, None: none; forget the others. run: of what is committed
        from now on; after: a serial that all that is committed comes after. Raises StorageError."""
        self.run, self._serial = run, after
        for commit, file in self._found:
            if commit.serial == serial:
                self._protected, self._last = commit, file
                self._bound = {kept.label: kept for kept in commit.extents}
        if self._protected is None and self.untouched:
            self.untouched = self._marked = False
            for claimed in self._claims:
                with self._named(claimed.path):
                    claimed.unkeep()
        for number, record in enumerate(self._files):
            if self._protected is None or number != self._last:
                with self._named(record.path):
                    record.clear()
        self._found = []
        for kept in self._bound.values():
            self._reserve(kept)

    @property
    def protected(self) -> bytes | None:
        """The payload of the generation that `revert` brings back; None where there is none."""
        return None if self._protected is None else self._protected.payload

    def bind(self, label: str, nbytes: int, piece_bytes: int) -> Extent | None:
        """The extent that has the protected contents of `label`, itself blank; None where nothing is protected."""
        kept = self._bound.pop(label, None)
        if kept is None:
            return None
        stripes = kept.stripes
        if (stripes.nbytes, stripes.piece_bytes) != (nbytes, piece_bytes):
            raise UsageError(f"{label} has {nbytes} bytes, but {stripes.nbytes} in {self._claims[0].path}")
        records = np.zeros(2 * stripes.pieces, dtype=RECORD)
        extent = Extent(stripes.nbytes, label, stripes, kept.starts, records, kept.slots.copy(), kept.slots.copy())
        records[extent.record(np.arange(stripes.pieces))] = kept.records
        extent.turn(range(stripes.pieces))
        return extent

    def revert(self, extents: Sequence[Extent]) -> None:
        """Make the protected generation, or the last commit, the contents of `extents` again."""
        lacking = [extent.label for extent in extents if extent.committed is None]
        if lacking or self._bound:
            raise UsageError(
                f"the generation in {self._claims[0].path} has other blocks than this model (here alone: {lacking}, "
                f"there alone: {list(self._bound)}): freeze and thaw as it was there before going on from it"
            )
        for extent in extents:
            if extent.committed is not None:
                extent.slots[:] = extent.committed
                extent.beside[:] = False
        self.untouched = False

    # --- committing ---

    def written(self, fresh: bool) -> None:
        """Something has been written; see `Extent.fresh`."""
        self._unsynced |= fresh

    def check(self) -> None:
        """Raise StorageError while nothing may be written."""
        if self._errand is not None:
            self._errand.check()

    def commit(self, extents: Sequence[Extent], payload: bytes) -> None:
        """Make the contents of `extents` and `payload` the last commit. Raises StorageError, and then the commit before
        is the last one still."""
        commit = Commit(
            serial=self._serial + 1,
            run=self.run,
            identity=self.identity,
            names=tuple(claimed.name for claimed in self._claims),
            weights=self.weights,
            extents=tuple(_kept(extent) for extent in extents),
            payload=payload,
        )
        if self._errand is None:
            self._errand = Errand(self._limit_s, self._path(_FILES[0]), "a commit")
        self._errand.run(lambda: self._land(commit), self._undo)
        self._last, self._serial, self._unsynced, self._marked = 1 - self._last, commit.serial, False, True
        self._protected, self.untouched = None, False
        for kept in self._bound.values():  # of the generation before, what nothing was made for
            self._free(kept)
        self._bound = {}
        for extent in extents:
            extent.committed = extent.slots.copy()

    def _land(self, commit: Commit) -> None:
        """What has been written, and then the record that names it, are on the drives; or no such record is."""
        if not self._files:
            self._files = [RecordFile(self._claims[0].create(name), self._path(name)) for name in _FILES]
        if self._unsynced or self._durability == "power" or not all(drive.direct for drive in self._drives):
            for drive in self._drives:
                drive.sync()
        record = self._files[1 - self._last]
        try:
            with self._named(record.path):
                record.write(encode(commit))
            if not self._marked:
                for claimed in self._claims:
                    with self._named(claimed.path):
                        claimed.keep()
        except BaseException:  # what it names will be written over, so it must not count, though it may be whole
            with contextlib.suppress(OSError):
                self._undo()
            raise

    def _undo(self) -> None:
        """The record that was to be the last one names nothing. Raises OSError."""
        if self._files:
            self._files[1 - self._last].clear()
        if not self._marked:
            for claimed in self._claims:
                claimed.unkeep()

    @property
    def committed(self) -> bool:
        """There is a generation to go on from."""
        return self._marked

    @property
    def stuck(self) -> bool:
        """A commit was given up, and the drive still holds it: its files are not to be touched."""
        return self._errand is not None and self._errand.out

    def close(self) -> None:
        if not self.stuck:
            for record in self._files:
                record.close()
            self._files = []

    # --- inside ---

    def _path(self, name: str) -> str:
        return os.path.join(self._claims[0].path, name)

    @contextlib.contextmanager
    def _named(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise StorageError(error.errno or 0, f"a commit cannot be written: {reason}", path) from error

    def _lies_there(self, commit: Commit) -> bool:
        """All that a record names is on the drives, and apart."""
        taken: list[Kept] = []
        try:
            for kept in commit.extents:
                self._reserve(kept)
                taken.append(kept)
        except CorruptDataError:
            return False
        finally:
            for kept in taken:
                self._free(kept)
        return True

    def _reserve(self, kept: Kept) -> None:
        done: list[tuple[Drive, int, int]] = []
        try:
            for slot in kept.starts:
                for index, drive in enumerate(self._drives):
                    if span := kept.stripes.span(index):
                        drive.reserve(slot[index], span)
                        done.append((drive, slot[index], span))
        except BaseException:
            for drive, start, span in done:
                drive.give_back(start, span)
            raise

    def _free(self, kept: Kept) -> None:
        for slot in kept.starts:
            for index, drive in enumerate(self._drives):
                if span := kept.stripes.span(index):
                    drive.give_back(slot[index], span)


def _records(claimed: ClaimedDirectory) -> list[tuple[Commit, int]]:
    """The sound records of a directory, the newest first, each with the number of its file."""
    found: dict[int, tuple[Commit, int]] = {}
    for number, name in enumerate(_FILES):
        path = os.path.join(claimed.path, name)
        with contextlib.suppress(OSError):
            record = RecordFile(claimed.reopen(name), path)
            try:
                commit = decode(record.read(), path)
                if commit.names[0] == claimed.name:
                    found[commit.serial] = commit, number
            finally:
                record.close()
    return [found[commit.serial] for commit in newest_first([commit for commit, _ in found.values()])]


def _kept(extent: Extent) -> Kept:
    contents = extent.contents
    if not np.isin(contents["state"], (PieceState.BLANK, PieceState.VALID)).all():
        raise StorageError(errno.EIO, f"{extent.label} has bytes that could not be written: it is not committed")
    return Kept(extent.label, extent.stripes, extent.starts, extent.slots.copy(), contents)

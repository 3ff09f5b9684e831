"""Looking at swap directories: what is in them, without a trace.

Invariants:
1. Nothing is written, made, removed or locked: neither a live run nor a later claim can notice.
2. No link is followed; only plain files of this user with one name are opened, and opening waits for nothing.
3. A record is taken into memory only where its file is as long as it says itself, and at most LARGEST_BYTES of it.

As no lock is taken, whether an owner lives is told by its identity alone (owner.py): one in another PID namespace of
the same host looks dead, which a claim would learn from its lock. What is seen of a live run may be changing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tiered.errors import CorruptDataError, StorageError
from tiered.io import owner
from tiered.io.commit import Commit, decode
from tiered.io.drive import BLOCK
from tiered.io.owner import Owner

NAME = re.compile(r"tiered-[0-9a-f]{16}-r([0-9]{1,9})")
LOCK, KEPT, SWAP, RECORDS = "lock", "kept", "swap", ("commit-0", "commit-1")
LARGEST_BYTES = 256 << 20  # of a record
_HEAD_BYTES = 32
_MOST_ENTRIES = 10_000

RecordState = Literal["sound", "torn", "blank"]


@dataclass(frozen=True, slots=True)
class SeenRecord:
    """One of the two files of records."""

    path: str
    state: RecordState  # blank: nothing has been committed there yet, or it was taken back
    says: str  # why it is torn
    commit: Commit | None  # where it is sound


@dataclass(frozen=True, slots=True)
class Seen:
    """A swap directory."""

    path: str
    refused: str  # why nothing of it was read; "" where it was
    harmless: bool  # refused as it is another user's, or gone by now
    entries: Mapping[str, int]  # bytes that each takes on the drive
    owner: Owner | None  # None: nobody has signed the lock file
    alive: bool | None
    records: tuple[SeenRecord, ...]
    file_bytes: int  # of the swap file

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def rank(self) -> int:
        found = NAME.fullmatch(self.name)
        return int(found[1]) if found else 0

    @property
    def kept(self) -> bool:
        """It says that a later run may go on from it."""
        return KEPT in self.entries

    @property
    def sound(self) -> list[Commit]:
        """The commits that can be read, the newest first."""
        found = [record.commit for record in self.records if record.commit is not None]
        return sorted(found, key=lambda commit: commit.serial, reverse=True)


def look(path: str) -> Seen:
    """What is in a swap directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _refused(path, "it is gone by now", harmless=True)
    except OSError as error:
        link = os.path.islink(path)
        return _refused(path, "a link is not followed" if link else os.strerror(error.errno or 0))
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return _refused(path, f"it belongs to user {status.st_uid}", harmless=True)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return _refused(path, "others may write to it, so no run uses or removes it: remove it, or chmod go-w it")
        entries = dict(itertools.islice(_entries(descriptor), _MOST_ENTRIES + 1))
        if len(entries) > _MOST_ENTRIES:
            return _refused(path, f"it has more than {_MOST_ENTRIES} entries, where a run makes five")
        signed, alive = _owner(path, entries)
        records = tuple(_record(path, name) for name in RECORDS if name in entries)
        return Seen(path, "", False, entries, signed, alive, records, _swap_bytes(path, entries))
    except OSError as error:
        return _refused(path, os.strerror(error.errno or 0))
    finally:
        os.close(descriptor)


def opened(path: str, name: str) -> int:
    """A descriptor of a file in a swap directory, for reading. Raises StorageError."""
    whole = os.path.join(path, name)
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StorageError(error.errno or 0, f"cannot be opened: {os.strerror(error.errno or 0)}", whole) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise StorageError(errno.EPERM, "it is no plain file of this user with one name, so it is not read", whole)
    return descriptor


def misplaced(commit: Commit, sizes: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Ranges (drive, start, bytes) of a commit that do not lie in swap files of these sizes, or on others of it. Drives
    without a size are not looked at."""
    found = []
    for drive, size in sizes.items():
        spans = [(slot[drive], kept.stripes.span(drive)) for kept in commit.extents for slot in kept.starts]
        end = 0
        for start, nbytes in sorted(span for span in spans if span[1]):
            if start % BLOCK or start < end or start + nbytes > size // BLOCK * BLOCK:
                found.append((drive, start, nbytes))
            end = max(end, start + nbytes)
    return found


def _refused(path: str, why: str, harmless: bool = False) -> Seen:
    return Seen(path, why, harmless, {}, None, None, (), 0)


def _entries(descriptor: int) -> Iterator[tuple[str, int]]:
    with os.scandir(descriptor) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # its run ends meanwhile
                about = os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
                yield entry.name, about.st_blocks * 512


def _owner(path: str, entries: Mapping[str, int]) -> tuple[Owner | None, bool | None]:
    """Who has signed the lock file, and whether it lives: a directory that a claim has not finished has none."""
    if LOCK not in entries:
        return None, None if entries else False
    try:
        descriptor = opened(path, LOCK)
    except StorageError:
        return None, None
    try:
        signed = owner.read(descriptor)
    except OSError:
        return None, None
    finally:
        os.close(descriptor)
    if signed is None:
        return None, None if len(entries) > 1 else False
    return signed, signed.alive


def _swap_bytes(path: str, entries: Mapping[str, int]) -> int:
    if SWAP not in entries:
        return 0
    try:
        descriptor = opened(path, SWAP)
    except StorageError:
        return 0
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _record(path: str, name: str) -> SeenRecord:
    whole = os.path.join(path, name)
    try:
        descriptor = opened(path, name)
        try:
            head = os.pread(descriptor, _HEAD_BYTES, 0)
            if not any(head):
                return SeenRecord(whole, "blank", "", None)
            nbytes, there = _HEAD_BYTES + int.from_bytes(head[16:24], "little"), os.fstat(descriptor).st_size
            if nbytes > there:  # a shorter record than the one before leaves the end of that
                raise CorruptDataError(0, f"it has {there} bytes, and says {nbytes}", whole)
            if nbytes > LARGEST_BYTES:
                raise CorruptDataError(0, f"it says {nbytes} bytes, at most {LARGEST_BYTES} are read", whole)
            commit = decode(_read(descriptor, nbytes), whole)
        finally:
            os.close(descriptor)
    except OSError as error:
        return SeenRecord(whole, "torn", error.strerror or str(error), None)
    if commit.names[0] != os.path.basename(path):
        says = f"it is a record of {commit.names[0]}: a directory was renamed or copied, and no run goes on from that"
        return SeenRecord(whole, "torn", says, None)
    return SeenRecord(whole, "sound", "", commit)


def _read(descriptor: int, nbytes: int) -> bytes:
    parts, at = [], 0
    while at < nbytes and (part := os.pread(descriptor, min(1 << 24, nbytes - at), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)

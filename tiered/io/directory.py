"""One swap directory per run and rank: who owns it, and what a dead owner left behind.

`claim(path, rank)` makes `<path>/tiered-<id>-r<rank>/` and keeps it until `release()`; `adopt` takes over one that a
dead owner left with something to go on from, and `leave` leaves one so:

    <path>                      the user's; must exist, be writable and be no link
    `-- tiered-<id>-r<rank>/    ours, 0700
        |-- lock                0600, flock held while we live; names pid, process start, host and boot
        |-- kept                0600, there once it has something that a later run may go on from
        `-- ...                 0600, made by `create`, gone after `release`

Invariants:
1. Nothing is written before `path` has been looked at, and no link is ever followed below or at its last component.
2. Every claim has a directory of its own, so any number of processes and models share one `path`.
3. A directory is reclaimed only when its lock can be taken *and* its owner is provably dead: same host, and another
   boot, no such process, or a process that started at another time. Whatever is unclear is left alone.
4. Claiming and reclaiming happen under a lock on `path` itself. So a directory without a complete lock file, seen
   under that lock, belongs to a claim that died half-way. Where `path` cannot be locked nothing is reclaimed.
5. What has `kept` is removed by its owner only, or by who adopts it; a claim says once where it is.
6. The lock file goes last, so a removal that was interrupted can be completed by the next claim.
7. A forked child releases nothing: the directory is its parent's.

Leaves to drive.py what the files contain. Linux only: identity comes from /proc.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tiered.errors import SwapDirectoryError, SwapFullError, TieredError

_LOGGER = logging.getLogger("tiered")
_NAME = re.compile(r"tiered-[0-9a-f]{16}-r[0-9]+")
_LOCK, _KEPT = "lock", "kept"
_IDENTITY_BYTES = 512  # of a lock file, always: one write replaces all of it
_ENDED: dict[str, str | int] = {
    "pid": 0,
    "started": "ended",
}  # of an owner that has left its directory: dead, whatever else runs
_PATH_LOCK_SECONDS = 30.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class ClaimedDirectory:
    """A swap directory that belongs to this process until `release()`.

    Attributes:
        path: its absolute path, for messages.
    """

    def __init__(self, path: str, parent_fd: int, directory_fd: int, lock_fd: int) -> None:
        self.path = path
        self._parent_fd = parent_fd
        self._fd = directory_fd
        self._lock_fd = lock_fd
        self._owner = os.getpid()
        self._released = False

    def create(self, name: str) -> int:
        """Makes the file `name` (0600) and returns a descriptor open for reading and writing; the caller closes it.

        Raises SwapDirectoryError where it exists already or cannot be made.
        """
        try:
            descriptor = os.open(name, _FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise _refusal(os.path.join(self.path, name), "the swap file cannot be made there", error) from error
        return descriptor

    def reopen(self, name: str, flags: int = 0) -> int:
        """Opens a file made by `create` once more, with `flags` added; raises OSError as the system says it."""
        return os.open(name, _FILE | flags, dir_fd=self._fd)

    @property
    def name(self) -> str:
        """Of the directory, without its path."""
        return os.path.basename(self.path)

    def keep(self) -> None:
        """From now on it has something that a later run may go on from. Raises OSError."""
        os.close(os.open(_KEPT, _FILE | os.O_CREAT, 0o600, dir_fd=self._fd))
        os.fsync(self._fd)
        os.fsync(self._parent_fd)

    def unkeep(self) -> None:
        """It has nothing of that kind any more. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_KEPT, dir_fd=self._fd)
            os.fsync(self._fd)

    def release(self) -> None:
        """Removes the directory with all its files and gives up the lock. Idempotent; raises nothing.

        In a forked child only the descriptors are closed.
        """
        if not self._released and os.getpid() == self._owner:
            _remove(self._parent_fd, self.name, self._fd)
        self._close()

    def leave(self) -> None:
        """Gives up the lock, and leaves the directory to who adopts it. Idempotent; raises nothing."""
        if not self._released and os.getpid() == self._owner:
            with contextlib.suppress(OSError):  # then the owner is dead once this process is
                _write_identity(self._lock_fd, {**_own_identity(), **_ENDED})
        self._close()

    def _close(self) -> None:
        if not self._released:
            self._released = True
            for descriptor in (self._fd, self._lock_fd, self._parent_fd):
                os.close(descriptor)


def check(path: str | os.PathLike[str]) -> None:
    """Raises SwapDirectoryError where `path` is missing, a link, no directory or not writable; writes nothing."""
    os.close(_open_parent(os.path.abspath(os.fspath(path))))


def claim(path: str | os.PathLike[str], rank: int = 0) -> ClaimedDirectory:
    """Claims a fresh directory under `path` and removes what dead owners left there.

    Raises SwapDirectoryError, before anything is written, where `path` is missing, a link, no directory or not
    writable; SwapFullError where the drive is full.
    """
    absolute = os.path.abspath(os.fspath(path))
    parent_fd = _open_parent(absolute)
    try:
        with _path_lock(parent_fd, absolute) as locked:
            if locked:
                _reclaim(parent_fd, absolute)
            return _make(parent_fd, absolute, f"tiered-{secrets.token_hex(8)}-r{rank}")
    except BaseException as error:
        os.close(parent_fd)
        if isinstance(error, OSError) and not isinstance(error, TieredError):
            raise _refusal(absolute, "a directory for this run cannot be made in it", error) from error
        raise


def adopt(
    path: str | os.PathLike[str], rank: int, wanted: Callable[[ClaimedDirectory], bool]
) -> ClaimedDirectory | None:
    """Takes over the directory under `path`, of the same rank, that a dead owner left with something to go on from and
    that `wanted` takes; the newest of several, None where there is none. Raises as `claim`."""
    absolute = os.path.abspath(os.fspath(path))
    parent_fd = _open_parent(absolute)
    try:
        with _path_lock(parent_fd, absolute) as locked:
            for name in _left(parent_fd, rank) if locked else ():
                claimed = _take_over(os.path.join(absolute, name), parent_fd, name)
                if claimed is None:
                    continue
                try:
                    if wanted(claimed):
                        _reclaim(parent_fd, absolute)
                        return claimed
                except BaseException:
                    claimed.leave()
                    raise
                claimed.leave()
    finally:
        os.close(parent_fd)
    return None


# --- claiming -------------------------------------------------------------------------------------------------------


def _open_parent(path: str) -> int:
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            target = os.path.realpath(path)
            raise SwapDirectoryError(
                errno.ELOOP,
                f"the swap directory is a symbolic link, which is not followed; give its target instead ({target})",
                path,
            )
        if not stat.S_ISDIR(mode):
            raise SwapDirectoryError(errno.ENOTDIR, "the swap directory is a file; give a directory on the drive", path)
        descriptor = os.open(path, _DIRECTORY)
    except SwapDirectoryError:
        raise
    except FileNotFoundError as error:
        raise SwapDirectoryError(
            errno.ENOENT, f"the swap directory does not exist; make it first (mkdir -p {path})", path
        ) from error
    except OSError as error:
        raise _refusal(path, "the swap directory cannot be opened", error) from error
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=descriptor, effective_ids=True):
        os.close(descriptor)
        raise SwapDirectoryError(
            errno.EACCES, "the swap directory is not writable by this user; change its owner or give another", path
        )
    return descriptor


@contextlib.contextmanager
def _path_lock(parent_fd: int, path: str) -> Iterator[bool]:
    """Holds the lock on `path`, opened anew so that threads exclude each other too; gives False where none exists."""
    descriptor = os.open(".", _DIRECTORY, dir_fd=parent_fd)
    try:
        yield _try_flock(descriptor, path, _PATH_LOCK_SECONDS)
    finally:
        os.close(descriptor)


def _try_flock(descriptor: int, path: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise SwapDirectoryError(
                errno.EAGAIN,
                f"another process has kept this directory locked for {seconds:g} s while claiming a place in it; "
                "see who holds it (lslocks) or give another directory",
                path,
            ) from error
        except OSError:
            return False  # a file system without flock
        return True


def _make(parent_fd: int, parent: str, name: str) -> ClaimedDirectory:
    path = os.path.join(parent, name)
    directory_fd = lock_fd = -1
    try:
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        directory_fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
        if os.fstat(directory_fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the new directory was replaced by another user's")
        os.fchmod(directory_fd, 0o700)
        lock_fd = os.open(_LOCK, _FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory_fd)
        os.fchmod(lock_fd, 0o600)
        with contextlib.suppress(OSError):  # no flock here: then nobody reclaims here either (invariant 4)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_identity(lock_fd, _own_identity())
    except OSError:
        if directory_fd >= 0:
            _remove(parent_fd, name, directory_fd)
        else:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent_fd)
        for descriptor in (directory_fd, lock_fd):
            if descriptor >= 0:
                os.close(descriptor)
        raise
    return ClaimedDirectory(path, parent_fd, directory_fd, lock_fd)


def _refusal(path: str, what: str, error: OSError) -> SwapDirectoryError | SwapFullError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SwapFullError(error.errno, f"{what}: {reason}; free space there or give another directory", path)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return SwapDirectoryError(error.errno, f"{what}: {reason}; raise the limit (ulimit -n) or close files", path)
    return SwapDirectoryError(error.errno, f"{what}: {reason}; give a writable directory on a local drive", path)


# --- reclaiming -----------------------------------------------------------------------------------------------------


def _reclaim(parent_fd: int, parent: str) -> None:
    for name in os.listdir(parent_fd):
        if not _NAME.fullmatch(name):
            continue
        try:
            descriptor = os.open(name, _DIRECTORY, dir_fd=parent_fd)
        except OSError:
            continue  # a link, no directory, another user's, or just removed
        try:
            if not _ours(descriptor) or not _is_dead(descriptor):
                continue
            if _KEPT in os.listdir(descriptor):
                _LOGGER.warning(
                    "%s is the swap directory of a run that ended before its time, and keeps its last step: a run of "
                    "the same model and settings goes on from it by tiered.resume(); remove it if it is not wanted",
                    os.path.join(parent, name),
                )
                continue
            _remove(parent_fd, name, descriptor)
            _LOGGER.info("removed the swap directory of a dead run: %s", os.path.join(parent, name))
        finally:
            os.close(descriptor)


def _ours(descriptor: int) -> bool:
    """The directory is this user's, and nobody else may write to it."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _left(parent_fd: int, rank: int) -> list[str]:
    """Directories of `rank` with something to go on from, the newest first."""
    found: list[tuple[float, str]] = []
    for name in os.listdir(parent_fd):
        if _NAME.fullmatch(name) and name.endswith(f"-r{rank}"):
            with contextlib.suppress(OSError):
                kept = os.stat(f"{name}/{_KEPT}", dir_fd=parent_fd, follow_symlinks=False)
                found.append((kept.st_mtime, name))
    return [name for _, name in sorted(found, reverse=True)]


def _take_over(path: str, parent_fd: int, name: str) -> ClaimedDirectory | None:
    """The directory as this process's own; None where it is not ours, or its owner is not provably dead."""
    descriptors: list[int] = []
    try:
        descriptors.append(os.open(name, _DIRECTORY, dir_fd=parent_fd))
        if _ours(descriptors[0]) and _is_dead(descriptors[0]):
            descriptors.append(os.open(_LOCK, _FILE, dir_fd=descriptors[0]))
            fcntl.flock(descriptors[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_identity(descriptors[1], _own_identity())
            descriptors.append(os.dup(parent_fd))
            directory_fd, lock_fd, parent = descriptors
            descriptors = []
            return ClaimedDirectory(path, parent, directory_fd, lock_fd)
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _is_dead(directory_fd: int) -> bool:
    """Whether the directory's owner is provably dead (invariant 3)."""
    try:
        lock_fd = os.open(_LOCK, _FILE, dir_fd=directory_fd)
    except FileNotFoundError:
        return not os.listdir(
            directory_fd
        )  # invariants 4 and 5: died before the lock was made, or after it was removed
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = os.pread(lock_fd, 4096, 0)
    except OSError:
        return False
    finally:
        os.close(lock_fd)
    try:
        owner = json.loads(text)
        pid, started, host, boot = int(owner["pid"]), str(owner["started"]), owner["host"], owner["boot"]
    except (ValueError, TypeError, KeyError):
        return os.listdir(directory_fd) == [_LOCK]  # invariant 4: died before the identity was complete
    if host != socket.gethostname():
        return False
    return bool(boot != _boot_id() or started != _start_time(pid))


def _remove(parent_fd: int, name: str, directory_fd: int) -> None:
    """Removes the files of a directory, the lock last, then the directory; what cannot be removed is reported."""
    try:
        entries = os.listdir(directory_fd)
    except OSError:
        entries = [_LOCK]  # listing takes a descriptor, and there may be none left while a claim is being undone
    try:
        for entry in sorted(entries, key=lambda entry: entry == _LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=directory_fd)
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        if error.errno != errno.ENOENT:
            _LOGGER.warning("a swap directory could not be removed: %s (%s)", name, error)


# --- identity -------------------------------------------------------------------------------------------------------


def _write_identity(lock_fd: int, identity: dict[str, str | int]) -> None:
    os.pwrite(lock_fd, json.dumps(identity).encode().ljust(_IDENTITY_BYTES), 0)


def _own_identity() -> dict[str, str | int]:
    pid = os.getpid()
    return {"pid": pid, "started": _start_time(pid), "host": socket.gethostname(), "boot": _boot_id()}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot (proc(5), stat field 22); empty where there is no such one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # the command before ")" may hold anything, spaces and ")" included

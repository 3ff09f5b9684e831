"""A file or folder that is written beside its place, and put there at one instant.

    <parent>/.<name>.<drawn>.new  is written, flushed  ->  renamed to <parent>/<name>, or exchanged with what is there

Invariants:
1. Killed at any instant, the place holds what it held before, or the new file or folder, whole. Where the file system
   cannot exchange two folders, there is an instant with neither in place; then both are whole beside it.
2. What is there is replaced only if that was asked for, and a folder only where it holds files alone. Those that are
   none of the format's own (a model card, a tokenizer) stay in the folder.
3. Leavings of a killed run are removed by the next one with the same place. Names are drawn anew each time: of two at
   once the first to sweep wins, the other fails, and neither puts a partial one in place.
4. No link is followed at the place itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tiered.checkpoint.folder import flush_folder, listed
from tiered.errors import StorageError, TieredError

_AT_FDCWD, _EXCHANGE = -100, 2  # linux/fcntl.h, RENAME_EXCHANGE of linux/fs.h
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


@contextlib.contextmanager
def new_folder(place: Path, own: re.Pattern[str], *, force: bool) -> Iterator[Path]:
    """Inside, an empty folder to write flushed files to; at the end it is at `place`. own: what names of files the
    format gives. Raises StorageError where something is there (without `force`) or it cannot be written."""
    check(place, force=force, folder=True)
    with _failing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        made = _drawn(place)
        made.mkdir(mode=0o777)
    with _undone(made), _failing(place):
        yield made
        replaces = os.path.lexists(place)
        for name in os.listdir(place) if replaces else ():
            if not own.fullmatch(name):
                os.link(place / name, made / name, follow_symlinks=False)
        flush_folder(made)
        if replaces:
            _exchange(made, place)
        else:
            os.rename(made, place)
        flush_folder(place.parent)
        if replaces:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def new_file(place: Path, *, force: bool) -> Iterator[Path]:
    """Inside, a path to make a flushed file at; at the end it is at `place`. Raises as `new_folder`."""
    check(place, force=force, folder=False)
    with _failing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        made = _drawn(place)
    with _undone(made), _failing(place):
        yield made
        os.rename(made, place)
        flush_folder(place.parent)


def create(path: Path) -> int:
    """A descriptor of a new file, for writing, of its folder's invariants: never one that was there."""
    with _failing(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def check(place: Path, *, force: bool, folder: bool) -> None:
    """Raises StorageError where `place` is taken by what may not be replaced."""
    try:
        about = os.lstat(place)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(error.errno or 0, os.strerror(error.errno or 0), str(place)) from error
    right = stat.S_ISDIR(about.st_mode) if folder else stat.S_ISREG(about.st_mode)
    if not right:
        raise StorageError(
            errno.EEXIST, f"something else is there, expected a {'folder' if folder else 'file'}", str(place)
        )
    if folder and not os.listdir(place):
        return
    if not force:
        raise StorageError(
            errno.EEXIST, "it exists: give another place, or replace it with force (--force)", str(place)
        )
    if folder:
        for entry in listed(place):
            if not entry.is_file(follow_symlinks=False):
                raise StorageError(
                    errno.EEXIST,
                    f"the folder holds {entry.name!r}, which is no file: give a folder of its own",
                    str(place),
                )


def _drawn(place: Path) -> Path:
    """A name beside `place` that nobody has, and nothing else of that kind there."""
    old = re.compile(re.escape(f".{place.name}.") + r"[0-9a-f]{16}\.new")
    for entry in listed(place.parent):
        if old.fullmatch(entry.name):
            _remove(Path(entry.path))
    return place.parent / f".{place.name}.{secrets.token_hex(8)}.new"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _exchange(new: Path, old: Path) -> None:
    """`new` and `old` change places."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _CANNOT:
            raise OSError(number, os.strerror(number), str(old))
    aside = new.with_name(new.name.removesuffix(".new") + ".old")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


@contextlib.contextmanager
def _undone(made: Path) -> Iterator[None]:
    """Where it fails, what is half written goes."""
    try:
        yield
    except BaseException:
        _remove(made)
        raise


@contextlib.contextmanager
def _failing(place: Path) -> Iterator[None]:
    """What the system says, as this package says it."""
    try:
        yield
    except TieredError:
        raise
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else str(error.filename or place)
        raise StorageError(error.errno or 0, f"cannot be written: {os.strerror(error.errno or 0)}", path) from error

"""tiered.inspect: what is at a path, a checkpoint or several, or swap directories; and whether it is sound.

Invariants:
1. Nothing is written, locked or removed, and no link is followed.
2. What is wrong is a finding; an error is raised only where there is nothing to say anything of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tiered.checkpoint.folder import ID, MANIFEST, NEW, OTHER, STEP, newest_first
from tiered.errors import StorageError, UsageError
from tiered.inspection.checkpoint import inspect_checkpoint
from tiered.inspection.reading import Progress, Work
from tiered.inspection.report import Checkpoint, Finding, Findings, Inspection, SwapDirectory
from tiered.inspection.swap import inspect_swap
from tiered.io.look import NAME

_SHOWN = 3  # entries of a folder that is none of this package's


def inspect(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    verify: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Say what is at `path`, and what of it is wrong. One process calls it, without a model; it only reads.

    path: a checkpoint's folder, one that holds several (`save(keep=...)`), the directory that was given as `nvme`, or
        one of the `tiered-<id>-r<rank>` in that; several for a run over several drives.
    verify: read every byte, and check its hash or checksum; at most some MiB are in memory at once.
    progress: called with the bytes verified and of all; what it raises ends it.

    What it says of a run that is going on may be changing; where that run has gone on while it was read, it says so.
    Raises StorageError where `path` is missing, a link or a file, UsageError where nothing there is of this package.
    """
    given = [path] if isinstance(path, (str, os.PathLike)) else path
    paths = [os.path.abspath(os.fspath(each)) for each in given]
    if not paths:
        raise UsageError("inspect(): got no path: give a checkpoint's folder or a swap directory")
    found = Findings()
    folders: dict[Path, tuple[bool, bool]] = {}  # newest, several
    swaps: dict[str, None] = {}
    empty = True
    for each in paths:
        _check(each)
        here, there = _folders(Path(each), found), _swaps(Path(each), found)
        folders |= here
        swaps |= dict.fromkeys(there)
        empty = empty and not here and not there
        if not here and not there and not found.any:
            _check_empty(Path(each))
    checkpoints = [inspect_checkpoint(each, newest=n, several=s) for each, (n, s) in folders.items()]
    directories = inspect_swap(list(swaps))
    if verify:
        tell = _Tally(progress, sum(work.nbytes for _, work in (*checkpoints, *directories)))
        checkpoints = [(_verified(each, work, tell), work) for each, work in checkpoints]
        directories = [(_verified(each, work, tell), work) for each, work in directories]
    kind = "empty" if empty else "both" if folders and swaps else "checkpoint" if folders else "swap"
    return Inspection(
        paths=tuple(paths),
        kind=kind,  # type: ignore[arg-type]
        checkpoints=tuple(each for each, _ in checkpoints),
        directories=tuple(each for each, _ in directories),
        findings=found.all(paths[0]),
    )


_Thing = TypeVar("_Thing", Checkpoint, SwapDirectory)


class _Tally:
    """Bytes verified so far, told to who asked."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self.done = progress, total, 0

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self._progress is not None:
            self._progress(self.done, self._total)


def _verified(thing: _Thing, work: Work, tell: _Tally) -> _Thing:
    before = tell.done
    wrong: tuple[Finding, ...] = work.run(tell)
    return dataclasses.replace(thing, findings=(*thing.findings, *wrong), verified_bytes=tell.done - before)


# --- what a path means ---


def _check(path: str) -> None:
    """Raises StorageError where there is no folder."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            target = os.path.realpath(path)
            raise StorageError(errno.ELOOP, f"a link, which is not followed: give its target ({target})", path)
        if not stat.S_ISDIR(mode):
            raise StorageError(errno.ENOTDIR, "not a folder: give a checkpoint's folder or a swap directory", path)
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except StorageError:
        raise
    except OSError as error:
        says = "it does not exist" if error.errno == errno.ENOENT else os.strerror(error.errno or 0)
        raise StorageError(error.errno or 0, f"cannot be inspected: {says}", path) from error


def _folders(path: Path, found: Findings) -> dict[Path, tuple[bool, bool]]:
    """The checkpoints there: whether each is the newest, and one of several."""
    if any(name in (MANIFEST, NEW) or ID.fullmatch(name) for name in _names(path)):
        return {path: (True, False)}
    _say_links(path, STEP.fullmatch, found)
    steps = newest_first(path)
    alone = len(steps) == 1
    return {each: (number == 0 and (each / MANIFEST).exists(), not alone) for number, each in enumerate(steps)}


def _swaps(path: Path, found: Findings) -> list[str]:
    """The swap directories there."""
    if NAME.fullmatch(path.name):
        return [str(path)]
    _say_links(path, NAME.fullmatch, found)
    named = [name for name in _names(path) if NAME.fullmatch(name)]
    return [str(path / name) for name in sorted(named) if not _is_odd(path / name)]


def _say_links(path: Path, wanted: Callable[[str], object], found: Findings) -> None:
    for name in _names(path):
        if wanted(name) and _is_odd(path / name):
            found.add("refused", path / name, "a link or a file where a folder should be, which is not looked into")


def _is_odd(path: Path) -> bool:
    try:
        return not stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False  # gone meanwhile


def _check_empty(path: Path) -> None:
    """Raises UsageError where a folder has something, and nothing of this package."""
    names = list(itertools.islice(_names(path), _SHOWN))
    if names:
        what = "another program's checkpoint, which tiered import reads" if any(map(OTHER.search, names)) else ""
        raise UsageError(
            f"inspect(): {path} holds no checkpoint and no swap directory, but {', '.join(map(repr, names))}, ...: "
            f"{what or 'give the folder of save() or the nvme directory'}"
        )


def _names(path: Path) -> Iterator[str]:
    """Of what is in a folder; one that cannot be listed has been found to be readable before, and is gone."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            yield entry.name

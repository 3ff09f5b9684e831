"""Swap directories: who owns them, what generation a later run would go on from, and every byte of that.

What belongs together (one run, over ranks and drives) is told by the records, which lie on a rank's first drive.
Invariants:
1. Only what io.look opens is read: a live run, and a later one, find everything as it was.
2. Verified are the pieces of the last generation, by the checksum that the record says. The one before has been, or is
   being, overwritten, and blank pieces have no bytes.
3. What changes under a live run is no fault: where it has committed meanwhile, what was found is dropped.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tiered.errors import CorruptDataError, StorageError
from tiered.inspection.reading import WINDOW_BYTES, Tell, Work, digest
from tiered.inspection.report import Contents, Finding, Findings, Record, SwapDirectory, count, texts
from tiered.io.checksum import Checksum, checksum
from tiered.io.commit import Commit, Kept
from tiered.io.engine import PieceState
from tiered.io.look import KEPT, LOCK, RECORDS, SWAP, Seen, look, misplaced, opened
from tiered.optim import generation

_KNOWN = {LOCK, KEPT, SWAP, *RECORDS}
_NAMED = 20  # foreign entries, parameters of a piece
_SETTLE_SECONDS = 0.2
_GONE_ON = "its run has gone on while it was read, so no more can be said: inspect it again once that has ended"
_LONGEST = 255  # characters of a name that is passed on
_STATES = {True: "alive", False: "dead", None: "unclear"}


class _Group(NamedTuple):
    """Of a group of parameters, in its elements: what a block of each kind holds; names with their first and last."""

    spans: Mapping[str, tuple[int, int]]
    slots: Sequence[tuple[str, int, int]]


_Groups = Mapping[str, _Group]


class _Piece(NamedTuple):
    """Where a piece of a generation is."""

    drive: int
    offset: int
    nbytes: int
    checksum: int
    kept: Kept
    at: int  # its first byte in the extent


def inspect_swap(paths: Sequence[str]) -> list[tuple[SwapDirectory, Work]]:
    """What is in swap directories, of any drives, ranks and runs, and what there is to verify of each."""
    seen = [look(path) for path in paths]
    by_name = {each.name: each for each in seen}
    owners = {name: each for each in seen for commit in each.sound[:1] for name in commit.names[1:]}
    made = [_directory(each, by_name, owners.get(each.name)) for each in seen]
    checked = _across_ranks([directory for directory, _ in made])
    joined = [(directory, work) for directory, (_, work) in zip(checked, made, strict=True)]
    return sorted(joined, key=lambda one: (one[0].run or "", one[0].rank, one[0].path))


# --- what is there ---


def _directory(seen: Seen, by_name: Mapping[str, Seen], first: Seen | None) -> tuple[SwapDirectory, Work]:
    """first: the directory whose record names this one, on another drive."""
    found, commit = Findings(), next(iter(seen.sound), None)
    drives = {} if commit is None else {n: by_name[name] for n, name in enumerate(commit.names) if name in by_name}
    contents, work = None, Work(0, lambda tell: ())
    if seen.refused:
        found.add("refused", seen.path, f"nothing of it was read: {seen.refused}", fault=not seen.harmless)
    _say_records(found, seen)
    _say_entries(found, seen)
    placed = commit is not None and _say_places(found, seen, commit, drives)
    if commit is not None and not placed and seen.alive is not False and _moved_on(seen, commit):
        found = Findings()
        found.add("changing", seen.path, _GONE_ON, fault=False)
    if commit is not None:
        contents = _contents(found, seen, commit)
        bad_mode = _mode(commit) is None
        if bad_mode:
            found.add("unsound", seen.path, f"its record says no checksum that is known: {commit.identity.layout!r}")
        elif placed:
            work = Work(sum(_by_drive(commit, drives)), partial(_verify, seen, commit, drives))
        placed = placed and contents is not None and not bad_mode
    resumable, why = _resumable(seen, commit, drives, placed, first)
    if not resumable and seen.alive is False and not seen.kept and not seen.refused:
        found.add(
            "leftover", seen.path, "a dead run's, with nothing to go on from: the next run removes it", fault=False
        )
    named = [] if commit is None else [_drive_name(drives, n, name) for n, name in enumerate(commit.names)]
    directory = SwapDirectory(
        path=seen.path,
        rank=seen.rank,
        run=commit.run if commit is not None else first.sound[0].run if first is not None else None,
        owner=_STATES[seen.alive],  # type: ignore[arg-type]
        pid=seen.owner.pid or None if seen.owner is not None else None,
        host=seen.owner.host[:_LONGEST] if seen.owner is not None else None,
        resumable=resumable,
        why=why,
        records=tuple(_records(seen, commit)),
        contents=contents,
        bytes_by_drive={} if commit is None else dict(zip(named, _by_drive(commit), strict=True)),
        weight_by_drive={} if commit is None else dict(zip(named, commit.weights, strict=True)),
        disk_bytes=sum(seen.entries.values()),
        verified_bytes=None,
        findings=found.all(seen.path),
    )
    return directory, work


def _drive_name(drives: Mapping[int, Seen], number: int, name: str) -> str:
    return drives[number].path if number in drives else f"drive {number + 1}, {name}"


def _records(seen: Seen, last: Commit | None) -> Iterator[Record]:
    for record in seen.records:
        serial = None if record.commit is None else record.commit.serial
        yield Record(path=record.path, state=record.state, serial=serial, last=record.commit is last is not None)


def _say_records(found: Findings, seen: Seen) -> None:
    torn = [record for record in seen.records if record.state == "torn"]
    for record in torn:
        if seen.alive is not False:
            found.add("changing", record.path, f"not whole at this moment: {record.says}", fault=False)
        elif seen.sound:
            found.add("torn", record.path, f"{record.says}. The other record opens: at most one step is lost")
        else:
            found.add("unsound", record.path, record.says)
    if seen.alive is False and seen.kept and not seen.sound and not torn and seen.records:
        found.add("missing", seen.path, "it is kept for a later run, and has no record of what there is")


def _say_entries(found: Findings, seen: Seen) -> None:
    foreign = [name for name in seen.entries if name not in _KNOWN]
    for name in foreign[:_NAMED]:
        says = "no part of a swap directory: whoever removes the directory removes it too"
        found.add("foreign", os.path.join(seen.path, name), says)
    if len(foreign) > _NAMED:
        found.add("foreign", seen.path, f"and {len(foreign) - _NAMED} entries more")


def _say_places(found: Findings, seen: Seen, commit: Commit, drives: Mapping[int, Seen]) -> bool:
    """Whether all that a commit names lies in the swap files there are."""
    for number, name in enumerate(commit.names):
        if number not in drives:
            says = f"{name} on drive {number + 1} of {len(commit.names)}: give the directory on that drive too"
            found.add("not looked at", seen.path, says, fault=False)
    sizes = {}
    for number, drive in drives.items():
        path = os.path.join(drive.path, SWAP)
        try:
            os.close(opened(drive.path, SWAP))
            sizes[number] = drive.file_bytes
        except StorageError as error:
            found.add("missing" if error.errno == errno.ENOENT else "refused", path, error.strerror or str(error))
    wrong = misplaced(commit, sizes)
    for number, start, nbytes in wrong:
        path, size = os.path.join(drives[number].path, SWAP), sizes[number]
        says = f"the record names bytes {start} to {start + nbytes}; the file has {size}"
        if start + nbytes <= size:
            says = f"the record names bytes {start} to {start + nbytes} twice, or where no piece starts"
        found.add("short" if start + nbytes > size else "unsound", path, says, offset=start, nbytes=nbytes)
    return not wrong and len(sizes) == len(drives)


def _contents(found: Findings, seen: Seen, commit: Commit) -> Contents | None:
    try:
        progress = generation.read(commit.payload, seen.path)
    except CorruptDataError as error:
        found.add("unsound", seen.path, f"generation {commit.serial}: {error.strerror}")
        return None
    about = _about(commit)
    sizes = {name: stop - start for group in _groups(about).values() for name, start, stop in group.slots}
    by_kind: Counter[str] = Counter()
    for kept in commit.extents:
        by_kind[kept.label.partition(" of ")[0]] += kept.stripes.nbytes
    return Contents(
        step=progress.calls,
        ranks=count(about.get("ranks")),
        stage=count(about.get("stage")),
        parameters=len(sizes) or None,
        elements=sum(sizes.values()) or None,
        bytes_by_kind=dict(by_kind),
        versions=texts(about.get("versions")),
        config=texts(about.get("config")),
    )


def _about(commit: Commit) -> Mapping[str, Any]:
    about = generation.read_about(commit.payload)
    return about if isinstance(about, Mapping) else {}


def _resumable(
    seen: Seen, commit: Commit | None, drives: Mapping[int, Seen], placed: bool, first: Seen | None
) -> tuple[bool, str]:
    if seen.refused:
        return False, seen.refused
    if seen.alive:
        return False, f"process {seen.owner.pid if seen.owner else '?'} is using it: what is shown may be changing"
    if seen.alive is None:
        return False, "whether its owner is dead cannot be told from here: no run takes it over"
    if not seen.kept:
        return False, "its run had committed nothing"
    if first is not None:
        return False, f"its record is on the run's first drive, in {first.path}"
    if commit is None:
        where = "no record of it opens" if seen.records else "its record is on the run's first drive: give that too"
        return False, where
    if not placed:
        return False, "its last generation is not whole"
    if any(not drive.kept or drive.alive is not False or drive.refused for drive in drives.values()):
        return False, "its directory on another drive is not left for a later run"
    missing = len(commit.names) - len(drives)
    if missing:
        return False, f"{missing} of its {len(commit.names)} drives were not given"
    return True, f"tiered.resume() goes on from step {_step(commit)} in a run of the same model and settings"


def _step(commit: Commit) -> int | str:
    try:
        return generation.read(commit.payload, "").calls
    except CorruptDataError:
        return "?"


def _across_ranks(directories: list[SwapDirectory]) -> list[SwapDirectory]:
    """A run goes on where every rank has a generation in common, so one rank alone does not."""
    made = []
    for directory in directories:
        others = [each for each in directories if each.run == directory.run and each.resumable]
        ranks = directory.contents.ranks if directory.contents is not None else None
        lacking = sorted(set(range(min(ranks or 1, 4096))) - {each.rank for each in others})
        serials = [{record.serial for record in each.records if record.state == "sound"} for each in others]
        if directory.resumable and lacking:
            why = f"of {ranks} ranks, {', '.join(map(str, lacking[:_NAMED]))} have left nothing here to go on from"
            directory = dataclasses.replace(directory, resumable=False, why=why)
        elif directory.resumable and not set.intersection(*serials):
            why = "the ranks have no generation in common"
            directory = dataclasses.replace(directory, resumable=False, why=why)
        made.append(directory)
    return made


# --- every byte ---


def _mode(commit: Commit) -> Checksum | None:
    words = commit.identity.layout.split(" ")
    mode = words[-2] if len(words) > 1 else ""
    return checksum(mode) if mode in ("native", "portable") else None  # type: ignore[arg-type]


def _pieces(commit: Commit) -> Iterator[_Piece]:
    """What is not blank."""
    for kept in commit.extents:
        stripes = kept.stripes
        for number in range(stripes.pieces):
            if kept.records[number]["state"] == PieceState.VALID:
                drive, offset = stripes.place(number)
                start = kept.starts[int(kept.slots[number])][drive] + offset
                crc = int(kept.records[number]["checksum"])
                yield _Piece(drive, start, stripes.size(number), crc, kept, number * stripes.piece_bytes)


def _by_drive(commit: Commit, drives: Mapping[int, Seen] | None = None) -> list[int]:
    """Bytes of a generation on each drive, or on those alone."""
    made = [0] * len(commit.names)
    for piece in _pieces(commit):
        if drives is None or piece.drive in drives:
            made[piece.drive] += piece.nbytes
    return made


def _verify(seen: Seen, commit: Commit, drives: Mapping[int, Seen], tell: Tell) -> tuple[Finding, ...]:
    found, files = Findings(), dict[int, int]()
    groups, step = _groups(_about(commit)), _mode(commit)
    window, asked = bytearray(WINDOW_BYTES), False
    try:
        for number, drive in drives.items():
            files[number] = opened(drive.path, SWAP)
        for piece in _pieces(commit):
            if piece.drive in files and step is not None:
                _verify_piece(found, drives[piece.drive], files[piece.drive], piece, step, window, groups, tell)
            if found.any and not asked and (asked := seen.alive is not False) and _moved_on(seen, commit):
                break
    except StorageError as error:
        found.add("refused", error.filename or seen.path, error.strerror or str(error))
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    if found.any and seen.alive is not False and _moved_on(seen, commit):
        return (Finding(kind="changing", fault=False, path=seen.path, says=_GONE_ON),)
    return found.all(seen.path)


def _moved_on(seen: Seen, commit: Commit) -> bool:
    """The last generation is another one by now, or the directory is gone."""
    time.sleep(_SETTLE_SECONDS)  # a run that ends removes its files one by one
    now = look(seen.path)
    return not now.sound or now.sound[0].serial != commit.serial or len(now.sound) < len(seen.sound)


def _verify_piece(
    found: Findings,
    drive: Seen,
    file: int,
    piece: _Piece,
    step: Checksum,
    window: bytearray,
    groups: _Groups,
    tell: Tell,
) -> None:
    path = os.path.join(drive.path, SWAP)
    where: dict[str, Any] = {"offset": piece.offset, "nbytes": piece.nbytes, "of": tuple(_names(piece, groups))}
    what = f"{piece.nbytes} bytes of {piece.kept.label}, from its byte {piece.at} on"
    try:
        crc, done = digest(file, piece.offset, piece.nbytes, step, window, tell)
    except OSError as error:
        found.add("refused", path, f"{what}, cannot be read: {os.strerror(error.errno or 0)}", **where)
        return
    if done < piece.nbytes:
        found.add("short", path, f"{what}, end after {done}", **where)
    elif crc != piece.checksum:
        found.add("corrupt", path, f"{what}, are not those that were written (checksum)", **where)


def _names(piece: _Piece, groups: _Groups) -> Iterator[str]:
    """The parameters that have elements in a piece; its block, where the record does not tell."""
    kind, _, index = piece.kept.label.partition(" of group ")
    names: list[str] = []
    if index in groups and kind in groups[index].spans:
        first, last = groups[index].spans[kind]
        size = max(1, piece.kept.stripes.nbytes // (last - first))
        low, high = first + piece.at // size, first + -(-(piece.at + piece.nbytes) // size)
        names = [name for name, start, stop in groups[index].slots if start < high and stop > low]
    yield from names[:_NAMED] or [piece.kept.label]
    if len(names) > _NAMED:
        yield f"and {len(names) - _NAMED} more"


def _groups(about: Mapping[str, Any]) -> _Groups:
    """What a record tells of where parameters lie; what of it is not as it should be is left out."""
    made = {}
    told = about.get("groups")
    for index, group in told.items() if isinstance(told, Mapping) else ():
        spans, slots = (group.get("spans"), group.get("parameters")) if isinstance(group, Mapping) else (None, None)
        pairs = {kind: _range(span) for kind, span in spans.items()} if isinstance(spans, Mapping) else {}
        triples = [
            (slot[0][:_LONGEST], *found)
            for slot in (slots if isinstance(slots, list) else ())
            if isinstance(slot, list) and slot and isinstance(slot[0], str) and (found := _range(slot[1:])) is not None
        ]
        made[index] = _Group({kind: pair for kind, pair in pairs.items() if pair and pair[0] < pair[1]}, triples)
    return made


def _range(given: object) -> tuple[int, int] | None:
    if not isinstance(given, list) or len(given) != 2:
        return None
    start, stop = count(given[0]), count(given[1])
    return (start, stop) if start is not None and stop is not None and start <= stop else None

"""One checkpoint: what its folder holds, what is missing or too much there, and every byte against its hash.

Invariants:
1. Only the manifest and what it names is opened, and no link is followed.
2. Verified is every byte of every data file: pieces by their checksums, and the header, which has none, against the
   parts that the manifest names. Bytes are read once however often they are named.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tiered.checkpoint.folder import ID, MANIFEST, NEW, OTHER, Folder, listed, ours
from tiered.checkpoint.manifest import Manifest, Part
from tiered.checkpoint.slices import PAD, Reader, read_into
from tiered.checkpoint.spans import Span
from tiered.errors import CorruptDataError, StorageError
from tiered.inspection.reading import Tell, Work
from tiered.inspection.report import Checkpoint, Contents, Finding, Findings, count, texts

LARGEST_MANIFEST = 256 << 20  # bytes
_LARGEST_HEADER = 64 << 20
_NAMED = 20  # foreign entries, parts of a piece


class _Labelled(NamedTuple):
    """A part with what it is of, and bytes an element."""

    part: Part
    of: str
    itemsize: int

    @property
    def stop(self) -> int:
        return self.part.offset + self.nbytes

    @property
    def nbytes(self) -> int:
        return (self.part.stop - self.part.start) * self.itemsize


def inspect_checkpoint(path: Path, *, newest: bool, several: bool) -> tuple[Checkpoint, Work]:
    """What a checkpoint's folder holds, and what there is to verify. several: one of those of `save(keep=...)`."""
    stamp, looked = None, None
    while looked is None or stamp != _stamp(path):  # a save has replaced it meanwhile
        stamp = _stamp(path)
        looked = _look(path, newest, several, stamp)
    return looked


_Stamp = tuple[int, int] | None


def _stamp(path: Path) -> _Stamp:
    """Another one for another manifest."""
    try:
        status = os.lstat(path / MANIFEST)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _look(path: Path, newest: bool, several: bool, stamp: _Stamp) -> tuple[Checkpoint, Work]:
    found, folder = Findings(), Folder(path)
    made, work, disk_bytes = None, Work(0, lambda tell: ()), 0
    try:
        made = folder.manifest(LARGEST_MANIFEST)
    except StorageError as error:
        _say_unreadable(found, folder, error, several)
    if os.path.isdir(path) and not path.is_symlink():
        disk_bytes = _look_around(found, folder, made)
    if made is not None:
        there = set(_sizes(found, folder, made))
        by_file: dict[str, list[_Labelled]] = {name: [] for name in there}
        for named in _parts(made):
            if named.part.file in there and named.nbytes:
                by_file[named.part.file].append(named)
        total = sum(made.files[name] for name in there)
        work = Work(total, partial(_verify, folder, by_file, stamp))
    checkpoint = Checkpoint(
        path=str(folder.path),
        newest=newest,
        contents=None if made is None else _contents(made),
        bytes_by_rank={} if made is None else _by_rank(made),
        disk_bytes=disk_bytes,
        verified_bytes=None,
        findings=found.all(path),
    )
    return checkpoint, work


# --- what is there ---


def _say_unreadable(found: Findings, folder: Folder, error: StorageError, several: bool) -> None:
    path, says = error.filename or folder.path, error.strerror or str(error)
    if several and error.errno == errno.ENOENT:
        says = "a first save that is going on, or ended before its time: none of those that load takes"
        found.add("unfinished", folder.path, says, fault=False)
        return
    if isinstance(error, CorruptDataError):
        found.add("unsound", path, says)
    elif error.errno in (errno.EPERM, errno.ELOOP, errno.ENOTDIR):
        found.add("refused", path, says)
    else:
        found.add("missing" if error.errno == errno.ENOENT else "unsound", path, says)


def _look_around(found: Findings, folder: Folder, made: Manifest | None) -> int:
    """Take note of what is no part of the checkpoint; returns the bytes that the folder takes on the drive."""
    live = {name.split("/")[0] for name in made.files} if made is not None else set()
    known = {name.split("/")[1] for name in made.files} if made is not None else set()
    disk_bytes = foreign = 0
    try:
        for entry in listed(folder.path):
            if not ours(entry):
                foreign += 1
                if foreign <= _NAMED and not (made is None and OTHER.search(entry.name)):
                    says = "it is no part of a checkpoint, and the next save here is refused: move it elsewhere"
                    found.add("foreign", entry.path, says)
            elif entry.name == NEW:
                found.add(
                    "unfinished",
                    entry.path,
                    "a save commits, or ended while it did; the next one here removes it",
                    fault=False,
                )
            elif ID.fullmatch(entry.name):
                if entry.name not in live:
                    says = "data of a save that is going on, or ended before its time; the next one here removes it"
                    found.add("unfinished", entry.path, says, fault=False)
                for inner in listed(entry.path):
                    disk_bytes += _disk_bytes(inner)
                    if entry.name in live and inner.name not in known:
                        found.add("foreign", inner.path, "the manifest does not name it")
            if not entry.is_dir(follow_symlinks=False):
                disk_bytes += _disk_bytes(entry)
    except OSError as error:
        found.add("refused", error.filename or folder.path, f"cannot be listed: {os.strerror(error.errno or 0)}")
    if foreign > _NAMED:
        found.add("foreign", folder.path, f"and {foreign - _NAMED} entries more that are no part of a checkpoint")
    return disk_bytes


def _disk_bytes(entry: os.DirEntry[str]) -> int:
    return entry.stat(follow_symlinks=False).st_blocks * 512


def _sizes(found: Findings, folder: Folder, made: Manifest) -> Iterator[str]:
    """The files that are there; those whose size is another are found."""
    for name, size in made.files.items():
        path = folder.path / name
        try:
            there = folder.size(name)
        except StorageError as error:
            missing = error.errno == errno.ENOENT
            found.add("missing" if missing else "refused", path, error.strerror or str(error))
            continue
        if there != size:
            kind = "short" if there < size else "long"
            found.add(kind, path, f"the data file has {there} bytes, expected {size}")  # type: ignore[arg-type]
        yield name


def _parts(made: Manifest) -> Iterator[_Labelled]:
    for name, stored in made.parameters.items():
        for kind, whole in stored.kinds.items():
            for part in whole.parts:
                yield _Labelled(part, f"{kind} of {name}", whole.dtype.itemsize)
    names = {number: f"buffer {name}" for name, number in made.buffers.items()}
    for number, lone in enumerate(made.tensors):
        yield _Labelled(lone.part, names.get(number, "a tensor of extra"), 1)


def _contents(made: Manifest) -> Contents:
    by_kind: Counter[str] = Counter()
    for kinds in _by_rank(made).values():
        by_kind.update(kinds)
    config = texts(made.about.get("config"))
    return Contents(
        step=made.step,
        ranks=made.ranks,
        stage=count(config.get("stage")),
        parameters=len(made.parameters),
        elements=sum(stored.numel for stored in made.parameters.values()),
        bytes_by_kind=dict(by_kind),
        versions=texts(made.about.get("versions")),
        config=config,
    )


def _by_rank(made: Manifest) -> dict[str, dict[str, int]]:
    """What is stored, each byte once."""
    ranks: dict[str, dict[str, int]] = {}
    seen = set()
    for named in _parts(made):
        at = named.part.file, named.part.offset
        if named.nbytes and at not in seen:
            seen.add(at)
            kind = named.of.split(" ")[0] if named.itemsize > 1 else "other"
            rank = named.part.file.rpartition("-")[2].partition(".")[0]
            kinds = ranks.setdefault(rank, {})
            kinds[kind] = kinds.get(kind, 0) + named.nbytes
    return ranks


# --- every byte ---


def _verify(folder: Folder, by_file: dict[str, list[_Labelled]], stamp: _Stamp, tell: Tell) -> tuple[Finding, ...]:
    found = Findings()
    for name, parts in sorted(by_file.items()):
        path = folder.path / name
        by_span: dict[Span, list[_Labelled]] = {}
        for named in sorted(parts, key=lambda named: (named.part.offset, named.stop)):
            by_span.setdefault(named.part.span, []).append(named)
        try:
            with Reader(folder) as reader:
                _verify_header(found, folder, name, parts, tell)
                _verify_places(found, path, [named for inside in by_span.values() for named in inside])
                for span, inside in by_span.items():
                    _verify_span(found, reader, span, inside, path, tell)
        except StorageError as error:
            found.add("refused", path, error.strerror or str(error))
        if _stamp(folder.path) != stamp:
            says = "a save has replaced or removed the checkpoint while it was read: inspect it again"
            return (Finding(kind="changing", fault=False, path=str(folder.path), says=says),)
    return found.all(folder.path)


def _verify_places(found: Findings, path: Path, parts: list[_Labelled]) -> None:
    """No two parts have bytes in common, unless they have all."""
    last = None
    for named in parts:
        offset = named.part.offset
        if last is not None and offset < last.stop and (offset, named.stop) != (last.part.offset, last.stop):
            found.add("unsound", path, "two parts overlap", offset=offset, nbytes=0, of=(last.of, named.of))
        if last is None or named.stop > last.stop:
            last = named


def _verify_span(found: Findings, reader: Reader, span: Span, parts: list[_Labelled], path: Path, tell: Tell) -> None:
    bad = False  # the piece before
    for number in range(span.pieces):
        offset, nbytes = span.piece(number)
        try:
            reader.piece(span, number)
            bad = False
        except StorageError as error:
            of = tuple(named.of for named in parts if named.part.offset < offset + nbytes and named.stop > offset)
            more = (f"and {len(of) - _NAMED} more",) if len(of) > _NAMED else ()
            if bad:
                found.widen(nbytes, of[:_NAMED] + more)
            else:
                kind = "corrupt" if isinstance(error, CorruptDataError) else "refused"
                says = error.strerror or str(error)
                found.add(kind, path, says, offset=offset, nbytes=nbytes, of=of[:_NAMED] + more)  # type: ignore[arg-type]
            bad = True
        tell(nbytes)


def _verify_header(found: Findings, folder: Folder, name: str, parts: list[_Labelled], tell: Tell) -> None:
    """The header of the safetensors file: beside what only fills a place, it names the parts that the manifest does."""
    path = folder.path / name
    descriptor = folder.open(name)
    try:
        size = bytearray(8)
        read_into(memoryview(size), descriptor, 0, str(path))
        nbytes = int.from_bytes(size, "little")
        if nbytes > min(_LARGEST_HEADER, os.fstat(descriptor).st_size):
            raise ValueError(f"it says {nbytes} bytes")
        text = bytearray(nbytes)
        read_into(memoryview(text), descriptor, 8, str(path))
        tensors = [entry for key, entry in json.loads(text).items() if key != "__metadata__" and not PAD.fullmatch(key)]
        told = {tuple(8 + nbytes + at for at in entry["data_offsets"]) for entry in tensors}
        wanted = {(named.part.offset, named.stop) for named in parts}
        if {span for span in told if span[0] < span[1]} != wanted:
            raise ValueError("it names other bytes than the manifest")
        tell(8 + nbytes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        says = f"not the header that was written: {error}; tiered.load does not read it, other programs do"
        found.add("unsound", path, says, offset=0, nbytes=8)
    except StorageError as error:
        found.add("corrupt", path, f"the header: {error.strerror}", offset=0, nbytes=8)
    finally:
        os.close(descriptor)

"""Commit records: which bytes of a swap space are one whole generation, on the drive and whatever ends the process.

A record is a file beside the first swap file, and there are two, written in turn:

    magic (16 bytes) | bytes of the body (8) | xxh3 of the body (8) | body: bytes of the header (8) | header, JSON |
    slot of each piece (1 each) | checksum and state of each piece (8 each) | payload

Invariants:
1. A record is whole or it is none: its hash covers all of the body. What kills a write leaves the other record.
2. `decode` gives a record whose every number is in range, whatever the file holds, or raises CorruptDataError.
3. Each extent says by which weights its pieces are shared out over the drives, so where they lie is not for whoever
   reads it to find out anew. Records of version 1 know no weights: their pieces are dealt in turn.
4. A record says which pieces are whose; that they lie on the drives, and apart, is for who opens those to check.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tiered.errors import CorruptDataError
from tiered.io.engine import RECORD, PieceState, Records
from tiered.io.extent import Stripes
from tiered.io.weights import Weights, checked, equal

VERSION = 2
_READ = (1, 2)
LARGEST_BYTES = 1 << 30  # of a record: what a reader is ready to take into memory
_MAGIC = b"tiered commit 1\n"
_LARGEST = 1 << 53
_NAME = re.compile(r"tiered-[0-9a-f]{16}-r[0-9]+")
_TOKEN = re.compile(r"[0-9a-f]{16}")
_MOST_DRIVES = 256

Slots = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose generations these are: only what is laid out alike can go on from them."""

    model: str  # the same for the same parameters, however they are laid out
    layout: str  # the same where every piece lies alike, and is checked alike
    words: str  # for people


@dataclass(frozen=True, slots=True)
class Kept:
    """One extent of a generation."""

    label: str
    stripes: Stripes
    starts: tuple[tuple[int, ...], ...]  # of its range on each drive, for each slot
    slots: Slots  # (pieces,): where each piece's bytes of this generation are
    records: Records  # (pieces,): of those bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """One generation."""

    serial: int  # larger is later
    run: str  # the same on every rank of a run
    identity: Identity
    names: tuple[str, ...]  # of the directory on each drive
    weights: Weights  # of each drive, for what is allocated next; what there is has its own
    extents: tuple[Kept, ...]
    payload: bytes  # what the owner of the bytes says of them


def encode(commit: Commit) -> bytes:
    """The record as a file."""
    header = {
        "version": VERSION,
        "serial": commit.serial,
        "run": commit.run,
        "identity": [commit.identity.model, commit.identity.layout, commit.identity.words],
        "names": commit.names,
        "weights": commit.weights,
        "payload": len(commit.payload),
        "extents": [
            [kept.label, laid.nbytes, laid.piece_bytes, laid.phase, kept.starts, laid.weights]
            for kept, laid in ((kept, kept.stripes) for kept in commit.extents)
        ],
    }
    text = json.dumps(header).encode()
    slots = b"".join(kept.slots.tobytes() for kept in commit.extents)
    records = b"".join(kept.records.tobytes() for kept in commit.extents)
    body = b"".join([len(text).to_bytes(8, "little"), text, slots, records, commit.payload])
    return b"".join([_MAGIC, len(body).to_bytes(8, "little"), xxhash.xxh3_64_digest(body), body])


def decode(data: bytes, path: str) -> Commit:
    """Undo `encode`. Raises CorruptDataError naming `path` where it is no record, or not a sound one."""
    try:
        body = data[32 : 32 + int.from_bytes(data[16:24], "little")]
        if data[:16] != _MAGIC or xxhash.xxh3_64_digest(body) != data[24:32]:
            raise ValueError("its bytes are not those that were written")
        return _decoded(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptDataError(0, f"not a sound commit record: {type(error).__name__}: {error}", path) from None


def newest_first(found: Sequence[Commit]) -> list[Commit]:
    return sorted(found, key=lambda commit: commit.serial, reverse=True)


def _decoded(body: bytes) -> Commit:
    start = 8 + _count(int.from_bytes(body[:8], "little"), len(body))
    header: dict[str, Any] = json.loads(body[8:start])
    version = header["version"]
    if type(version) is not int or version not in _READ:
        raise ValueError(f"its version is {version!r}, and this package reads {' and '.join(map(str, _READ))}")
    names = tuple(_text(name, _NAME) for name in header["names"])
    if not 1 <= len(names) <= _MOST_DRIVES:
        raise ValueError(f"it names {len(names)} drives")
    weights = equal(len(names)) if version == 1 else checked(header["weights"], len(names))
    stripes = [_stripes(extent if version > 1 else [*extent, [*weights]], len(names)) for extent in header["extents"]]
    pieces = sum(each.pieces for each in stripes)
    payload = _count(header["payload"], len(body))
    if start + pieces * (1 + RECORD.itemsize) + payload != len(body):
        raise ValueError(f"it has {len(body)} bytes, but says {pieces} pieces and {payload} bytes beside them")
    slots = np.frombuffer(body, np.uint8, pieces, start)
    records = np.frombuffer(body, RECORD, pieces, start + pieces)
    if pieces and (slots.max() > 1 or not np.isin(records["state"], (PieceState.BLANK, PieceState.VALID)).all()):
        raise ValueError("a piece is in no slot or state that there is")
    extents, at = [], 0
    for (label, _, _, _, starts, *_), each in zip(header["extents"], stripes, strict=True):
        whose = slice(at, at + each.pieces)
        extents.append(
            Kept(_text(label), each, _starts(starts, len(names)), slots[whose].copy(), records[whose].copy())
        )
        at += each.pieces
    model, layout, words = (_text(part) for part in header["identity"])
    return Commit(
        serial=_count(header["serial"]),
        run=_text(header["run"], _TOKEN),
        identity=Identity(model, layout, words),
        names=names,
        weights=weights,
        extents=tuple(extents),
        payload=body[len(body) - payload :],
    )


def _stripes(extent: Any, drives: int) -> Stripes:
    _, nbytes, piece_bytes, phase, _, given = extent
    weights = checked(given, drives)
    if _count(piece_bytes, 1 << 40) < 1:
        raise ValueError(f"an extent has pieces of {piece_bytes} bytes")
    return Stripes(_count(nbytes), piece_bytes, weights, _count(phase, sum(weights) - 1))


def _starts(starts: Any, drives: int) -> tuple[tuple[int, ...], ...]:
    given = tuple(tuple(_count(start) for start in slot) for slot in starts)
    if len(given) != 2 or any(len(slot) != drives for slot in given):
        raise ValueError(f"an extent has ranges for {len(given)} slots")
    return given


def _count(value: Any, most: float = _LARGEST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no number of bytes or pieces here")
    return value


def _text(value: Any, shape: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or (shape is not None and not shape.fullmatch(value)):
        raise ValueError(f"{value!r} is no name")
    return value


class RecordFile:
    """One of the two files a space's records are in."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Owns `descriptor` until `close`."""
        self.path = path
        self._descriptor = descriptor

    def read(self) -> bytes:
        """All of it, up to LARGEST_BYTES. Raises OSError."""
        parts, at = [], 0
        while at < LARGEST_BYTES and (part := os.pread(self._descriptor, 1 << 24, at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def write(self, data: bytes) -> None:
        """Replace it, and see it to the drive. Raises OSError; then it may hold either, or none."""
        left, at = memoryview(data), 0
        while left:
            count = os.pwrite(self._descriptor, left, at)
            left, at = left[count:], at + count
        os.fdatasync(self._descriptor)

    def clear(self) -> None:
        """It holds no record any more, on the drive neither. Raises OSError."""
        os.pwrite(self._descriptor, bytes(32), 0)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

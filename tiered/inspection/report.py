"""What an inspection says, as values: the keys of `tiered inspect --json` are the fields here.

Sizes are bytes. Invariants:
1. A fault is something that is wrong; what is only worth knowing is a finding that is none.
2. However much is wrong, a report has at most MOST findings for each thing, and says how many it leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

MOST = 1000  # findings
_TEXTS, _CHARACTERS = 100, 500  # of versions and settings that are passed on

FindingKind = Literal[
    "missing",  # what there should be is not there
    "short",  # a file has fewer bytes than it should
    "long",  # or more
    "unsound",  # a manifest, record or header that is not what was written
    "torn",  # one record of two, and the other one opens
    "corrupt",  # bytes that are not those that were written
    "foreign",  # nothing of this package's
    "refused",  # not read, as it is not safe to: a link, or what others may change
    "unfinished",  # a save that was not committed; the next one removes it
    "leftover",  # a swap directory with nothing to go on from; the next run removes it
    "changing",  # of a live run
    "not looked at",  # lies where this inspection does not look
    "more",  # findings that were left out
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: FindingKind
    fault: bool
    path: str
    says: str
    offset: int | None = None
    nbytes: int | None = None
    of: tuple[str, ...] = ()
    """What the bytes are: parameters, or a block where it is not known which."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The training state that a checkpoint, or one rank's swap directory, holds."""

    step: int
    """Steps taken."""
    ranks: int | None
    stage: int | None
    parameters: int | None
    """How many tensors there are; None where it is not told, as below."""
    elements: int | None
    bytes_by_kind: Mapping[str, int]
    """"value", "exp_avg", "exp_avg_sq" and "other" (buffers, extra) of a checkpoint; "param", "master" and the moments
    of a swap directory."""
    versions: Mapping[str, str]
    config: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint's folder."""

    path: str
    newest: bool
    """It is the one that `load` takes from the folder that was given."""
    contents: Contents | None
    """None where there is no manifest that can be read."""
    bytes_by_rank: Mapping[str, Mapping[str, int]]
    """Rank -> kind -> bytes."""
    disk_bytes: int
    verified_bytes: int | None
    """None: nothing was verified."""
    findings: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One of the two records of a swap directory."""

    path: str
    state: Literal["sound", "torn", "blank"]
    serial: int | None
    last: bool
    """It is the one that a run goes on from."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapDirectory:
    """One rank's directory on one drive."""

    path: str
    rank: int
    run: str | None
    """The same for all that belong together; None where it has no record."""
    owner: Literal["alive", "dead", "unclear"]
    pid: int | None
    host: str | None
    resumable: bool
    """A later run of the same model and settings can go on from it, as far as can be seen without reading it all."""
    why: str
    """Why, or why not."""
    records: tuple[Record, ...]
    contents: Contents | None
    """Of the last generation."""
    bytes_by_drive: Mapping[str, int]
    """Path of the directory on each drive -> bytes of the last generation there."""
    weight_by_drive: Mapping[str, int]
    """The same paths -> the drive's share of what is swapped, beside the others' weights."""
    disk_bytes: int
    verified_bytes: int | None
    findings: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What is at some paths."""

    paths: tuple[str, ...]
    kind: Literal["checkpoint", "swap", "both", "empty"]
    checkpoints: tuple[Checkpoint, ...]
    """The newest first."""
    directories: tuple[SwapDirectory, ...]
    """By run and rank."""
    findings: tuple[Finding, ...]
    """Of the paths themselves."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """All that is wrong."""
        return tuple(finding for finding in self.all_findings() if finding.fault)

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.faults

    def all_findings(self) -> Iterator[Finding]:
        """Those of everything."""
        yield from self.findings
        for checkpoint in self.checkpoints:
            yield from checkpoint.findings
        for directory in self.directories:
            yield from directory.findings


class Findings:
    """Findings as they are made, see invariant 2."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._more = 0
        self._faults = False

    def add(self, kind: FindingKind, path: object, says: str, *, fault: bool = True, **more: Any) -> None:
        """Take note of one."""
        if len(self._found) < MOST:
            self._found.append(Finding(kind=kind, fault=fault, path=str(path), says=says, **more))
        else:
            self._more += 1
            self._faults |= fault

    def widen(self, nbytes: int, of: tuple[str, ...]) -> None:
        """The last one is of so many bytes more."""
        if not self._more and self._found and self._found[-1].nbytes is not None:
            last = self._found[-1]
            joined = tuple(dict.fromkeys((*last.of, *of)))
            self._found[-1] = dataclasses.replace(last, nbytes=(last.nbytes or 0) + nbytes, of=joined)

    @property
    def any(self) -> bool:
        return bool(self._found)

    def all(self, path: object) -> tuple[Finding, ...]:
        """What was found of `path`."""
        left_out = Finding(kind="more", fault=self._faults, path=str(path), says=f"and {self._more} findings more")
        return (*self._found, left_out) if self._more else tuple(self._found)


def texts(given: object) -> dict[str, str]:
    """A table of texts that others have written, cut to what a person reads."""
    if not isinstance(given, Mapping):
        return {}
    pairs = list(given.items())[:_TEXTS]
    return {str(key)[:_CHARACTERS]: str(value)[:_CHARACTERS] for key, value in pairs}


def count(given: object) -> int | None:
    """A number that others have written; None where it is none."""
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 10:
        return int(given)
    return given if type(given) is int and 0 <= given < 1 << 53 else None

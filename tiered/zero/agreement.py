"""Agreement: what every rank says of itself in a round, and what all of them conclude from it. Pure.

In each round every rank sends one header to all, and each draws the same conclusion from the same headers:

    want       a rank needs a group's values              served by all as soon as no rank is closed
    ready      a rank has a gradient, or new values       done once every rank is ready with that group
    call       a rank's user has called something that
               all ranks do together                      done once every rank has made the same call
    room       a rank's user waits for memory that an
               offered gradient holds                     refused once every rank's user waits and nothing moves
    closed     a rank is changing its shards (a step)     its shards are not given out meanwhile

Invariant: `conclude` depends on the headers alone, so no rank can conclude anything else than the others.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Sequence

import torch

_FORMAT = struct.Struct("<iq??dd200s")
COMPUTING_FACTOR = 10  # how much longer a rank is waited for while it computes


class Call(enum.IntEnum):
    """What all ranks do together."""

    NONE = 0
    BACKWARD = 1  # the end of one: which gradients there are
    STEP = 2
    VALUES = 3  # a state dict's
    EDIT = 4
    GATHER = 5  # gather(modify=True)
    AVERAGE = 6
    CLOSE = 7
    LEAVE = 8
    SAVE = 9  # a checkpoint, or load one
    ROOM = 10  # not together with anybody: see the file's contract


class Flag(enum.IntFlag):
    """Of one group."""

    WANT = 1
    GRADIENT = 2
    VALUES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What one rank says of itself."""

    call: Call  # what its user waits in, and
    detail: int  # what of it must be the same on every rank
    closed: bool
    computing: bool  # inside forward, backward or step
    waited_s: float  # its user, for other ranks
    quiet_s: float  # since its user's last call
    doing: str  # in words
    flags: bytes  # a Flag for each group

    @property
    def waits(self) -> bool:
        """The rank's user waits for other ranks."""
        return self.waited_s > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Conclusion:
    """What a round does, in this order."""

    gathers: tuple[tuple[int, tuple[int, ...]], ...]  # groups, and the ranks that want each
    gradients: tuple[int, ...]  # groups to reduce
    values: tuple[int, ...]  # groups whose new values are exchanged
    granted: bool  # the call that every rank has made
    refused: bool  # no gradient will give its memory back: every rank waits for another one
    disagreement: str | None  # why there is no further round


def encode(header: Header) -> torch.Tensor:
    """The header as bytes: of the same length on every rank with the same number of groups."""
    fixed = _FORMAT.pack(
        header.call,
        header.detail,
        header.closed,
        header.computing,
        header.waited_s,
        header.quiet_s,
        header.doing.encode()[:200],
    )
    return torch.frombuffer(bytearray(fixed + header.flags), dtype=torch.uint8)


def decode(row: torch.Tensor) -> Header:
    """Undo `encode`."""
    data = row.numpy().tobytes()
    call, detail, closed, computing, waited, quiet, doing = _FORMAT.unpack_from(data)
    words = doing.rstrip(b"\0").decode(errors="ignore")
    return Header(Call(call), detail, closed, computing, waited, quiet, words, data[_FORMAT.size :])


def conclude(headers: Sequence[Header], timeout_s: float) -> Conclusion:
    """What this round does."""
    groups = range(len(headers[0].flags))
    with_flag = {flag: [[bool(h.flags[g] & flag) for h in headers] for g in groups] for flag in Flag}
    gathers = () if any(h.closed for h in headers) else tuple(
        (g, tuple(r for r, wants in enumerate(with_flag[Flag.WANT][g]) if wants))
        for g in groups
        if any(with_flag[Flag.WANT][g])
    )  # fmt: skip
    gradients = tuple(g for g in groups if all(with_flag[Flag.GRADIENT][g]))
    values = tuple(g for g in groups if all(with_flag[Flag.VALUES][g]))
    calls = {(h.call, h.detail) for h in headers}
    all_call = all(h.call is not Call.NONE for h in headers)
    short = any(h.call is Call.ROOM for h in headers)
    refused = all_call and short and not (gathers or gradients or values)
    granted = all_call and not short and len(calls) == 1
    disagreement = None
    if all_call and not granted and not short:
        disagreement = "the ranks wait for different things"
    elif not (granted or refused or gathers or gradients or values):
        disagreement = _overdue(headers, timeout_s)
    if disagreement is not None:
        disagreement = f"{disagreement}: {describe(headers)}. Every rank must make the same calls in the same order"
    return Conclusion(gathers, gradients, values, granted, refused, disagreement)


def describe(headers: Sequence[Header]) -> str:
    """What each rank is doing, in words."""
    return "; ".join(f"rank {rank}: {_words(header)}" for rank, header in enumerate(headers))


def _overdue(headers: Sequence[Header], timeout_s: float) -> str | None:
    """Why nobody should wait any longer, if so."""
    longest = max(h.waited_s for h in headers)
    if longest <= timeout_s:
        return None
    for rank, header in enumerate(headers):
        limit = timeout_s * (COMPUTING_FACTOR if header.computing else 1)
        if not header.waits and header.quiet_s > limit:
            return (
                f"ranks have waited {longest:.0f} s for rank {rank}, which made no call (rank_timeout_s={timeout_s:g})"
            )
    if all(h.waits for h in headers):
        return f"the ranks have waited {longest:.0f} s for each other"
    return None


def _words(header: Header) -> str:
    if header.waits:
        return f"waits {header.waited_s:.0f} s in {header.doing}"
    if header.computing:
        return f"is inside {header.doing}"
    return f"{header.quiet_s:.0f} s ago it was in {header.doing}"

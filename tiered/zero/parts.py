"""Parts: where parameters under construction are kept while they are away, and how several ranks share one.

    Keep     OnDrive or InMemory: what this rank keeps, one row of bytes for each parameter that is away
    Muster   what ranks that build the same model do together: begin with one random stream, and bring a parameter in

With several ranks each keeps its part of a parameter, 1/N of its bytes, in order of ranks.

Invariants:
1. Ranks call each other on the thread that builds, in the order of their program, which is the same on every rank. What
   each is doing is compared before a byte is sent: ranks that differ all raise RankError.
2. Whatever fails in such a call fails it on every rank within the time limit, and every later one, and leaves the
   process group at once, so that whoever waits in it is told.
3. What goes into parts is the same on every rank: rank 0's, where ranks have built different values (of another random
   stream than torch's, or of memory that nobody has written yet).
4. InMemory never keeps more than its share of the host budget.
Leaves to whom: which parameter goes when, and the parameters themselves, are `zero.init`'s.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from tiered.config import format_size
from tiered.errors import BudgetError, RankError, TieredError, UsageError
from tiered.store.block import Block, BlockKey
from tiered.store.store import TieredStore
from tiered.store.tier import Tier
from tiered.zero.collectives import Ranks, first_line

_WINDOW_BYTES = 32 << 20  # of a part that is read and sent at once: ranks with slow drives are waited for that long
_HEADER = struct.Struct("<I?120s")  # checksum of the values, whether they are here, and what the rank is doing
_LOST = 0.05  # of the time limit: given to the living to say so when one is lost
_CALL = "deferred_init()"

Read = Callable[[torch.Tensor, int], None]
"""Fill a row of bytes with this rank's part from a byte on."""


class Keep(Protocol):
    """Rows of bytes that are away, each under a number."""

    def put(self, row: torch.Tensor, what: str) -> int:
        """Keep a copy of `row` (1-D uint8); the number it is asked for by. Raises what its place raises when full."""

    def read(self, number: int, out: torch.Tensor, offset: int) -> None:
        """Fill `out` (1-D uint8) with what is kept, from byte `offset` on."""

    def drop(self, number: int) -> None:
        """Give one up."""

    def close(self) -> None:
        """Give up all of it, and the place. Idempotent."""


class OnDrive:
    """A Keep in a swap directory."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._blocks: dict[int, Block | None] = {}  # None of an empty row
        self._last = 0

    def put(self, row: torch.Tensor, what: str) -> int:
        self._last += 1
        block = None
        if row.numel():
            block = self._store.create(BlockKey(self._last, "initial value"), row.numel(), Tier.NVME)
            try:
                self._store.patch(block, row, 0)
            except BaseException:
                self._store.remove(block)
                raise
        self._blocks[self._last] = block
        return self._last

    def read(self, number: int, out: torch.Tensor, offset: int) -> None:
        if (block := self._blocks[number]) is not None:
            self._store.load(block, out, offset)

    def drop(self, number: int) -> None:
        if (block := self._blocks.pop(number)) is not None:
            self._store.remove(block)

    def close(self) -> None:
        self._blocks.clear()
        self._store.close()


class InMemory:
    """A Keep in RAM, for ranks that have a part each."""

    def __init__(self, host_bytes: int, whole_bytes: int) -> None:
        """host_bytes: the rank's host budget, of which parameters that are not away may take `whole_bytes`."""
        self._host_bytes = host_bytes
        self._whole_bytes = whole_bytes
        self._rows: dict[int, torch.Tensor] = {}
        self._used = 0
        self._last = 0

    def put(self, row: torch.Tensor, what: str) -> int:
        needed = self._used + row.numel()
        if needed > self._host_bytes - self._whole_bytes:
            raise BudgetError(
                f"{_CALL}: this rank's parts of the parameters up to {what} take {format_size(needed)} of RAM, but "
                f"host_budget={format_size(self._host_bytes)} leaves "
                f"{format_size(self._host_bytes - self._whole_bytes)} for them beside "
                f"{format_size(self._whole_bytes)} of whole parameters: raise host_budget, give nvme= a swap "
                f"directory, or use more ranks"
            )
        self._last += 1
        self._rows[self._last] = row.clone()
        self._used = needed
        return self._last

    def read(self, number: int, out: torch.Tensor, offset: int) -> None:
        out.copy_(self._rows[number][offset : offset + out.numel()])

    def drop(self, number: int) -> None:
        self._used -= self._rows.pop(number).numel()

    def close(self) -> None:
        self._rows.clear()
        self._used = 0


class Muster:
    """The ranks that build one model, as this one sees them; see the file's contract."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._stream = torch.get_rng_state()
        self._failure = ""  # in words: an error would hold the frames it went through, and so what they use

    def begin(self, limit: int) -> int:
        """Meet the other ranks, and make the group; returns the least `limit` of any. Raises RankError."""
        ranks = self._ranks
        stream = base64.b64encode(self._stream.numpy().tobytes()).decode() if ranks.rank == 0 else ""
        everybody = [json.loads(text) for text in ranks.meet(_CALL, json.dumps({"limit": limit, "stream": stream}))]
        if failed := {rank: one["error"] for rank, one in enumerate(everybody) if "error" in one}:
            raise RankError(f"{_CALL}: {'; '.join(f'rank {rank} failed: {error}' for rank, error in failed.items())}")
        if elsewhere := [rank for rank, one in enumerate(everybody) if "stream" not in one]:
            raise RankError(f"{_CALL}: ranks {elsewhere} are in another call: every rank must make the same calls")
        self._stream = torch.frombuffer(bytearray(base64.b64decode(everybody[0]["stream"])), dtype=torch.uint8)
        try:
            ranks.connect()
        except RuntimeError as error:
            raise RankError(f"{_CALL}: a rank was lost while connecting ({first_line(error)})") from error
        return min(int(one["limit"]) for one in everybody)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, torch draws rank 0's random numbers. A rank that came with another stream has its own afterwards, as
        it was; one with the same has drawn from it, as in plain construction."""
        own = torch.get_rng_state()
        if torch.equal(own, self._stream):
            yield
            return
        torch.set_rng_state(self._stream)
        try:
            yield
        finally:
            torch.set_rng_state(own)

    def part(self, nbytes: int) -> tuple[int, int]:
        """The bytes [start, stop) that this rank keeps of a parameter of `nbytes`."""
        return self._parts(nbytes)[self._ranks.rank]

    def level(self, doing: str, row: torch.Tensor | None) -> int:
        """Come to the same point with every rank, and give `row` (1-D uint8) rank 0's values where they differ; returns
        their checksum. None on a rank where the parameter has been collected, as it will be on the others: then nobody
        needs its values. Raises RankError where a rank is elsewhere, or gone.
        """
        with self._calling(doing):
            sums, here = self._compare(doing, None if row is None else checksum(row))
            if row is not None and all(here) and len(set(sums)) > 1:
                self._ranks.broadcast(row)
            return sums[0]

    def unite(self, doing: str, whole: torch.Tensor, kept: tuple[int, Read] | None) -> None:
        """Fill `whole` (1-D uint8) with every rank's part, on all ranks that lack it.

        kept: the checksum of the whole, and what reads this rank's part; None where `whole` is still filled. Raises
        RankError, UsageError where the values have been changed through a view on some ranks only, and what reading
        raises.
        """
        with self._calling(doing):
            sums, here = self._compare(doing, checksum(whole) if kept is None else None, kept[0] if kept else 0)
            if len(set(sums)) > 1:
                if not all(here):
                    raise UsageError(
                        f"{doing}: its values have been changed through a tensor that views it, on some ranks only: "
                        f"under {_CALL} change the parameter itself, on every rank"
                    )
                self._ranks.broadcast(whole)
            wanting = [rank for rank, has in enumerate(here) if not has]
            parts = self._parts(whole.numel())
            first = parts[self._ranks.rank][0]
            for start in range(0, parts[0][1], _WINDOW_BYTES) if wanting else ():
                window = [(min(low + start, high), min(low + start + _WINDOW_BYTES, high)) for low, high in parts]
                low, high = window[self._ranks.rank]
                if kept is not None:
                    kept[1](whole[low:high], low - first)
                self._ranks.unite(whole if kept is not None else None, whole[low:high], window, wanting)

    def leave(self, reason: BaseException) -> None:
        """This rank builds no further; others, who will miss it, are told why."""
        if not self._failure:
            left = f"has left {_CALL} ({_words(reason)})"
            self._failure = str(reason) if isinstance(reason, RankError) else f"rank {self._ranks.rank} {left}"
            self._ranks.roll_call(left, 0)
        self.close()

    def close(self) -> None:
        """Give the process group back; no other rank is waited for. Idempotent."""
        self._ranks.close()

    # --- inside ---

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        size = -(-nbytes // self._ranks.size)
        return [(min(rank * size, nbytes), min((rank + 1) * size, nbytes)) for rank in range(self._ranks.size)]

    def _compare(self, doing: str, found: int | None, kept: int = 0) -> tuple[list[int], list[bool]]:
        """Say what this rank is doing, and the checksum `found` of values that are here, or else of those `kept`; what
        all ranks say of both. Raises RankError where the others are doing otherwise."""
        mine = _HEADER.pack(kept if found is None else found, found is not None, doing.encode()[:120])
        rows = self._ranks.headers(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        headers = [_HEADER.unpack(row.numpy().tobytes()) for row in rows]
        said = [words.rstrip(b"\0").decode(errors="ignore") for _, _, words in headers]
        if len(set(said)) > 1:
            raise RankError(
                f"the ranks build different models under {_CALL}: {_listed(dict(enumerate(said)))}: run the same "
                f"program on every rank"
            )
        return [sums for sums, _, _ in headers], [here for _, here, _ in headers]

    @contextlib.contextmanager
    def _calling(self, doing: str) -> Iterator[None]:
        if self._failure:
            raise RankError(self._failure)
        try:
            yield
        except BaseException as error:
            self.close()  # whoever else waits in a call finds out now
            if isinstance(error, TieredError) or not isinstance(error, Exception):
                self.leave(error)
                raise
            self._failure = self._lost(doing, error)
            raise RankError(self._failure) from error

    def _lost(self, doing: str, error: Exception) -> str:
        """What torch has reported, in words that say who was doing what."""
        found = self._ranks.roll_call(f"was {doing}", _LOST * self._timeout_s)
        missing = [rank for rank in range(self._ranks.size) if rank not in found]
        who = f"ranks {missing} are gone, or elsewhere" if found and missing else "a call between the ranks has failed"
        return (
            f"{doing}: {who} ({_listed(found) or _words(error)}): under {_CALL} every rank must run the same program, "
            f"or raise rank_timeout_s"
        )


def checksum(row: torch.Tensor) -> int:
    """Of a row of bytes on the host. It is not shown to numpy: torch resizes no memory that numpy has seen."""
    return zlib.crc32((ctypes.c_char * row.numel()).from_address(row.data_ptr()))


def _listed(said: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {words}" for rank, words in sorted(said.items()))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"

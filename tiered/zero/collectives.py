"""The ranks of a run, and every call between them; the only importer of torch.distributed.

One process needs no process group: with one rank each collective is the identity. With several, a sharded model has a
process group of its own, so that its traffic, which goes on beside the user's program, never meets the user's own
collectives.

    meet            before there is a group: through the store that every rank knows, with a time limit
    all the others  on the group, by one thread, in the same order on every rank

On CPUs whole tensors go by point-to-point messages straight between the ranks' memory, each pair at once: gloo's own
all-gather and reduce-scatter copy everything once more (5 and 2.5 times slower for shards of 16 MiB between two
processes). What all ranks of GPUs want at once is gathered by NCCL.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from tiered.errors import RankError, UsageError

_PARTS = {"cpu": ("cpu:gloo",), "cuda": ("cpu:gloo", "cuda:nccl")}
_MESSAGE = 32 << 20  # bytes of one point-to-point message: what a slow network carries well within the time limit
_LOOK_S = 0.01  # between two looks at the store
_STORE_S = 0.5  # for what else the store is asked
_GROUP_SHARE = 0.8  # of the time limit: how long one call waits, so that what then has to be found out fits in too

# one name was given up for the other in torch 2.13, and before that there is only the old one
_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

T = TypeVar("T")
Take = Callable[[int, int, Sequence[torch.Tensor]], None]
"""Called with `start`, `stop` and every rank's elements [start, stop) of one slice, in order of ranks."""


class Slicing(NamedTuple):
    """What `exchange_slices` does with one tensor."""

    flat: torch.Tensor | None  # N x `numel` elements of `dtype`, on the host; None for zeros
    numel: int  # of this rank's slice of it
    dtype: torch.dtype
    take: Take


_meetings = itertools.count()  # of this process: the same on every rank, since all of them meet, or none


class Ranks:
    """This process's place among the ranks, and what they do together."""

    def __init__(self, device: str, timeout_s: float) -> None:
        """`device`: the kind of device that gathers and reduces, "cpu" or "cuda". `timeout_s`: seconds that any call
        waits for another rank.

        Raises UsageError where a process group exists whose backend does not serve the device.
        """
        self._wanted = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        self._timeout_s = timeout_s
        self._group: Any = None
        self._place = ""
        self._held: list[torch.Tensor] = []  # what torch's threads may still have, see `close`
        if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._join()
        joined = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if joined else 1
        self.rank = dist.get_rank() if joined else 0
        if self.size > 1:
            served = dist.get_backend_config()
            lacking = [part for part in _PARTS[device] if part not in served]
            if lacking:
                raise UsageError(
                    f"the process group serves {served!r}, but several ranks on {device} need {', '.join(lacking)}: "
                    f"call torch.distributed.init_process_group('{self._wanted}'), or leave it to tiered.shard"
                )

    # --- before there is a group ---

    def meet(self, what: str, mine: str) -> list[str]:
        """What every rank brings to its next meeting, in order of ranks; `mine` is this rank's.

        Raises RankError where a rank does not come within the time limit, or came too late for the others.
        """
        if self.size == 1:
            return [mine]
        place = f"tiered/{next(_meetings)}"
        met = _bounded(lambda: self._meet(place, what, mine), 2 * self._timeout_s)
        if met is None:
            raise RankError(f"{what}: torch.distributed's store does not answer: is the network between the nodes up?")
        return met

    def _meet(self, place: str, what: str, mine: str) -> list[str]:
        store = _store()
        names = [f"{place}/{rank}" for rank in range(self.size)]
        end = time.monotonic() + self._timeout_s
        try:
            store.set(names[self.rank], f"{what}\0{mine}")
            while missing := [rank for rank, name in enumerate(names) if not store.check([name])]:
                if store.check([f"{place}/failed"]):
                    break
                if time.monotonic() > end:
                    store.set(f"{place}/failed", f"{what}: ranks {missing} did not come within {self._timeout_s:g} s")
                    break
                time.sleep(_LOOK_S)
            if store.check([f"{place}/failed"]):
                raise RankError(
                    f"{store.get(f'{place}/failed').decode()}: every rank must call it, or raise rank_timeout_s"
                )
            found = [store.get(name).decode().partition("\0") for name in names]
            if len({where for where, _, _ in found}) > 1:
                said = "; ".join(f"rank {rank}: {where}" for rank, (where, _, _) in enumerate(found))
                raise RankError(f"the ranks have come to different calls: {said}")
            return [text for _, _, text in found]
        except RuntimeError as error:  # torch's of a connection: the process that keeps the store has gone
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"{what}: the rank that keeps torch.distributed's store is gone ({first_line(error)})"
            ) from error

    def connect(self) -> None:
        """Make the group; every rank does, in the same order. Raises RankError where one does not."""
        if self.size > 1:
            self._place = f"tiered/{next(_meetings)}"
            limit = timedelta(seconds=_GROUP_SHARE * self._timeout_s)
            try:
                self._group = dist.new_group(backend=self._wanted, timeout=limit)
            except RuntimeError as error:
                raise RankError(f"the ranks cannot connect with each other: {first_line(error)}") from error

    def roll_call(self, mine: str, patience_s: float) -> dict[int, str]:
        """What each rank that answers within `patience_s` says, `mine` among it; called by all that are alive once a
        call between them has failed. Empty where even that cannot be found out."""
        found: dict[int, str] = {}
        _bounded(lambda: self._call_roll(found, mine, patience_s), patience_s + _STORE_S)
        return dict(found)

    def _call_roll(self, found: dict[int, str], mine: str, patience_s: float) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # its keeper is gone, or the user has destroyed the group
            store = _store()
            store.set(f"{self._place}/{self.rank}", mine)
            end = time.monotonic() + patience_s
            while len(found) < self.size and time.monotonic() < end:
                for rank in range(self.size):
                    if rank not in found and store.check([f"{self._place}/{rank}"]):
                        found[rank] = store.get(f"{self._place}/{rank}").decode()
                time.sleep(_LOOK_S)

    def close(self) -> None:
        """Give the group back; idempotent. A call that another rank has left hanging ends with it."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        # torch 2.7 ends a group with the interpreter's lock held, waiting for threads that may yet have to give up the
        # tensors of calls that are over: for those that nobody else holds they need that lock
        del group
        self._held.clear()

    # --- on the group ---

    def headers(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's `mine` (n bytes, on the host): N x n, in order of ranks."""
        if self.size == 1:
            return mine.view(1, -1)
        everybody = torch.empty(self.size * mine.numel(), dtype=mine.dtype, device="cpu")
        self._hold(everybody, mine)
        _gather_single(everybody, mine, group=self._group)
        return everybody.view(self.size, -1)

    def texts(self, mine: str) -> list[str]:
        """What every rank says, of any length, in order of ranks."""
        data = mine.encode()
        sizes = self.headers(torch.tensor([len(data)], dtype=torch.int64, device="cpu")).reshape(-1).tolist()
        row = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        rows = self.headers(row) if len(row) else row.view(self.size, 0)
        return [bytes(one[:size].numpy()).decode() for one, size in zip(rows, sizes, strict=True)]

    def unite(
        self, whole: torch.Tensor | None, own: torch.Tensor, spans: Sequence[tuple[int, int]], wanting: Sequence[int]
    ) -> None:
        """Bring every rank's part to the ranks `wanting` it, and wait for that; `own` may lie anywhere. See `post`."""
        works = self.post(whole, own, spans, wanting)
        if whole is not None:
            start, stop = spans[self.rank]
            if own.data_ptr() != whole[start:stop].data_ptr():
                whole[start:stop].copy_(own)
        for work in works:
            work.wait()

    def post(
        self, whole: torch.Tensor | None, own: torch.Tensor, spans: Sequence[tuple[int, int]], wanting: Sequence[int]
    ) -> list[Any]:
        """Begin to bring every rank's part to the ranks `wanting` it; returns what is to be waited for.

        whole: bytes on the host (uint8), of which rank r's part is [start, stop) of spans[r]; None on a rank that does
        not want it. own: this rank's part. Both stay as they are until all has been waited for.
        """
        works = []
        for rank in wanting:
            if rank != self.rank:
                works += self._send(own, rank)
        if whole is not None:
            for rank, (start, stop) in enumerate(spans):
                if rank != self.rank:
                    works += self._receive(whole[start:stop], rank)
        return works

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill `flat` (N x S elements, on a GPU) with every rank's slice of it; this rank's is in place."""
        _gather_single(flat, flat.chunk(self.size)[self.rank], group=self._group)

    def exchange_slices(
        self, jobs: list[Slicing], scratch: Sequence[torch.Tensor], zeros: torch.Tensor
    ) -> Iterator[int]:
        """Give the `take` of each job this rank's slice of every rank's `flat`, a window at a time; yields the place of
        each job that is done.

        scratch: two tensors of bytes: while one window is taken, the next is on its way. zeros: bytes of a window.
        """
        nothing = Slicing(None, 0, torch.uint8, lambda start, stop, parts: None)
        windows = [
            (job, start, min(start + step, numel))
            for job, (_, numel, dtype, _) in enumerate(jobs)
            for step in [zeros.numel() // dtype.itemsize]
            for start in range(0, numel, step)
        ]

        def post(number: int) -> tuple[list[Any], list[torch.Tensor]]:
            job, start, stop = windows[number]
            return self._post_window(jobs[job], start, stop, scratch[number % 2], zeros)

        coming = [post(0)] if windows else []
        for number, (job, start, stop) in enumerate(windows):
            works, parts = coming.pop()
            following = windows[number + 1] if number + 1 < len(windows) else None
            if following is not None:
                coming.append(post(number + 1))
            while works:  # by popping: no variable keeps the last one, and the memory it views
                works.pop(0).wait()
            jobs[job].take(start, stop, parts)
            del parts
            if following is None or following[0] != job:
                jobs[job] = nothing  # whoever waits for the job finds nobody else viewing its memory
                yield job

    def _post_window(
        self, job: Slicing, start: int, stop: int, memory: torch.Tensor, zeros: torch.Tensor
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Begin to exchange elements [start, stop) of every slice; returns what to wait for, and where they come."""
        room, nothing = memory.view(job.dtype), zeros.view(job.dtype)[: stop - start]
        works: list[Any] = []
        parts: list[torch.Tensor] = []
        for rank in range(self.size):
            base = rank * job.numel
            theirs = nothing if job.flat is None else job.flat[base + start : base + stop]
            if rank == self.rank:
                parts.append(theirs)
                continue
            part = room[len(parts) * (stop - start) if rank < self.rank else (len(parts) - 1) * (stop - start) :]
            parts.append(part[: stop - start])
            works += self._receive(parts[-1].view(torch.uint8), rank)
            works += self._send(theirs.view(torch.uint8), rank)
        return works, parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the values of rank 0; on the host."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _MESSAGE):
            piece = flat[start : start + _MESSAGE]
            self._hold(piece)
            dist.broadcast(piece, src=0, group=self._group)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each number; fp64."""
        total = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        self._hold(total)
        dist.all_reduce(total, group=self._group)
        return [float(value) for value in total.tolist()]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        united = torch.tensor(list(flags), dtype=torch.uint8, device="cpu")
        self._hold(united)
        dist.all_reduce(united, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in united.tolist()]

    # --- inside ---

    def _hold(self, *tensors: torch.Tensor) -> None:
        """A call is about them."""
        self._held = [held for held in self._held if held._use_count() > 1] + list(tensors)  # type: ignore[attr-defined]

    def _join(self) -> None:
        """Make torch's own process group, as torchrun describes it."""
        limit = timedelta(seconds=self._timeout_s)
        try:
            torch_distributed: Any = dist  # whose stubs do not have all it exports
            store, rank, size = next(iter(torch_distributed.rendezvous("env://", timeout=limit)))
            shared = torch_distributed.PrefixStore(
                "default_pg", store
            )  # as torch names it, should another rank have done this itself

            def join() -> bool:
                dist.init_process_group(self._wanted, store=shared, rank=rank, world_size=size)
                return True

            if _bounded(join, self._timeout_s) is None:  # torch would wait for minutes where a launcher keeps the store
                raise RuntimeError("some did not come")
        except RuntimeError as error:
            raise RankError(
                f"joining for shard(): not all of {os.environ['WORLD_SIZE']} ranks joined within {self._timeout_s:g} s "
                f"({first_line(error)}): start them together, or raise rank_timeout_s"
            ) from error

    def _send(self, data: torch.Tensor, rank: int) -> list[Any]:
        return [dist.isend(piece, rank, group=self._group, tag=tag) for tag, piece in _pieces(data)]

    def _receive(self, data: torch.Tensor, rank: int) -> list[Any]:
        return [dist.irecv(piece, rank, group=self._group, tag=tag) for tag, piece in _pieces(data)]


def _pieces(data: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(data[start : start + _MESSAGE] for start in range(0, data.numel(), _MESSAGE)))


def _bounded(call: Callable[[], T], seconds: float) -> T | None:
    """What `call` returns or raises, or None where it has not come back after `seconds`: the store may not answer."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="tiered-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    return outcome[0] if outcome else None


def _store() -> Any:
    """The store that every rank has joined. torch gives its users no other way to it."""
    return dist.distributed_c10d._get_default_store()


def first_line(error: BaseException, most: int = 160) -> str:
    """What an error says, without the place and the stack that torch adds to its own."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", line)[:most]

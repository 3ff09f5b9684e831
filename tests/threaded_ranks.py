"""Ranks that are threads of one process: a stand-in for torch.distributed, beneath `tiered.zero.collectives`.

    with World(3).installed() as world:
        world.run(program)              # program(rank) on a thread for each rank: shards, trains, closes

Inside `installed`, every thread but the one that installs it belongs to a rank of the world, and `Ranks`, `shard` and
all that is above them run line by line, several ranks in one process. Invariants:
1. What is received is there once its work has been waited for, and no sooner: until then its memory has all bits set
   (NaN in every floating dtype). What is sent is read when it is received, unless the sender has waited before. In an
   `eager` world it is there, and read, as soon as both sides have begun.
2. Messages between two ranks with one tag arrive in the order in which they were sent; ranks make the calls of a group
   in one order, and a call that meets another one is an error of whoever comes second.
3. A rank that gives its group back, or does not come within the group's time limit, ends the calls that need it, with
   torch's RuntimeError. What it has not sent by then is lost.
4. No call outlives the world, and no thread that `run` starts outlives `LIMIT_S`.
Leaves out what only processes have: sockets, and a death that nobody hears of.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

import tiered
from tiered.errors import RankError
from tiered.zero import collectives
from tiered.zero.model import MODEL_ATTRIBUTE, ShardedModel

T = TypeVar("T")
LIMIT_S = 40.0
_UNSENT = 0xFF
THREAD = "tiered-ranks"  # what the runtime calls the thread for what goes between ranks


class World:
    """See the file's contract."""

    def __init__(self, size: int, *, late_s: float = 0.0, eager: bool = False, seed: int = 0) -> None:
        """late_s: seconds at most before each call between ranks goes on, at random. eager: see invariant 1."""
        self.size = size
        self._eager = eager
        self.rounds = 0  # headers that all ranks have sent each other
        self._late_s = late_s
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._store: dict[str, bytes] = {}
        self._groups: list[_Shared] = []
        self._made: collections.Counter[int] = collections.Counter()  # of them, by each rank
        self._stopped: set[int] = set()
        self._standing: set[int] = set()  # those of them that would have made a call
        self._waiting: set[int] = set()  # in a call for all
        self._ended = False
        self._here = threading.local()
        self._outside = -1

    @contextlib.contextmanager
    def installed(self) -> Iterator[World]:
        """Inside, this is what torch.distributed joins."""
        self._outside = threading.get_ident()
        fakes = {
            "dist": _Distributed(self),
            "_gather_single": self._all_gather,
            "_meetings": _Meetings(self),
        }
        with mock.patch.multiple(collectives, **fakes):
            try:
                yield self
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                for thread in ranks_threads():
                    thread.join(LIMIT_S)

    # --- the ranks ---

    def run(self, program: Callable[[int], T]) -> list[T]:
        """What `program(rank)` returns on each rank. Raises the first error that no other rank's caused."""
        ended = self.ended(program)
        errors = [each for each in ended if isinstance(each, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, RankError)):
            raise error
        return ended  # type: ignore[return-value]

    def ended(self, program: Callable[[int], T]) -> list[T | BaseException]:
        """How `program(rank)` ended on each rank: what it returned or raised."""
        ends: list[T | BaseException] = [AssertionError("did not end")] * self.size

        def rank_thread(rank: int) -> None:
            self._here.rank = rank
            try:
                ends[rank] = program(rank)
            except BaseException as error:
                ends[rank] = error

        threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT_S
        for rank, thread in enumerate(threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                stack = traceback.format_stack(sys._current_frames().get(thread.ident or 0))
                ends[rank] = AssertionError(f"rank {rank} hangs:\n{''.join(stack)}")
        return ends

    def stop(self, rank: int) -> None:
        """`rank` makes no further call, until it goes on; returns when it stands before one that all others wait in."""
        with self._changed:
            self._stopped.add(rank)
            ready = self._changed.wait_for(
                lambda: rank in self._standing and len(self._waiting) == self.size - 1, LIMIT_S
            )
            assert ready, f"rank {rank} makes no calls"

    def go_on(self, rank: int) -> None:
        """Undo `stop`."""
        with self._changed:
            self._stopped.discard(rank)
            self._changed.notify_all()

    def await_rounds(self, rounds: int) -> None:
        """Wait until all ranks have sent each other so many more headers."""
        with self._changed:
            wanted = self.rounds + rounds
            assert self._changed.wait_for(lambda: self.rounds >= wanted or self._ended, LIMIT_S), "no more rounds"

    # --- what torch has ---

    def rank_here(self) -> int:
        """The rank of this thread, one that `run` has started."""
        return int(self._here.rank)

    @property
    def joined(self) -> bool:
        """This thread belongs to a rank."""
        return threading.get_ident() != self._outside

    def new_group(self, backend: str, timeout: timedelta) -> _Group:
        rank = self.rank_here()
        with self._changed:
            number = self._made[rank]
            self._made[rank] += 1
            while len(self._groups) <= number:
                self._groups.append(_Shared())
            group = _Group(rank, self._groups[number], timeout.total_seconds())
        self._everybody(group, "new_group", None)
        return group

    def destroy_process_group(self, group: _Group) -> None:
        with self._changed:
            group.shared.left.add(group.rank)
            for messages, end in ((group.shared.parcels, 0), (group.shared.awaited, 1)):
                for key in [key for key in messages if key[end] == group.rank]:
                    del messages[key]  # type: ignore[attr-defined]
            self._changed.notify_all()

    def isend(self, tensor: torch.Tensor, dst: int, group: _Group, tag: int) -> _Sending:
        if dst == group.rank:
            raise ValueError("a rank sends to itself")
        with self._changed:
            self._enter(group)
            key = group.next_key("send", group.rank, dst, tag)
            parcel = group.shared.parcels[key] = _Parcel(tensor)
            if self._eager and key in group.shared.awaited:
                parcel.deliver(group.shared.awaited[key])
            self._changed.notify_all()
        return _Sending(self, parcel)

    def irecv(self, tensor: torch.Tensor, src: int, group: _Group, tag: int) -> _Receiving:
        with self._changed:
            self._enter(group)
            with torch.no_grad():
                tensor.fill_(_UNSENT)
            key = group.next_key("receive", src, group.rank, tag)
            group.shared.awaited[key] = tensor
            if self._eager and key in group.shared.parcels:
                group.shared.parcels[key].deliver(tensor)
            return _Receiving(self, group, key)

    def receive(self, group: _Group, key: _Key) -> None:
        """Wait for one message."""
        self.delay()
        with self._changed:
            if key in group.shared.awaited:
                self._until(group, lambda: key in group.shared.parcels)
                group.shared.parcels.pop(key).deliver(group.shared.awaited.pop(key))

    def sent(self, parcel: _Parcel) -> None:
        """What is in `parcel` may be changed from now on."""
        with self._changed:
            if parcel.data is not None:
                parcel.data = parcel.data.clone()

    def broadcast(self, tensor: torch.Tensor, src: int, group: _Group) -> None:
        given = self._everybody(group, "broadcast", tensor.clone() if group.rank == src else None)
        tensor.copy_(given[src])

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", group: Any = None) -> None:
        given = torch.stack(self._everybody(group, f"all_reduce {op}", tensor.clone()))
        tensor.copy_(given.amax(0) if op == "max" else given.sum(0))

    def delay(self) -> None:
        """Go on a little later."""
        if self._late_s:
            with self._changed:
                seconds = self._random.uniform(0, self._late_s)
            time.sleep(seconds)

    # --- inside ---

    def _all_gather(self, out: torch.Tensor, mine: torch.Tensor, group: _Group) -> None:
        given = self._everybody(group, "all_gather", mine.clone())
        out.copy_(torch.cat(given))
        if group.rank == 0 and not mine.is_cuda:
            with self._changed:
                self.rounds += 1
                self._changed.notify_all()

    def _everybody(self, group: _Group, kind: str, mine: Any) -> list[Any]:
        """What every rank gives to the same call."""
        self.delay()
        with self._changed:
            self._enter(group)
            backend = (
                "nccl" if isinstance(mine, torch.Tensor) and mine.is_cuda else "gloo"
            )  # each in an order of its own
            number = group.next_call(backend)
            call = group.shared.calls.setdefault(number, _Call(kind))
            if call.kind != kind:
                raise RuntimeError(f"rank {group.rank} is in {kind}, others are in {call.kind}")
            call.given[group.rank] = mine
            self._waiting.add(group.rank)
            self._changed.notify_all()
            try:
                self._until(group, lambda: len(call.given) == self.size)
            finally:
                self._waiting.discard(group.rank)
            call.taken += 1
            if call.taken == self.size:
                del group.shared.calls[number]
            return [call.given[rank] for rank in range(self.size)]

    def _enter(self, group: _Group) -> None:
        while group.rank in self._stopped and not self._ended:
            self._standing.add(group.rank)
            self._changed.notify_all()
            assert self._changed.wait(LIMIT_S)
        self._standing.discard(group.rank)
        self._check(group)

    def _until(self, group: _Group, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + group.timeout_s
        while not reached():
            self._check(group)
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise RuntimeError(f"Timed out waiting {group.timeout_s:g} s for send or recv operation to complete")

    def _check(self, group: _Group) -> None:
        if self._ended or group.shared.left:
            raise RuntimeError(f"Connection closed by peer {sorted(group.shared.left)}")


@contextlib.contextmanager
def sharded(model: nn.Module, **settings: Any) -> Iterator[tuple[nn.Module, tiered.AdamW, ShardedModel]]:
    """On a rank: a model, its optimizer and its inside; all ranks close together, or each without its weights where it
    has failed."""
    common = {"host_budget": "32MiB", "optimizer_tier": "host", "rank_timeout_s": LIMIT_S}
    tiered.shard(model, tiered.Config(**{**common, **settings}))
    try:
        inside: ShardedModel = model.__dict__[MODEL_ATTRIBUTE]
        yield model, tiered.AdamW(model.parameters(), lr=1e-2), inside
        tiered.close(model)
    finally:
        tiered.close(model, keep_weights=False)


def ranks_threads() -> list[threading.Thread]:
    """The threads of the runtime that are alive now for what goes between ranks."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


_Key = tuple[int, int, int, int]  # source, destination, tag, and how many before with the same


@dataclasses.dataclass(eq=False)
class _Parcel:
    data: torch.Tensor | None  # the sender's own memory, until it waits; None once received

    def deliver(self, out: torch.Tensor) -> None:
        if self.data is not None:
            assert self.data.numel() == out.numel(), "a message of another size was expected"
            with torch.no_grad():
                out.copy_(self.data)
            self.data = None


@dataclasses.dataclass
class _Call:
    kind: str
    given: dict[int, Any] = dataclasses.field(default_factory=dict)
    taken: int = 0


@dataclasses.dataclass
class _Shared:
    """What the ranks of one group have in common."""

    left: set[int] = dataclasses.field(default_factory=set)
    calls: dict[tuple[str, int], _Call] = dataclasses.field(default_factory=dict)
    parcels: dict[_Key, _Parcel] = dataclasses.field(default_factory=dict)
    awaited: dict[_Key, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Group:
    """One rank's group."""

    rank: int
    shared: _Shared
    timeout_s: float
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    messages: collections.Counter[tuple[str, int, int, int]] = dataclasses.field(default_factory=collections.Counter)

    def next_call(self, backend: str) -> tuple[str, int]:
        self.calls[backend] += 1
        return backend, self.calls[backend]

    def next_key(self, verb: str, src: int, dst: int, tag: int) -> _Key:
        number = self.messages[verb, src, dst, tag]
        self.messages[verb, src, dst, tag] += 1
        return src, dst, tag, number


@dataclasses.dataclass(eq=False)
class _Sending:
    """A work of torch's."""

    world: World
    parcel: _Parcel

    def wait(self) -> None:
        self.world.sent(self.parcel)


@dataclasses.dataclass(eq=False)
class _Receiving:
    """A work of torch's."""

    world: World
    group: _Group
    key: _Key

    def wait(self) -> None:
        self.world.receive(self.group, self.key)


class _Store:
    """Of torch.distributed's store: what `Ranks` uses."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    def set(self, name: str, value: str) -> None:
        self._values[name] = value.encode()

    def get(self, name: str) -> bytes:
        return self._values[name]

    def check(self, names: list[str]) -> bool:
        return all(name in self._values for name in names)


class _Meetings:
    """Each rank counts its own, as processes do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._counts = [itertools.count() for _ in range(world.size)]

    def __next__(self) -> int:
        return next(self._counts[self._world.rank_here()])


class _Distributed:
    """Of torch.distributed: what `Ranks` uses."""

    ReduceOp = SimpleNamespace(MAX="max", SUM="sum")

    def __init__(self, world: World) -> None:
        self._world = world
        store = _Store(world._store)
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)
        for name in ("new_group", "destroy_process_group", "isend", "irecv", "broadcast", "all_reduce"):
            setattr(self, name, getattr(world, name))

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self._world.joined

    def get_world_size(self) -> int:
        return self._world.size

    def get_rank(self) -> int:
        return self._world.rank_here()

    def get_backend_config(self) -> str:
        return "cpu:gloo,cuda:nccl"

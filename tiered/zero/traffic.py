"""Traffic: the bytes of one model that go between ranks, and the memory that this takes.

    gather      a rank's shard in its place in the buffer --> everybody's shards in theirs      (a want)
    serve       this rank's shard, from wherever it lives --> the ranks that want it
    reduce      every rank's whole gradient, or zeros --> the mean of this rank's slice         (an offer)
    complete    every rank's updated shard --> the whole block                                  (an offer)

What is called here on the user's thread gives jobs to the exchange, whose thread carries them out. Invariants:
1. The memory of a job is kept by whoever gives it, until it is done.
2. Besides that memory, traffic takes what `scratch_bytes` says, charged to the host budget for the model's life.
3. Sums are made in fp32 in the order of ranks, and rounded once: which rank, tier or time makes one changes no bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiered.device.base import Device
from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Completion, Event
from tiered.stats import Meter
from tiered.store.block import Block
from tiered.store.store import TieredStore
from tiered.zero.agreement import Flag
from tiered.zero.collectives import Slicing, Take
from tiered.zero.exchange import Exchange

if TYPE_CHECKING:
    from tiered.zero.group import ParamGroup
    from tiered.zero.passage import Passage

_WINDOW = 1 << 20  # bytes of a slice that are summed at once: they stay in a core's cache

Average = Callable[[torch.Tensor, Sequence[torch.Tensor], int, bool], float]


def scratch_bytes(ranks: int, largest_shard: int) -> int:
    """Bytes of the host budget that traffic takes; largest_shard: bytes of the largest param shard that may be on a
    drive."""
    return (2 * (ranks - 1) + 1) * _WINDOW + page_ceil(largest_shard) if ranks > 1 else 0


@dataclasses.dataclass(slots=True)
class Gathering:
    """A group on its way from all ranks."""

    group: ParamGroup
    passage: Passage  # which brings this rank's shard to its place in the buffer
    exchange: Exchange
    device: Device
    done: Completion
    arrived: Event | None = None  # on the device, where it does not arrive at once

    def over(self) -> bool:
        """Nothing of it is in flight."""
        return self.done.done() and (self.arrived is None or self.arrived.done())

    def settle(self) -> None:
        """Wait until every rank has done its part. An interrupt passes."""
        self.exchange.settle(self.done, "gather")

    def arrive(self) -> None:
        """Compute given from now on finds the group in its place. Raises what gathering raised."""
        self.done.wait()
        if self.arrived is not None:
            self.device.order(self.arrived)


@dataclasses.dataclass(slots=True)
class Reduction:
    """One group's gradients on their way to the mean over ranks."""

    group: ParamGroup
    flags: list[bool]  # the parameters it is about: the same on every rank
    whole: Memory | None  # this rank's whole gradient, which is used up; None where it has nothing of it
    target: torch.Tensor  # this rank's shard of the mean (1-D), maybe a part of `whole`
    add: list[bool]  # by parameter: the target has something that this is added to
    totals: list[float]  # by parameter: the sum of squares of what the target has then
    done: Completion | None = None


class Traffic:
    """See the file's contract."""

    def __init__(
        self, exchange: Exchange, device: Device, store: TieredStore, meter: Meter, average: Average, largest_shard: int
    ) -> None:
        """largest_shard: bytes of the largest param shard that may be on a drive. Raises BudgetError."""
        self.exchange = exchange
        self._device = device
        self._store = store
        self._meter = meter
        self._average = average
        self._ranks = exchange.ranks
        self._groups: list[ParamGroup] = []
        self._charged = scratch_bytes(exchange.ranks.size, largest_shard)
        store.host.charge(self._charged, "what goes between ranks")
        window = (exchange.ranks.size - 1) * _WINDOW
        self._scratch = [torch.empty(window, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._zeros = torch.zeros(_WINDOW, dtype=torch.uint8, device="cpu")
        self._serving: Memory | None = Memory(largest_shard, committed=True) if largest_shard else None

    def start(self, groups: Sequence[ParamGroup], owner: object) -> None:
        """Begin: from now on, while `owner` lives, other ranks are given what they want of `groups`."""
        self._groups = list(groups)
        self.exchange.start(self, owner)

    def close(self) -> None:
        """Leave the ranks, and give back what traffic took. Idempotent."""
        self.exchange.stop()
        self._groups = []
        self._scratch, self._zeros, self._serving = [], self._zeros[:0].clone(), None
        self._store.host.refund(self._charged)
        self._charged = 0

    # --- jobs, given on the user's thread ---

    def want(self, group: ParamGroup, passage: Passage) -> Gathering:
        """Begin gathering `group`, whose own shard `passage` brings to its place in the buffer."""
        gathering = Gathering(group, passage, self.exchange, self._device, Completion())
        gathering.done = self.exchange.want(group.index, gathering, passage.issued)
        return gathering

    def offer(self, reduction: Reduction) -> None:
        """Begin reducing, once every rank begins it with this group."""
        reduction.done = self.exchange.offer(Flag.GRADIENT, reduction.group.index, reduction)

    def retract(self, reduction: Reduction) -> bool:
        """Take a reduction back, if it has not begun: True where it never will."""
        return self.exchange.retract(Flag.GRADIENT, reduction.group.index)

    def spread(self, group: ParamGroup, memory: Memory) -> Completion:
        """Begin to fill in what other ranks have updated of the whole `param` block that `memory` holds."""
        return self.exchange.offer(Flag.VALUES, group.index, (group, memory))

    # --- on the communication thread: see `exchange.Carrier`. All of a round is on its way together, so that small
    # groups cost no more than one message's delay ---

    def gather(self, moves: Sequence[tuple[int, Sequence[int], Gathering | None]]) -> Iterator[int]:
        works: list[list[Any]] = []
        read: int | None = None  # the place of the group whose shard is in the memory for what comes from a drive
        for index, wanting, gathering in moves:
            if gathering is not None:
                works.append(self._gather(gathering, wanting))
                continue
            block = self._groups[index].blocks["param"]
            if self._store.resident(block) and block.memory is not None:
                shard = block.memory.bytes[: block.nbytes]
            else:
                if read is not None:
                    _finished(works, read)
                read = len(works)
                shard = self._read(block)
            works.append(self._ranks.post(None, shard, [], wanting))
            del shard
        for position in range(len(works)):
            _finished(works, position)
            yield position

    def reduce(self, payloads: Sequence[Reduction]) -> Iterator[int]:
        yield from self._ranks.exchange_slices(list(map(self._slicing, payloads)), self._scratch, self._zeros)

    def _slicing(self, reduction: Reduction) -> Slicing:
        """(A function of its own: no variable of `reduce` keeps a view of what has been reduced.)"""
        numel, dtype = reduction.group.spec.numel, reduction.target.dtype
        self._meter.communicated("reduce_scatter", numel, numel * dtype.itemsize)
        flat = None if reduction.whole is None else reduction.whole.view(dtype)
        return Slicing(flat, numel // self._ranks.size, dtype, self._taking(reduction))

    def complete(self, payloads: Sequence[tuple[ParamGroup, Memory]]) -> Iterator[int]:
        works = []
        for group, memory in payloads:
            spans = _spans(group, self._ranks.size)
            start, stop = spans[self._ranks.rank]
            self._meter.communicated("all_gather", group.spec.numel, memory.nbytes)
            works.append(self._ranks.post(memory.bytes, memory.bytes[start:stop], spans, range(self._ranks.size)))
        for position in range(len(works)):
            _finished(works, position)
            yield position

    def _read(self, block: Block) -> torch.Tensor:
        """This rank's shard of a group, from its drive, for a rank that wants it: good until the next is read."""
        if self._serving is None or self._serving.nbytes < block.nbytes:
            raise RuntimeError(f"{block.key} has {block.nbytes} bytes, more than any group that was to be on a drive")
        self._store.read(block, self._serving).wait()
        return self._serving.bytes[: block.nbytes]

    def _gather(self, gathering: Gathering, wanting: Sequence[int]) -> list[Any]:
        group, passage, ranks = gathering.group, gathering.passage, self._ranks
        flat = group.buffer.bytes
        passage.issued.wait()
        self._meter.communicated("all_gather", group.spec.numel, flat.numel())
        if flat.is_cuda and len(wanting) == ranks.size:
            work = functools.partial(ranks.all_gather, group.buffer.view(group.dtype))
            gathering.arrived = self._device.communicate(work, passage.copied)
            return []
        passage.copied.wait()
        spans = _spans(group, ranks.size)
        start, stop = spans[ranks.rank]
        if flat.is_cuda:  # where not all ranks want a group, no collective of the GPUs fits
            host = torch.empty(flat.numel(), dtype=torch.uint8, device="cpu")
            host[start:stop].copy_(flat[start:stop])
            for posted in ranks.post(host, host[start:stop], spans, wanting):
                posted.wait()
            flat.copy_(host)
            return []
        return ranks.post(flat, flat[start:stop], spans, wanting)

    def _taking(self, reduction: Reduction) -> Take:
        """What averages a window of a reduction."""
        spec, ranks = reduction.group.spec, self._ranks
        slots = [(i, slot) for i, slot in enumerate(spec.slots) if reduction.flags[i]]
        parts = [(i, *spec.owned_shard(slot, ranks.rank)) for i, slot in slots]

        def take(start: int, stop: int, slices: Sequence[torch.Tensor]) -> None:
            for position, first, last in parts:
                low, high = max(first, start), min(last, stop)
                if low < high:
                    sources = [part[low - start : high - start] for part in slices]
                    reduction.totals[position] += self._average(
                        reduction.target[low:high], sources, ranks.size, reduction.add[position]
                    )

        return take


def _finished(works: list[list[Any]], position: int) -> None:
    """Wait for one job's works, and forget them: whoever waits for the job finds nobody else viewing its memory."""
    for work in works[position]:
        work.wait()
    works[position] = []


def _spans(group: ParamGroup, ranks: int) -> list[tuple[int, int]]:
    """The bytes of every rank's param shard in the gathered group."""
    size = group.dtype.itemsize
    return [(start * size, stop * size) for start, stop in (group.spec.shard(rank) for rank in range(ranks))]

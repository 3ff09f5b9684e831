"""The ranks of a run, and every collective between them; the only importer of torch.distributed.

One process needs no process group: with one rank each collective is the identity.

Invariant: collectives are issued in program order, the same on every rank.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tiered.errors import UsageError

_PARTS = {"cpu": ("cpu:gloo",), "cuda": ("cpu:gloo", "cuda:nccl")}
# one name was given up for the other in torch 2.13, and before that there is only the old one
_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class Ranks:
    """This process's place among the ranks, and what they do together."""

    def __init__(self, device: str) -> None:
        """`device`: the kind of device that gathers and reduces, "cpu" or "cuda".

        Raises UsageError where a process group exists whose backend does not serve it.
        """
        wanted = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(wanted)
        joined = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if joined else 1
        self.rank = dist.get_rank() if joined else 0
        if self.size > 1:
            served = dist.get_backend_config()
            lacking = [part for part in _PARTS[device] if part not in served]
            if lacking:
                raise UsageError(
                    f"the process group serves {served!r}, but several ranks on {device} need {', '.join(lacking)}: "
                    f"call torch.distributed.init_process_group('{wanted}'), or leave it to tiered.shard"
                )

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill `flat` (N x S elements) with every rank's slice of it, in rank order; this rank's is in place."""
        shard = flat.chunk(self.size)[self.rank]
        if flat.is_cuda:
            _gather_single(flat, shard)
        else:
            dist.all_gather(list(flat.chunk(self.size)), shard)

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of this rank's slice of `flat` (N x S elements): S elements, in memory of its own or
        a view of `flat`. Gloo has no reduce-scatter over flat tensors, so there it is a sum of the whole."""
        if flat.is_cuda:
            shard = torch.empty(flat.numel() // self.size, dtype=flat.dtype, device=flat.device)
            _reduce_single(shard, flat)
            return shard.div_(self.size)
        dist.all_reduce(flat)
        return flat.chunk(self.size)[self.rank].div_(self.size)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Give every rank the values of rank 0."""
        if self.size > 1:
            dist.broadcast(flat, src=0)

    def fill(self, full: torch.Tensor) -> None:
        """Unite what each rank filled in of an otherwise zeroed tensor; the parts do not overlap, so bits are kept."""
        if self.size > 1:
            dist.all_reduce(full.view(-1).view(torch.uint8))

    def sum(self, value: float) -> float:
        """The sum of `value` over ranks; fp64."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device="cpu")
        dist.all_reduce(total)
        return float(total)

    def any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self.size == 1:
            return flags
        united = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        dist.all_reduce(united, op=dist.ReduceOp.MAX)
        return [bool(f) for f in united.tolist()]

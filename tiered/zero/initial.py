"""The values that ranks come to `shard` with, and what makes them the same on every rank.

Each rank sums up every parameter (CRC-32, a window at a time); those whose sums differ take rank 0's values, or are
refused by name. Invariant: no more than one window of a parameter is in memory for it, beside the parameter itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tiered.errors import RankError, UsageError
from tiered.zero.agreement import Call
from tiered.zero.group import ParamGroup
from tiered.zero.guard import ATTRIBUTE
from tiered.zero.runtime import Runtime

_WINDOW_BYTES = 4 << 20
_PARKED = -1  # in place of a checksum


def equalize(module: nn.Module, groups: Sequence[ParamGroup], runtime: Runtime, *, refuse: bool) -> None:
    """Give parameters that differ between ranks the values of rank 0; with all ranks. Those that are parked are the
    same everywhere: every rank has a part of one copy.

    refuse: raise UsageError naming them instead.
    """
    params = [param for group in groups for param in group.params]
    names = {id(param): name for name, param in module.named_parameters()}

    def act() -> list[str]:
        mine = [_PARKED if _is_parked(param) else _checksum(param) for param in params]
        everybody = runtime.ranks.headers(torch.tensor(mine, dtype=torch.int64, device="cpu"))
        differing = [i for i in range(len(params)) if bool((everybody[:, i] != everybody[0, i]).any())]
        apart = [names[id(params[i])] for i in differing if bool((everybody[:, i] == _PARKED).any())]
        if apart:
            raise RankError(
                f"shard(): {apart[:5]} ({len(apart)} parameters) are parked by deferred_init() on some ranks and not "
                f"on others: build the model with the same program on every rank"
            )
        if not refuse:
            for i in differing:
                _broadcast(params[i], runtime)
        return [names[id(params[i])] for i in differing]

    differing = runtime.together(Call.VALUES, "shard(), comparing initial values", act)
    if differing and refuse:
        raise UsageError(
            f"the ranks come to shard() with different values of {differing[:5]} ({len(differing)} parameters): seed "
            f"every rank alike, load the same checkpoint, or use initial_values='rank0'"
        )


@torch.no_grad()
def flat(param: nn.Parameter) -> torch.Tensor:
    """The values as one row: a view where the parameter is contiguous. A parked parameter is brought in."""
    home: Any = param.__dict__.get(ATTRIBUTE)
    if home is not None:
        home.bring_in()
    return param.detach().reshape(-1)


def take(params: Sequence[nn.Parameter]) -> None:
    """Bring in, for good, those that are parked. With several ranks that is a call of all of them, and each fills its
    own part of a group with values of its own part of the parameters: so all bring in all of them, in one order."""
    for param in params:
        home: Any = param.__dict__.get(ATTRIBUTE)
        if home is not None:
            home.take()


def _is_parked(param: nn.Parameter) -> bool:
    home: Any = param.__dict__.get(ATTRIBUTE)
    return home is not None and bool(home.away)


def _checksum(param: nn.Parameter) -> int:
    data = flat(param).view(torch.uint8)
    total = 0
    for start in range(0, data.numel(), _WINDOW_BYTES):
        total = zlib.crc32(data[start : start + _WINDOW_BYTES].numpy().data, total)
    return total


@torch.no_grad()
def _broadcast(param: nn.Parameter, runtime: Runtime) -> None:
    row = flat(param)
    runtime.ranks.broadcast(row)
    runtime.meter.communicated("broadcast", row.numel(), row.numel() * row.element_size())
    if row.data_ptr() != param.data_ptr():  # not contiguous: a copy came
        param.copy_(row.view(param.shape))

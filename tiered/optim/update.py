"""What an update works on: a group's flat tensors, wherever they are, and one chunk of them on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiered.optim import kernels, resident
from tiered.optim.kernels import Segment
from tiered.optim.slots import Array
from tiered.zero.group import ParamGroup
from tiered.zero.home import ParamHome
from tiered.zero.model import STATE_KINDS


def arrays(group: ParamGroup, grad_dtype: torch.dtype) -> list[Array]:
    """What of a group passes through host memory to be updated."""
    arrays = [Array("param", group.dtype, write=True, base=group.base("param"))]
    if not group.states_apart:
        states = ("master", *STATE_KINDS) if "master" in group.blocks else STATE_KINDS
        arrays += [Array(kind, torch.float32, write=True) for kind in states]
    return [*arrays, Array("grad", grad_dtype, write=False, base=group.base("grad"))]


def flat_state(group: ParamGroup, grad_dtype: torch.dtype) -> resident.State:
    """The flat tensors of a resident group."""
    param = group.on_device("param", group.dtype)
    has_master = "master" in group.blocks
    return resident.State(
        master=group.on_device("master", torch.float32) if has_master else param,
        exp_avg=group.on_device("exp_avg", torch.float32),
        exp_avg_sq=group.on_device("exp_avg_sq", torch.float32),
        grad=group.on_device("grad", grad_dtype),
        param_out=param if has_master else None,
    )


def gradients_on_device(homes: Sequence[ParamHome]) -> list[torch.Tensor]:
    """The gradients of parameters of resident groups, as far as this rank owns them; 1-D views."""
    flats = []
    for home in homes:
        start, stop = home.group.spec.owned_shard(home.slot, home.group.runtime.ranks.rank)
        flats.append(home.group.on_device("grad", home.grads.dtype)[start:stop])
    return flats


def on_host(segments: list[Segment], tensors: dict[str, torch.Tensor], grad_scale: float) -> None:
    """Update one chunk; `segments` count from its start."""
    for segment in segments:
        if segment.step == 1:  # the moments may be of another optimizer, or of before a load
            for kind in STATE_KINDS:
                tensors[kind][segment.start : segment.stop].zero_()
    kernels.adamw(
        segments,
        master=tensors["master"] if "master" in tensors else tensors["param"],
        exp_avg=tensors["exp_avg"],
        exp_avg_sq=tensors["exp_avg_sq"],
        grad=tensors["grad"],
        grad_scale=grad_scale,
        param_out=tensors["param"] if "master" in tensors else None,
    )

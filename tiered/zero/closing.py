"""Closing: the way of a sharded model's parameters back to a plain module.

Invariants:
1. What can fail, reading from drives and from other ranks, comes before anything is touched.
2. Whatever happens after that, the module is plain again and everything taken is given back: a parameter whose values
   did not come has none, and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tiered.config import format_size
from tiered.device.host import available_bytes
from tiered.errors import BudgetError
from tiered.store.tier import Tier
from tiered.zero import residence
from tiered.zero.agreement import Call
from tiered.zero.guard import ATTRIBUTE, guard, unguard
from tiered.zero.home import GoneHome, ParamHome

if TYPE_CHECKING:
    from tiered.zero.model import ShardedModel

_OF_TRAINING = {"grad", "exp_avg", "exp_avg_sq"}


def to_plain(model: ShardedModel, *, keep_weights: bool) -> None:
    """Make the parameters ordinary ones with their full values, or leave them without values."""
    if keep_weights:
        for group in model.groups:
            group.absorb()
        _check_room(model)
        model.runtime.together(Call.CLOSE, "close()", lambda: None)
        values = {id(h): h.exported() for h in model.homes if h.group.blocks["param"].home is Tier.NVME}
    model.closed = True
    _drop_states(model)
    try:
        for group in model.groups:
            for home in [h for h in model.homes if h.group is group]:
                _free(model.module, home, (values.pop(id(home), None) if keep_weights else None), keep_weights)
    except BaseException:  # a rank was lost half way
        for home in [h for h in model.homes if h.param.__dict__.get(ATTRIBUTE) is h]:
            _free(model.module, home, None, keep=False)
        raise
    finally:
        model.restore_modules()
        model.release()


def _check_room(model: ShardedModel) -> None:
    """Raise BudgetError where memory cannot take the weights, even after gradients and moments have gone."""
    need = sum(h.slot.numel * h.dtype.itemsize for h in model.homes)
    states = [block for group in model.groups for kind, block in group.blocks.items() if kind in _OF_TRAINING]
    away = not model.runtime.device.in_place  # then what is on the device takes nothing of the host
    freed = sum(b.nbytes for b in states if b.memory and not (away and b.home is Tier.DEVICE))
    if need > available_bytes() + freed:
        raise BudgetError(
            f"close() would bring all weights into memory: {format_size(need)}, but "
            f"{format_size(available_bytes() + freed)} is available: save what you need, then call "
            "tiered.close(model, keep_weights=False)"
        )


def _drop_states(model: ShardedModel) -> None:
    """Gradients and moments end with sharding; their memory makes room for the weights."""
    model.departures.abandon()
    if model.reducer is not None:
        model.reducer.outside_backward()
    for grads in model.grads:
        grads.abandon()
    for group in model.groups:
        for kind in _OF_TRAINING & group.blocks.keys():
            residence.remove_block(group, kind)


def _free(root: nn.Module, home: ParamHome, value: torch.Tensor | None, keep: bool) -> None:
    """Make one parameter an ordinary one with `value` (or what its home holds), or leave it without values."""
    param = home.param
    home.release()
    if keep:
        value = home.exported() if value is None else value
        unguard(param)
        del param.__dict__[ATTRIBUTE]
        param.data = value
        home.group.buffer.unseal_one()
    else:
        guard(param)
        param.__dict__[ATTRIBUTE] = GoneHome(home.name)
        _replace_with_meta(root, param, home)


def _replace_with_meta(root: nn.Module, param: nn.Parameter, home: ParamHome) -> None:
    """A parameter's data cannot become a meta tensor in place, so every module that holds it gets one new Parameter."""
    value = torch.empty(home.slot.shape, dtype=home.dtype, device="meta")
    new = nn.Parameter(value, requires_grad=param.requires_grad)
    for module in root.modules():
        for name, held in module._parameters.items():
            if held is param:
                module._parameters[name] = new

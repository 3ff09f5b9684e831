"""What a module with sharded parameters saves and loads: real full tensors under plain torch's names.

Owns two instance attributes of each module that holds parameters directly (`_save_to_state_dict`,
`_load_from_state_dict`), so that a state_dict of any submodule works too, and never has more than one parameter's
values in flight. Buffers and extra state are left to the module's own methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.zero.guard import ATTRIBUTE, is_sharded
from tiered.zero.home import ParamHome
from tiered.zero.unit import refuse_copy

_SAVE, _LOAD = "_save_to_state_dict", "_load_from_state_dict"


def install(module: nn.Module) -> None:
    """Let `module` save and load its sharded parameters."""
    module.__dict__[_SAVE] = _Save(module)
    module.__dict__[_LOAD] = _Load(module)


def restore(module: nn.Module) -> None:
    """Give `module` its own methods back."""
    for name in (_SAVE, _LOAD):
        module.__dict__.pop(name, None)


def _homes(module: nn.Module) -> dict[str, ParamHome]:
    return {name: p.__dict__[ATTRIBUTE] for name, p in module._parameters.items() if is_sharded(p)}


class _Copyless:
    """Belongs to one module: refuses to be copied with it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    __deepcopy__ = refuse_copy
    __reduce__ = refuse_copy


class _Save(_Copyless):
    def __call__(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        module, everything = self._module, self._module._parameters
        homes = _homes(module)
        for name, home in homes.items():
            key = prefix + name
            destination[key] = home.param if keep_vars else home.state(destination, key)
        module.__dict__["_parameters"] = {k: p for k, p in everything.items() if k not in homes}
        try:
            type(module)._save_to_state_dict(module, destination, prefix, keep_vars)
        finally:
            module.__dict__["_parameters"] = everything


class _Load(_Copyless):
    def __call__(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any) -> None:
        if isinstance(local_metadata, dict) and local_metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace sharded parameters: use assign=False")
        if torch.__future__.get_swap_module_params_on_conversion():
            raise UsageError("load_state_dict() that swaps parameters would replace sharded ones: switch that off")
        type(self._module)._load_from_state_dict(self._module, state_dict, prefix, local_metadata, *rest)
        for home in _homes(self._module).values():
            home.group.runtime.check()  # torch makes a list of what loading raises
        for name, home in _homes(self._module).items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == home.slot.shape:
                home.load_master(value)

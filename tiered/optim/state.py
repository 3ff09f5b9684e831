"""The optimizer's state dict: torch.optim.AdamW's own layout, in and out, one full tensor per parameter and moment.

Invariant: `import_state` checks everything before it writes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.zero import truth
from tiered.zero.home import ParamHome
from tiered.zero.model import STATE_KINDS


def export_state(
    param_groups: Iterable[Mapping[str, Any]], homes: Mapping[int, ParamHome], steps: Mapping[int, int]
) -> dict[int, dict[str, torch.Tensor]]:
    """Position of the parameter -> {"step": 0-dim fp32, "exp_avg" and "exp_avg_sq": fp32 of the parameter's shape}."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for position, param in _enumerate(param_groups):
        if steps.get(id(param)):
            home = homes[id(param)]
            moments = {kind: truth.values(home.group, home.slot, kind, home.name) for kind in STATE_KINDS}
            step = torch.tensor(float(steps[id(param)]), dtype=torch.float32, device="cpu")
            state[position] = {"step": step, **moments}
    return state


def import_state(
    param_groups: Iterable[Mapping[str, Any]], homes: Mapping[int, ParamHome], state_dict: Mapping[str, Any]
) -> dict[int, int]:
    """Write the moments of a torch AdamW state dict into their blocks; returns steps by id of the Parameter."""
    given = state_dict["param_groups"]
    param_groups = list(param_groups)
    counts = [len(g["params"]) for g in given], [len(g["params"]) for g in param_groups]
    if counts[0] != counts[1]:
        raise UsageError(
            f"the state dict has parameter groups of {counts[0]} parameters, this optimizer of {counts[1]}"
        )
    keys = [key for group in given for key in group["params"]]
    found = {position: state_dict["state"].get(key) for position, key in enumerate(keys)}
    params = dict(_enumerate(param_groups))
    for position, entry in found.items():
        home = homes[id(params[position])]
        for kind in STATE_KINDS if entry else ():
            if kind not in entry or entry[kind].shape != home.slot.shape:
                got = tuple(entry[kind].shape) if kind in entry else "nothing"
                raise UsageError(f"{kind} of '{home.name}' has shape {got}, expected {tuple(home.slot.shape)}")
        if entry and "step" not in entry:
            raise UsageError(f"the state of '{home.name}' has no step count")
    steps: dict[int, int] = {}
    for position, entry in found.items():
        home = homes[id(params[position])]
        if entry:
            home.model.start_training(home.group)
            for kind in STATE_KINDS:
                truth.set_values(home.group, home.slot, kind, entry[kind])
            steps[id(params[position])] = int(entry["step"])
    return steps


def _enumerate(param_groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
    return enumerate(param for group in param_groups for param in group["params"])

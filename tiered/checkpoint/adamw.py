"""The state of torch.optim.AdamW by parameter name, as one file of torch.save.

    {"state": {name: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{"params": [names], "lr", "betas", ...}]}

That is what torch.distributed.checkpoint.state_dict gives and takes, and what optimizer.load_state_dict takes where the
parameters are in the same order. A file of torch.save, as torch.load(file, weights_only=True, mmap=True) gives just
this dictionary back, with no code of this package and no trust in whoever wrote it; with safetensors everybody would
have to put it together from flat names and a second file. Invariants:
1. Only what AdamW does is taken: amsgrad, other kinds of state and coupled weight decay are refused by name.
2. Hyperparameters that say how torch computes, not what, are torch's defaults on the way out, and dropped on the way
   in.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tiered.checkpoint import beside, torchfile
from tiered.checkpoint.foreign import File
from tiered.checkpoint.state import Moments, Source, State, cast, constant
from tiered.errors import ConfigError, UsageError
from tiered.optim import hyperparameters
from tiered.zero.model import STATE_KINDS

_OF_TORCH: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_NEEDED = ("lr", "betas", "eps", "weight_decay")
_LARGEST_STEP = 1 << 53


# --- out ---


def write(path: Path, state: State) -> None:
    """Write the file, flushed."""
    moments = {name: {"step": step_of(m), **dict(m.items())} for name, m in state.moments.items()}
    torchfile.write(beside.create(path), {"state": moments, "param_groups": torch_groups(state)})


def step_of(moments: Moments | None) -> Source:
    """The count of updates as torch has it: 0-dim fp32."""
    return constant(torch.tensor(float(moments.step if moments else 0), dtype=torch.float32, device="cpu"))


def torch_groups(state: State) -> list[dict[str, Any]]:
    """Parameter groups with everything that torch's AdamW has in them."""
    groups = []
    for group in state.groups or ():
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
        groups.append({"maximize": False, **_OF_TORCH, **given, "params": list(group["params"])})
    return groups


# --- in ---


@contextlib.contextmanager
def opened(path: Path) -> Iterator[State]:
    """The moments and groups in such a file, to be read inside. Raises StorageError, CorruptDataError, and UsageError
    for what is no state of AdamW by name."""
    with File(path) as file:
        value = torchfile.opened_value(path, file)
        states, groups = value.get("state"), value.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, list):
            file.refuse("it holds no optimizer's state: expected {'state': ..., 'param_groups': ...}")
        names = _names(groups, str(path))
        taken = [taken_group({**g, "params": [names[p] for p in g["params"]]}, str(path)) for g in groups]
        yield State({}, moments=taken_moments({names.get(k, k): v for k, v in states.items()}, str(path)), groups=taken)


def _names(groups: Sequence[Any], where: str) -> dict[Any, str]:
    """By what stands for a parameter in the file, its name. An optimizer's own state dict counts parameters, and has
    names only where the optimizer was given them."""
    names: dict[Any, str] = {}
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        given = group.get("param_names", params) if isinstance(group, dict) else None
        if not isinstance(params, list) or not isinstance(given, list) or len(given) != len(params):
            raise UsageError(f"{where}: a parameter group has no list of its parameters")
        if not all(isinstance(name, str) for name in given):
            raise UsageError(
                f"{where} counts parameters and does not name them: save what "
                f"torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) gives"
            )
        names |= dict(zip(params, given, strict=True))
    return names


def taken_group(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A parameter group of torch as a checkpoint has it. Raises UsageError, ConfigError for what AdamW here has not."""
    found: dict[str, Any] = {
        k: v.whole().item() if isinstance(v, Source) and v.numel == 1 else v for k, v in group.items()
    }
    betas = found.get("betas")
    found["betas"] = pair = list(betas) if isinstance(betas, (list, tuple)) else [None]
    if not isinstance(found.get("params"), list) or not all(isinstance(name, str) for name in found["params"]):
        raise UsageError(f"{where}: a parameter group has no list of names")
    numbers = [found.get(name) for name in _NEEDED if name != "betas"] + pair
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        raise UsageError(f"{where}: a parameter group lacks one of {', '.join(_NEEDED)}, or it is no number")
    try:
        hyperparameters.check(found)
    except ConfigError as error:
        raise UsageError(f"{where}: {error}") from None
    kept = {k: v for k, v in found.items() if k not in _OF_TORCH and k != "param_names"}
    for name, value in kept.items():
        if name not in ("betas", "params") and not isinstance(value, (int, float, str, type(None))):
            raise UsageError(f"{where}: {name!r} of a parameter group is {type(value).__name__}, expected a number")
    return kept


def taken_moments(states: Mapping[Any, Any], where: str) -> dict[str, Moments]:
    """By parameter name what AdamW keeps; a parameter that was never updated has none. Raises UsageError naming all
    that is no state of AdamW."""
    moments: dict[str, Moments] = {}
    bad: list[str] = []
    for name, state in states.items():
        kinds = set(state) if isinstance(state, dict) else set()
        if not isinstance(name, str) or kinds != {"step", *STATE_KINDS}:
            told = ", ".join(sorted(map(str, kinds))) or "nothing"
            bad.append(f"{name!r} has {told}")
            continue
        step, moment = _step(state["step"]), [state[kind] for kind in STATE_KINDS]
        if step is None or not all(isinstance(m, Source) and m.dtype.is_floating_point for m in moment):
            bad.append(f"{name!r} has a step that is no count, or moments that are no floating tensors")
        elif step:  # never updated: torch may keep zeros, or nothing
            moments[name] = Moments(
                step, *(cast(f"{k} of {name}", m, torch.float32) for k, m in zip(STATE_KINDS, moment, strict=True))
            )
    if bad:
        raise UsageError(f"{where}: {len(bad)} are no state of AdamW (step, exp_avg, exp_avg_sq): {'; '.join(bad)}")
    return moments


def _step(given: Any) -> int | None:
    value = given.whole().item() if isinstance(given, Source) and given.numel == 1 else given
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST_STEP:
        return None
    return int(value) if value == int(value) else None

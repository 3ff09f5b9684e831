"""Generation: what a commit says beside the bytes of states, and how an optimizer and a model go on from it.

    payload = safetensors: the model's persistent buffers; as metadata, JSON: step() calls, updates of each parameter,
              hyperparameters, loss scale

Invariant: what `payload` writes, `read` gives back, or CorruptDataError is raised before anything is changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from tiered.errors import CorruptDataError, UsageError
from tiered.zero.buffers import persistent_buffers

_KEY = "tiered"


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """An optimizer's, and the buffers of its model."""

    calls: int  # of step()
    skipped: int  # of them
    updates: Mapping[str, int]  # by name of the parameter
    groups: Sequence[Mapping[str, Any]]
    scaler: Mapping[str, Any] | None
    optimizers: int  # that the model had
    buffers: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def payload(module: nn.Module, progress: Progress) -> bytes:
    """`progress`, and the buffers of `module` as they are."""
    buffers = {name: value.detach().cpu().clone().contiguous() for name, value in persistent_buffers(module).items()}
    fields = {f.name: getattr(progress, f.name) for f in dataclasses.fields(progress) if f.name != "buffers"}
    return bytes(save(buffers, {_KEY: json.dumps(fields)}))


def read(data: bytes, path: str) -> Progress:
    """Undo `payload`. Raises CorruptDataError naming `path`."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        fields = json.loads(header["__metadata__"][_KEY])
        found = Progress(**fields, buffers=load(data))
        if type(found.calls) is not int or not all(type(count) is int for count in found.updates.values()):
            raise ValueError("a count is no number")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CorruptDataError(0, f"not a sound generation: {type(error).__name__}: {error}", path) from None


def check(progress: Progress, module: nn.Module, groups: int, path: str) -> None:
    """Raise UsageError where a model's buffers, or the number of its optimizer's parameter groups, are others."""
    mine = {name: (value.shape, value.dtype) for name, value in persistent_buffers(module).items()}
    theirs = {name: (value.shape, value.dtype) for name, value in progress.buffers.items()}
    if mine != theirs:
        differ = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        raise UsageError(f"resume(): the buffers {differ} are others than in {path}: build the model as it was")
    if progress.optimizers != 1 or len(progress.groups) != groups:
        raise UsageError(
            f"resume(): {path} was left by {progress.optimizers} optimizers, the one that stepped last with "
            f"{len(progress.groups)} parameter groups; this one has {groups}: make one optimizer, as it was, or load a "
            f"checkpoint"
        )

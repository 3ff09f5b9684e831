"""The user's buffers (running statistics, masks, tables) go to the device with the model, and come back with it.

They are small, used whole, and no parameter: they stay ordinary tensors in the module's own `_buffers`. Invariants:
1. A buffer that two modules share is one tensor on the device too.
2. With several ranks they are rank 0's on every rank whenever ranks have met (torch's DistributedDataParallel gives
   them out before each forward instead; a forward finds the same values either way).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn

from tiered.errors import RankError
from tiered.zero.collectives import Ranks


def move(module: nn.Module, device: torch.device) -> None:
    """Put every buffer of `module` on `device`; those that are there stay the same objects."""
    moved: dict[int, torch.Tensor] = {}
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            if buffer is not None and buffer.device != device:
                holder._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the state dict, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, each in module.named_modules()
        for name, buffer in each._buffers.items()
        if buffer is not None and name not in each._non_persistent_buffers_set
    }


class SharedBuffers:
    """The buffers of one model on several ranks; see invariant 2."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._alike: dict[str, str] = {}  # what all ranks have, by name: dtype and shape
        self._known: dict[str, tuple[int, int]] = {}  # by name: which tensor, at which version, when ranks met

    @property
    def altered(self) -> bool:
        """This rank's buffers have other names, shapes or dtypes than when ranks met last."""
        return _described(dict(self._module.named_buffers())) != self._alike

    def share(self, ranks: Ranks, *, compare: bool, all_: bool = False) -> None:
        """Give every rank what has changed on any, or all buffers, as rank 0 has it; on every rank. compare: on any of
        them they are `altered`. Raises RankError, on every rank, where buffers are not alike."""
        found = dict(self._module.named_buffers())
        if compare:
            self._compare(ranks, found)
        changed = [all_ or self._changed(name, buffer) for name, buffer in found.items()]
        if changed and any(united := ranks.any(changed)):
            with torch.no_grad():
                for (name, buffer), shared in zip(found.items(), united, strict=True):
                    if shared:
                        value = buffer.to("cpu", copy=True).contiguous()
                        ranks.broadcast(value)
                        if ranks.rank and not torch.equal(value, buffer.to("cpu")):
                            self._take(name, buffer, value)
                        self._known[name] = id(buffer), buffer._version

    def _compare(self, ranks: Ranks, found: Mapping[str, torch.Tensor]) -> None:
        mine = _described(found)
        said = [json.loads(text) for text in ranks.texts(json.dumps(mine))]
        for name in dict.fromkeys(name for one in said for name in one):
            if len({one.get(name) for one in said}) > 1:
                told = "; ".join(f"rank {rank}: {one.get(name, 'none')}" for rank, one in enumerate(said))
                raise RankError(
                    f"buffer '{name}' is not alike on every rank ({told}): ranks share the values of buffers, so give "
                    f"what differs by rank to forward, or keep it outside of the module's buffers"
                )
        self._alike = mine

    def _take(self, name: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
        try:
            buffer.copy_(value)
        except RuntimeError:  # an expanded view, of which no element can be written alone
            holder = self._module.get_submodule(name.rpartition(".")[0])
            holder._buffers[name.rpartition(".")[2]] = value.to(buffer.device)

    def _changed(self, name: str, buffer: torch.Tensor) -> bool:
        """A norm's own kernels update its statistics without a trace, so those count as changed."""
        holder = self._module.get_submodule(name.rpartition(".")[0])
        return bool(getattr(holder, "track_running_stats", False)) or self._known.get(name) != (
            id(buffer),
            buffer._version,
        )


def _described(buffers: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{buffer.dtype} {tuple(buffer.shape)}" for name, buffer in buffers.items()}

"""The user's buffers (running statistics, masks, tables) go to the device with the model, and come back with it.

They are small, used whole, and no parameter: they stay ordinary tensors in the module's own `_buffers`. Invariant: a
buffer that two modules share is one tensor on the device too.
"""

from __future__ import annotations

import torch
from torch import nn


def move(module: nn.Module, device: torch.device) -> None:
    """Put every buffer of `module` on `device`; those that are there stay the same objects."""
    moved: dict[int, torch.Tensor] = {}
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            if buffer is not None and buffer.device != device:
                holder._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

"""What a caller adds to a checkpoint: plain values and tensors, as JSON that names the tensors by number. Pure.

Dictionaries become {"dict": {...}} and tensors {"tensor": n}, so that neither is taken for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiered.errors import UsageError


def encode(value: Any, add: Callable[[torch.Tensor], int], where: str = "extra") -> Any:
    """`value` for the manifest; `add` keeps a tensor and gives its number. Raises UsageError naming what cannot be
    kept without running code when it is loaded."""
    if value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}  # every bit, and nan and inf
    if isinstance(value, torch.Tensor):
        return {"tensor": add(value)}
    if isinstance(value, (list, tuple)):
        return [encode(each, add, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(each, add, f"{where}[{key!r}]") for key, each in value.items()}}
    raise UsageError(
        f"{where} is {type(value).__name__}, which a checkpoint does not hold: give numbers, strings, None, tensors, "
        f"and lists or dictionaries (with strings for keys) of these"
    )


def decode(value: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    """Undo `encode`; tuples have become lists."""
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensor(value["tensor"])
        if "float" in value:
            return float.fromhex(value["float"])
        return {key: decode(each, tensor) for key, each in value["dict"].items()}
    return value

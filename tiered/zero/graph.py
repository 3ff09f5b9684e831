"""What autograd saves of a parameter: a note of where it is, not its memory.

While a module computes, tensors that autograd saves for backward pass through `pack`. One that views a group's buffer
is replaced by a note (group, dtype, shape, strides, offset); when backward asks for it, `unpack` brings the group in
and views it again. So a group may go at any moment after its forward, backward is right whatever was evicted, and a
saved view never counts as a user's view.

Invariants:
1. Tensors that are no group's pass through unchanged, checked for edits in between as torch does, to the hooks that
   were active before (checkpointing uses such hooks) or to none.
2. What `unpack` returns views the buffer, so the group stays while the backward node that asked still uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from tiered.errors import UsageError
from tiered.zero import hooks
from tiered.zero.compiled import uncompiled


class Owner(Protocol):
    """A group as the graph sees it."""

    def storage_for_backward(self) -> torch.UntypedStorage:
        """The group's storage, its values present."""

    def version_at(self, offset: int) -> int:
        """The version counter of the parameter that has the storage's element `offset`."""


# by the address of the storage object; weak, so that a model nobody closed can still be collected
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def register(storage: torch.UntypedStorage, owner: Owner) -> None:
    """Saved views of `storage` become notes from now on."""
    _owners[storage._cdata] = owner


def unregister(storage: torch.UntypedStorage) -> None:
    """Undo `register`."""
    _owners.pop(storage._cdata, None)


@contextlib.contextmanager
def saving_notes(*, beside_others: bool = True) -> Iterator[None]:
    """Inside, autograd saves notes of groups' views. Nests, with itself and with other saved-tensor hooks.

    beside_others=False: leave hooks of others that are on top alone. A single operation under checkpointing must be
    counted by its hooks in the recomputation exactly as it was in the forward.
    """
    outer = hooks.top()
    if outer is not None and (isinstance(outer[0], _Pack) or not beside_others):
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(_Pack(outer), _unpack):
            yield


@dataclasses.dataclass(frozen=True, slots=True)
class _Note:
    owner: Owner
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that is no group's, and its version: torch itself checks none where hooks are active."""

    tensor: Tensor
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Foreign:
    """What the hooks outside made of a tensor, and how they turn it back."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class _Pack:
    def __init__(self, outer: hooks.Hooks | None) -> None:
        self._outer = outer

    @uncompiled
    def __call__(self, tensor: Tensor) -> Any:
        owner = _owners.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if owner is not None:
            offset = int(tensor.storage_offset())
            return _Note(owner, tensor.dtype, tensor.size(), tensor.stride(), offset, owner.version_at(offset))
        if self._outer is not None:
            return _Foreign(self._outer[0](tensor), self._outer[1])
        # a node that keeps its own output would be a cycle that nobody can collect; autograd attaches the graph again
        return _Kept(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version)


@uncompiled
def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Kept):
        _check_version(packed.tensor._version, packed.version, packed.tensor.size())
        return packed.tensor
    if isinstance(packed, _Note):
        _check_version(packed.owner.version_at(packed.offset), packed.version, packed.size)
        storage = packed.owner.storage_for_backward()
        return torch.empty(0, dtype=packed.dtype, device=storage.device).set_(
            storage, packed.offset, packed.size, packed.stride
        )
    if isinstance(packed, _Foreign):
        return packed.unpack(packed.packed)
    raise RuntimeError(f"backward asked for {packed!r}, which was not packed here")


def _check_version(now: int, then: int, size: torch.Size) -> None:
    """torch's own check, in its words: what backward needs must be what forward saw."""
    if now != then:
        raise UsageError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: tensor "
            f"of shape {list(size)} is at version {now}; expected version {then} instead. An optimizer step, or an "
            f"edit, came between its forward and this backward: run the forward again"
        )

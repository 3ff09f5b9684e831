"""Buffer: bytes on some device that tensors view, and the account of who views them.

Invariants:
1. `exported()` is true exactly while a tensor outside the sealed set shares the storage: such memory must not go.
2. `bytes` is one tensor, and its storage one object, for life.
Leaves to the kinds of buffer: where the memory is, and how it comes and goes.
"""

from __future__ import annotations

import abc

import torch


class Buffer(abc.ABC):
    """`nbytes` that tensors view; see the file's contract."""

    def __init__(self, nbytes: int, memory: torch.Tensor) -> None:
        """`memory`: 1-D uint8 of `nbytes`; its storage is the buffer's."""
        self.nbytes = nbytes
        self.bytes: torch.Tensor = memory  # (nbytes,) uint8
        self._sealed = self._users()

    @property
    @abc.abstractmethod
    def committed(self) -> bool:
        """Whether the buffer has memory now."""

    @property
    def stranded(self) -> bool:
        """Whether its memory has to stay though nobody uses it."""
        return False

    @abc.abstractmethod
    def read(self, out: torch.Tensor, offset: int) -> None:
        """Fill `out` (1-D uint8, on the host) with the bytes from `offset` on; on return they are there."""

    @abc.abstractmethod
    def write(self, data: torch.Tensor, offset: int) -> None:
        """Replace the bytes from `offset` on by `data` (1-D uint8, on the host), which is free again on return."""

    @abc.abstractmethod
    def decommit(self) -> None:
        """Give the memory back at once; nothing may be in flight that uses it. Refuses while `exported()`."""

    def view(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """1-D tensor of `dtype` over elements [start, stop) of the memory; shares it."""
        whole = self.bytes.view(dtype) if self.nbytes else torch.empty(0, dtype=dtype, device=self.bytes.device)
        return whole[start:stop]

    def seal(self) -> None:
        """Declare the tensors that view the memory now to be its own; any further one counts as exported."""
        self._sealed = self._users()

    def unseal_one(self) -> None:
        """One of the memory's own tensors has been given other storage."""
        self._sealed -= 1

    def exported(self) -> bool:
        """True while a tensor beyond the sealed ones shares this memory."""
        return self._users() > self._sealed

    def _users(self) -> int:
        storage = self.bytes.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata))

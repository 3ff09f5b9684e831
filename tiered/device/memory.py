"""Memory: page-aligned host memory with one address for life, whose pages come and go.

An address range is reserved once; `commit` gives it pages, `decommit` returns them to the system at once (no allocator
keeps them, so resident memory follows the budgets exactly), and tensors that view it stay valid objects throughout.
Page alignment lets O_DIRECT reads land in the memory that computes.

Invariants:
1. The range is unmapped when the last tensor that views it is gone, never before.
2. Pages read as zero after `commit`. Touching decommitted memory is a fault of the program that the parameter guard
   exists to prevent, and the range is then without access rights, so it cannot pass unnoticed.
3. `exported()` is true exactly while a tensor outside the sealed set shares the storage: such memory must not be
   decommitted, and `decommit` refuses.
4. Pages do not go while a transfer registered with `busy` uses them: `decommit` waits for it.
Leaves to whom: what may be committed when (budgets) is the store's and the schedule's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from tiered.device.ticket import Ticket, settled

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for _name, _types in {
    "munmap": [ctypes.c_void_p, ctypes.c_size_t],
    "mprotect": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    "madvise": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
}.items():
    getattr(_libc, _name).argtypes = _types
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_NORESERVE, _MADV_DONTNEED, _MADV_HUGEPAGE = 0x4000, 4, 14
_HUGE_FROM_BYTES = 4 << 20


def page_ceil(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages: what `nbytes` of Memory really cost."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Memory:
    """`nbytes` of reserved, page-aligned address space; see the file's contract."""

    def __init__(self, nbytes: int, *, committed: bool = False) -> None:
        self.nbytes = nbytes
        self._span = max(page_ceil(nbytes), mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, self._span, _PROT_NONE, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"cannot reserve {nbytes} bytes of address space: {os.strerror(ctypes.get_errno())}")
        self.address: int = address
        view = (ctypes.c_char * self._span).from_address(address)
        weakref.finalize(view, _libc.munmap, address, self._span).atexit = False
        if self._span >= _HUGE_FROM_BYTES:
            _libc.madvise(address, self._span, _MADV_HUGEPAGE)
        self.committed = False
        self._transfers: list[Ticket] = []
        self.bytes: torch.Tensor = torch.frombuffer(view, dtype=torch.uint8)[:nbytes]  # (nbytes,) uint8
        self._sealed = self._users()
        if committed:
            self.commit()

    def view(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """1-D tensor of `dtype` over elements [start, stop) of the memory; shares it."""
        whole = self.bytes.view(dtype) if self.nbytes else torch.empty(0, dtype=dtype)
        return whole[start:stop]

    def commit(self) -> None:
        """Give the range its pages; they read as zero. Raises MemoryError where the system refuses."""
        if not self.committed:
            if _libc.mprotect(self.address, self._span, _PROT_READ_WRITE):
                raise MemoryError(f"cannot commit {self.nbytes} bytes: {os.strerror(ctypes.get_errno())}")
            self.committed = True

    def busy(self, ticket: Ticket) -> Ticket:
        """Register a transfer that uses the memory until it is done; returns it."""
        self._transfers = [t for t in self._transfers if not t.done()]
        self._transfers.append(ticket)
        return ticket

    def decommit(self) -> None:
        """Return the pages to the system; the contents are gone. Waits for registered transfers."""
        while self._transfers:
            settled(self._transfers[-1])
            self._transfers.pop()
        if self.exported():
            raise RuntimeError(f"{self.nbytes} bytes of memory are still viewed by a tensor")
        if self.committed:
            self.committed = False
            _libc.madvise(self.address, self._span, _MADV_DONTNEED)
            _libc.mprotect(self.address, self._span, _PROT_NONE)

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

"""Memory: page-aligned host memory with one address for life, whose pages come and go.

An address range is reserved once; `commit` gives it pages, `decommit` returns them to the system at once (no allocator
keeps them, so resident memory follows the budgets exactly), and tensors that view it stay valid objects throughout.
Page alignment lets O_DIRECT reads land in the memory that computes.

Invariants:
1. The range is unmapped when the last tensor that views it is gone, never before.
2. Pages read as zero after `commit`, but those of stranded memory (4). Touching decommitted memory is a fault of the
   program that the parameter guard exists to prevent, and the range is then without access rights, so it cannot pass
   unnoticed.
3. Pages do not go while a transfer registered with `busy` uses them: `decommit` waits for it.
4. Where such a transfer was given up, and its call may still fill the memory, that is `stranded`: it keeps its pages
   and its address to the end of the process, whoever lets go of it.
Leaves to whom: what may be committed when (budgets) is the store's and the schedule's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import torch

from tiered.device.buffer import Buffer
from tiered.device.ticket import Event, settled

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
_MAP_NORESERVE, _MADV_DONTNEED, _MADV_DONTFORK, _MADV_DOFORK, _MADV_HUGEPAGE = 0x4000, 4, 10, 11, 14
_HUGE_FROM_BYTES = 4 << 20


def page_ceil(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages: what `nbytes` of Memory really cost."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Memory(Buffer):
    """`nbytes` of reserved, page-aligned address space; see the file's contract."""

    def __init__(self, nbytes: int, *, committed: bool = False) -> None:
        self._span = max(page_ceil(nbytes), mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, self._span, _PROT_NONE, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"cannot reserve {nbytes} bytes of address space: {os.strerror(ctypes.get_errno())}")
        self.address: int = address
        view = (ctypes.c_char * self._span).from_address(address)
        self._unmap = weakref.finalize(view, _libc.munmap, address, self._span)
        self._unmap.atexit = False
        if self._span >= _HUGE_FROM_BYTES:
            _libc.madvise(address, self._span, _MADV_HUGEPAGE)
        self._committed = False
        self._transfers: list[tuple[Event, Callable[[], bool]]] = []
        self._stranded = False
        self._registering = threading.Lock()  # copies are given from I/O threads too
        super().__init__(nbytes, torch.frombuffer(view, dtype=torch.uint8)[:nbytes])
        if committed:
            self.commit()

    @property
    def committed(self) -> bool:
        return self._committed

    def commit(self) -> None:
        """Give the range its pages; they read as zero. Raises MemoryError where the system refuses."""
        if not self._committed:
            if _libc.mprotect(self.address, self._span, _PROT_READ_WRITE):
                raise MemoryError(f"cannot commit {self.nbytes} bytes: {os.strerror(ctypes.get_errno())}")
            self._committed = True

    def read(self, out: torch.Tensor, offset: int) -> None:
        ctypes.memmove(out.data_ptr(), self.address + offset, out.numel())

    def write(self, data: torch.Tensor, offset: int) -> None:
        self.quiet()
        ctypes.memmove(self.address + offset, data.data_ptr(), data.numel())

    def share_with_forks(self, share: bool) -> None:
        """Whether a forked child has the memory too. A device that copies from page-locked pages must keep finding them
        where they are; a fork would have the system copy them all, or move them at the parent's next write."""
        _libc.madvise(self.address, self._span, _MADV_DOFORK if share else _MADV_DONTFORK)

    def busy(self, transfer: Event, stranded: Callable[[], bool] = lambda: False) -> None:
        """Register a transfer that uses the memory until it is done; then `stranded` says whether it may do so yet."""
        with self._registering:
            self._forget_what_is_over()
            self._transfers.append((transfer, stranded))

    def quiet(self) -> None:
        """Wait until no registered transfer uses the memory, so that it may be changed, unless it is `stranded`."""
        for transfer, _ in list(self._transfers):
            settled(transfer)
        with self._registering:
            self._forget_what_is_over()

    @property
    def stranded(self) -> bool:
        """A call that was given up may still fill it: nothing right can come to lie in it."""
        with self._registering:
            self._forget_what_is_over()
        return self._stranded

    def decommit(self) -> None:
        """Return the pages to the system, unless it is `stranded`; the contents are gone. Waits for registered
        transfers."""
        self.quiet()
        if self._stranded:
            return
        if self.exported():
            raise RuntimeError(f"{self.nbytes} bytes of memory are still viewed by a tensor")
        self._drop_pages()

    def _forget_what_is_over(self) -> None:
        over = [each for each in self._transfers if _over(each[0])]
        if any(stranded() for _, stranded in over):
            self._stranded = True
            self._unmap.detach()
        self._transfers = [each for each in self._transfers if each not in over]

    def _drop_pages(self) -> None:
        if self._committed:
            self._committed = False
            _libc.madvise(self.address, self._span, _MADV_DONTNEED)
            _libc.mprotect(self.address, self._span, _PROT_NONE)


def _over(transfer: Event) -> bool:
    try:
        return transfer.done()
    except Exception:  # a device that has failed for good answers nothing, and copies nothing
        return True

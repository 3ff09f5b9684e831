"""The host's memory: how much of it the process may use, and how to give back what the C library keeps."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),  # cgroup v2
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),  # v1
)


def available_bytes() -> int:
    """Bytes this process can still take without swapping or passing its cgroup's limit."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _LIMITS:
        try:
            used = int(usage.read_text()) - _reclaimable(usage.with_name("memory.stat"))
            available = min(available, int(limit.read_text()) - used)
        except (OSError, ValueError):  # no such cgroup file, or "max"
            continue
    return max(available, 0)


def cgroup_limit() -> int | None:
    """The memory limit of this process's control group in bytes, None where there is none."""
    for path, _ in _LIMITS:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if limit < psutil.virtual_memory().total:  # cgroup v1 writes a number near 2^63 for none
            return limit
    return None


def memory_limit() -> int:
    """Bytes of the machine's memory, or of the control group's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    return min(total, cgroup_limit() or total)


def _reclaimable(stat: Path) -> int:
    """Page cache that a cgroup counts as used and gives up on demand."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def give_back_freed() -> None:
    """Return freed heap memory to the system.

    glibc keeps freed blocks of up to 32 MiB for later use; after many large tensors have been freed that is memory
    outside every budget. Costs about a millisecond per GiB of heap; does nothing with another C library.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

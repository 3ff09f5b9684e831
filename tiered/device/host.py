"""How much memory the host has to give, as the process may use it: cgroup limits count as much as the machine's."""

from __future__ import annotations

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
            available = min(available, int(limit.read_text()) - int(usage.read_text()))
        except (OSError, ValueError):  # no such cgroup file, or "max"
            continue
    return max(available, 0)

"""How much resident memory this process gained, as the operating system counts it.

Owns the measurement only. On Linux the kernel's own peak (VmHWM) is reset at the start, so no sample can miss a peak;
elsewhere the peak since the process began stands in, which can only report more, never less.
"""

import contextlib
import resource
import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing 5 sets the peak to the present resident size


class ResidentGrowth:
    """Peak resident bytes above what the process held when this object was made."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            _RESET.write_text(_RESET_PEAK)
        self.start_bytes: int = psutil.Process().memory_info().rss

    def peak_bytes(self) -> int:
        """Growth since the start, in bytes, never negative."""
        return max(0, _peak_resident() - self.start_bytes)


def _peak_resident() -> int:
    """Peak resident bytes since the start or the last reset."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

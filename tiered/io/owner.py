"""Who owns a swap directory: the contents of its lock file, and what they prove.

    {"pid", "started", "host", "boot"}, padded to one size: a single write replaces all of it

Invariant: `alive` is False only for an owner that is provably gone (of this host, and of another boot, or with no such
process, or with one that started at another time), and None where it cannot be told. Linux only: identity is in /proc.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BYTES = 512  # of a lock file, always
_ENDED = "ended"  # when an owner "started" that has left its directory: gone, whatever else runs


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, once and for all."""

    pid: int
    started: str
    host: str
    boot: str

    @property
    def alive(self) -> bool | None:
        """Whether it runs; see the file's contract."""
        if self.host != socket.gethostname():
            return None
        return self.boot == _boot_id() and self.started == _start_time(self.pid)


def this_process() -> Owner:
    pid = os.getpid()
    return Owner(pid, _start_time(pid), socket.gethostname(), _boot_id())


def nobody() -> Owner:
    """Of a directory that its owner has left for others."""
    return Owner(0, _ENDED, socket.gethostname(), _boot_id())


def write(lock_fd: int, owner: Owner) -> None:
    """Raises OSError."""
    fields = {"pid": owner.pid, "started": owner.started, "host": owner.host, "boot": owner.boot}
    os.pwrite(lock_fd, json.dumps(fields).encode().ljust(_BYTES), 0)


def read(lock_fd: int) -> Owner | None:
    """None where what is written is not complete. Raises OSError."""
    try:
        fields = json.loads(os.pread(lock_fd, 8 * _BYTES, 0))
        return Owner(int(fields["pid"]), str(fields["started"]), str(fields["host"]), str(fields["boot"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot (proc(5), stat field 22); empty where there is no such one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # the command before ")" may hold anything, spaces and ")" included

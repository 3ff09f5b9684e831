"""Ranks forked from one process that has imported torch: a group of ranks starts in a tenth of a second.

`Forks` is the test's side, this file run as a program the server: it reads one request a line, forks a process for each
rank, and answers with how each ended. Invariants:
1. The server has one thread, no process group and no model: its fork is what a fresh process is after its imports.
2. A rank leads a session of its own, ends as any interpreter ends (exit functions, finalizers), and never outlives
   the server.
3. No rank outlives its request: whoever still runs at the limit is killed, which `Ended.code` None tells.
Leaves what a rank does to disagree_worker.py, and to the test what is right.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SURE_S = 60.0  # beyond the limit of a request, for the server itself
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a rank ended: exit code (-N: by signal N; None: killed at the limit), output, and seconds it ran."""

    code: int | None
    output: str
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        """What the rank reported last; empty where it reported nothing."""
        lines = [line for line in self.output.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {}


class Forks:
    """A server of ranks; close it."""

    def __init__(self) -> None:
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # invariant 1
        self._server = subprocess.Popen(
            [sys.executable, __file__], env={**os.environ, **alone}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, programs: Sequence[Sequence[str]], folder: Path, limit: float, **settings: Any) -> list[Ended]:
        """Run one program per rank (see disagree_worker.py), at most `limit` seconds; `folder` is theirs."""
        request = {"programs": programs, "folder": str(folder), "limit": limit, "settings": settings}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        ready, _, _ = select.select([self._server.stdout], [], [], limit + SURE_S)
        answer = self._server.stdout.readline() if ready else b""
        if not answer:
            raise RuntimeError("the server of ranks is gone or hangs")
        return [Ended(**ended) for ended in json.loads(answer)]

    def close(self) -> None:
        """End the server; a rank that still runs ends with it."""
        self._server.kill()
        self._server.communicate()


# --- the server ---


def serve(port: Callable[[], int]) -> tuple[int, dict[str, Any]] | None:
    """Answer requests until there are no more, then None. In a forked rank: its number and its request."""
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        started, chosen = {}, port()
        for rank in range(len(request["programs"])):
            pid = os.fork()
            if pid == 0:
                _become(rank, len(request["programs"]), chosen, folder)
                return rank, request
            started[pid] = rank
        codes = _await(started, time.monotonic() + request["limit"])
        outputs = [(folder / f"{rank}.txt").read_text(errors="replace") for rank in range(len(codes))]
        answer = [{"code": code, "seconds": s, "output": outputs[rank]} for rank, (code, s) in sorted(codes.items())]
        print(json.dumps(answer), flush=True)
    return None


def _become(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Make this fork the given rank, as torchrun starts one."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(folder / f"{rank}.txt", "wb") as output, open(os.devnull, "rb") as nothing:
        for descriptor, to in ((nothing.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2)):
            os.dup2(descriptor, to)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")


def _await(running: dict[int, int], deadline: float) -> dict[int, tuple[int | None, float]]:
    """Wait for every process, given with its rank; exit code and seconds by rank."""
    codes: dict[int, tuple[int | None, float]] = {}
    since = time.monotonic()
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic() - since)
        elif time.monotonic() < deadline:
            time.sleep(0.01)
        else:
            for late, rank in running.items():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(late, signal.SIGKILL)
                os.waitpid(late, 0)
                codes[rank] = (None, time.monotonic() - since)
            break
    return codes


if __name__ == "__main__":
    import disagree_worker
    import torch._dynamo  # noqa: F401  # torch imports it at an optimizer's first state_dict
    from launch import free_port

    gc.freeze()  # or every rank copies all pages of these objects when it ends
    if (mine := serve(free_port)) is not None:
        disagree_worker.main(*mine)

"""Starts a program once per rank, as torchrun would on one machine, and gives back how each rank ended.

Owns: torchrun's variables, a free port, the processes and their end. Invariants:
1. When `run_ranks` returns or raises, no process it started is alive, nor any that those started in their group.
2. No rank waits for its output to be read: it goes to a file.
Leaves to the caller to judge exit codes and output; nothing is asserted here.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20000, 32000)  # below those the kernel hands out by itself: no connection of another test takes one


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # tests seed `random`, so two of them would choose alike
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(
    program: str | Path,
    args: Sequence[str],
    ranks: int,
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """How `python program *args` ended on each of `ranks` ranks, in rank order; stderr is part of `stdout`.

    ranks: 1 runs one plain process, without any of torchrun's variables.
    timeout: seconds for all ranks together; who runs longer is killed, and its `returncode` is -SIGKILL.
    env: variables beside those of this process.
    """
    command = [sys.executable, str(program), *map(str, args)]
    surroundings = {k: v for k, v in os.environ.items() if k not in VARIABLES} | dict(env or {})
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as ends:
        started = []
        for rank in range(ranks):
            mine = {k: str(v) for k, v in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()} if ranks > 1 else {}
            output = ends.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            process = _start(command, {**surroundings, **mine}, output)
            ends.callback(_kill, process)
            started.append((process, output))
        for process, _ in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [_ended(process, output) for process, output in started]


def _start(command: list[str], env: dict[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole group; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended(process: subprocess.Popen[bytes], output: IO[str]) -> subprocess.CompletedProcess[str]:
    _kill(process)
    output.seek(0)
    return subprocess.CompletedProcess(process.args, process.returncode, output.read())

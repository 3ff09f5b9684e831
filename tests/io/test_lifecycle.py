"""Ends that are not a tidy close(): the interpreter goes, a process forks or is killed, somebody presses Ctrl-C."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

BUSY = """
import os, sys, threading, time
import numpy as np
from tiered.io import SwapSpace
space = SwapSpace([sys.argv[1]], piece_bytes=4096, threads=1)
data = np.zeros(4096 * 2000, np.uint8)
extent = space.allocate(data.nbytes, "weights")
ticket = space.write(extent, data.ctypes.data, data.nbytes)
"""


def _notices_apart(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "portable I/O" not in line]


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.exit(0)",
        "del space, extent, data",
        "ticket.add_done_callback(lambda: time.sleep(0.1))",
        "threading.Thread(target=ticket.wait, daemon=True).start()",
        "threading.Thread(target=ticket.wait).start()",
        "ticket.add_done_callback(lambda: space.read(extent, data.ctypes.data, 4096).wait())",
    ],
)
def test_the_interpreter_ends_with_io_in_flight(mode: str, tmp_path: Path, run_python: Callable, ending: str) -> None:
    result = run_python(BUSY + ending, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = _notices_apart(result.stderr)
    if "space.read" in ending:  # may come after the close, and is refused and logged then
        assert not any("Fatal" in line for line in lines)
    else:
        assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_an_exit_that_skips_everything_leaves_a_directory_to_reclaim(
    mode: str, tmp_path: Path, run_python: Callable
) -> None:
    assert run_python(BUSY + "os._exit(7)", tmp_path).returncode == 7
    assert len(list(tmp_path.iterdir())) == 1
    assert run_python(BUSY + "space.close()", tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_with_io_in_flight_is_reclaimed(
    mode: str, tmp_path: Path, start_python: Callable, run_python: Callable
) -> None:
    again = """
print("busy", flush=True)
while True:
    ticket.wait()
    ticket = space.write(extent, data.ctypes.data, data.nbytes)
"""
    victim = start_python(BUSY + again, tmp_path)
    assert victim.stdout.readline() == "busy\n"
    victim.kill()
    victim.wait(60)
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert run_python(BUSY + "space.close()", tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_wait(mode: str, tmp_path: Path, start_python: Callable) -> None:
    code = """
print("waiting", flush=True)
try:
    while True:
        ticket.wait()
        ticket = space.write(extent, data.ctypes.data, data.nbytes)
except KeyboardInterrupt:
    space.close()
    print("interrupted", flush=True)
"""
    process = start_python(BUSY + code, tmp_path)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)  # most likely inside wait by now; the outcome is the same if not
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "interrupted\n"), err
    assert list(tmp_path.iterdir()) == []


FORK = """
from tiered.errors import UsageError
space._lock.acquire()  # as if another thread were inside at that moment; the child's copy is never released
child = os.fork()
if child == 0:
    def refused(call, *arguments):
        try:
            call(*arguments)
        except UsageError as error:
            return "parent process" in str(error)
        return False
    in_flight = not ticket.done()
    checks = [
        refused(space.allocate, 1, "child"),
        refused(space.free, extent),
        refused(space.read, extent, data.ctypes.data, 4096),
        refused(space.write, extent, data.ctypes.data, 4096),
        not in_flight or refused(ticket.wait),
        not in_flight or refused(ticket.add_done_callback, print),
        space.stats() is not None,
    ]
    space.close()
    print(checks, flush=True)
    LEAVE
space._lock.release()
assert os.waitpid(child, 0)[1] == 0
ticket.wait(60)
space.read(extent, data.ctypes.data, data.nbytes).wait(60)
os.stat(space.stats().drives[0].path)
space.close()
"""


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)", "del space, ticket, extent; sys.exit(0)"])
def test_a_forked_child_is_refused_and_harms_nothing(
    mode: str, tmp_path: Path, run_python: Callable, leave: str
) -> None:
    fork = "import warnings\nwarnings.simplefilter('ignore', DeprecationWarning)  # 3.12 warns of forks with threads\n"
    result = run_python(BUSY + fork + FORK.replace("LEAVE", leave), tmp_path)
    assert result.returncode == 0, result.stderr
    assert _notices_apart(result.stderr) == []
    assert result.stdout == f"{[True] * 7}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_opens_a_space_of_its_own(mode: str, tmp_path: Path, run_python: Callable) -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks with threads
child = os.fork()
if child == 0:
    with SwapSpace([sys.argv[1]]) as own:
        mine = own.allocate(data.nbytes, "own")
        own.write(mine, data.ctypes.data, data.nbytes).wait(60)
        own.read(mine, data.ctypes.data, data.nbytes).wait(60)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
ticket.wait(60)
space.close()
"""
    result = run_python(BUSY + code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_opening_and_closing_many_times_leaks_nothing(mode: str, tmp_path: Path, run_python: Callable) -> None:
    code = """
import os, sys, time
import numpy as np
from tiered.io import SwapSpace
def tasks():
    return len(os.listdir("/proc/self/task"))
def use():
    with SwapSpace([sys.argv[1]], threads=2) as space:
        extent = space.allocate(data.nbytes, "weights")
        ticket = space.write(extent, data.ctypes.data, data.nbytes)
        ticket.add_done_callback(lambda: None)
data = np.zeros(100_000, np.uint8)
threads = tasks()
use()
descriptors = len(os.listdir("/proc/self/fd"))
for turn in range(20):
    use()
deadline = time.monotonic() + 10
while tasks() > threads and time.monotonic() < deadline:
    time.sleep(0.01)
assert tasks() == threads
assert len(os.listdir("/proc/self/fd")) == descriptors
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_threads_that_cannot_be_started_are_a_named_error(mode: str, tmp_path: Path, run_python: Callable) -> None:
    code = """
import resource, sys
from tiered.errors import StorageError
from tiered.io import SwapSpace
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (96 << 20),) * 2)
try:
    SwapSpace([sys.argv[1]], threads=2000).close()
except (StorageError, MemoryError) as error:
    print(type(error).__name__)
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_descriptors_that_run_out_are_a_named_error(mode: str, tmp_path: Path, run_python: Callable) -> None:
    code = """
import gc, os, resource, sys
from tiered.errors import StorageError
from tiered.io import SwapSpace
for spare in range(12):
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, 4096))
    try:
        SwapSpace([sys.argv[1]], threads=2).close()
    except StorageError as error:
        assert error.filename
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    assert os.listdir(sys.argv[1]) == [], spare
    gc.collect()  # a half-made asyncio loop keeps its descriptors until then
    assert len(os.listdir("/proc/self/fd")) - 1 == used
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr

"""What the I/O tests share: both engines, memory at any alignment, and code run in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tiered.io import Extent, SwapSpace

Bytes = npt.NDArray[np.uint8]
# Before the code of a child process: the package without its __init__, which loads torch and takes seconds to do so.
PRELUDE = """
import importlib.util, sys, types
package = types.ModuleType("tiered")
package.__path__ = list(importlib.util.find_spec("tiered").submodule_search_locations)
sys.modules["tiered"] = package
"""
HAS_NATIVE = (
    subprocess.run([sys.executable, "-c", PRELUDE + "import tiered._native"], capture_output=True).returncode == 0
)


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.native), "portable"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with each engine; child processes inherit the choice."""
    if request.param == "native":
        if not HAS_NATIVE:
            pytest.skip("the extension tiered._native is not installed")
        monkeypatch.delenv("TIERED_PORTABLE", raising=False)
    else:
        monkeypatch.setenv("TIERED_PORTABLE", "1")
    return str(request.param)


@pytest.fixture
def open_space(mode: str, tmp_path: Path) -> Iterator[Callable[..., SwapSpace]]:
    """Opens swap spaces on directories below tmp_path (named on the call, else one) and closes them at the end. Their
    weights are equal unless a test says otherwise: what is measured here is noise."""
    spaces = []

    def open_one(*names: str, **settings: Any) -> SwapSpace:
        settings = {"weights": (1,) * max(1, len(names)), **settings}
        directories = [tmp_path / name for name in names or ("swap",)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        spaces.append(SwapSpace(directories, **settings))
        assert spaces[-1].mode == mode
        return spaces[-1]

    yield open_one
    for space in spaces:
        space.close()


@pytest.fixture
def memory() -> Callable[..., Bytes]:
    """Makes `nbytes` of memory at `misalignment` bytes past a multiple of 4096, random, or filled with `fill`."""

    def make(nbytes: int, misalignment: int = 0, seed: int = 0, fill: int | None = None) -> Bytes:
        backing = np.empty(nbytes + 2 * 4096, np.uint8)
        start = -backing.ctypes.data % 4096 + misalignment
        view = backing[start : start + nbytes]
        view[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8) if fill is None else fill
        return view

    return make


@pytest.fixture
def store() -> Callable[[SwapSpace, Bytes], Extent]:
    """Allocates an extent, writes the bytes to it and waits."""

    def write(space: SwapSpace, data: Bytes, label: str = "weights") -> Extent:
        extent = space.allocate(data.nbytes, label)
        space.write(extent, data.ctypes.data, data.nbytes).wait(60)
        return extent

    return write


@pytest.fixture
def load() -> Callable[[SwapSpace, Extent], Bytes]:
    """Reads a whole extent into fresh memory that held other bytes before."""

    def read(space: SwapSpace, extent: Extent) -> Bytes:
        into = np.full(extent.nbytes, 0xA5, np.uint8)
        space.read(extent, into.ctypes.data, into.nbytes).wait(60)
        return into

    return read


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a fresh interpreter, `arguments` in sys.argv[1:], with warnings as errors and a time limit."""

    def run(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [*prefix, sys.executable, "-W", "error", "-c", PRELUDE + code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, env=dict(os.environ))

    return run


@pytest.fixture
def start_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts code like run_python, with a pipe for its output, and kills what still runs at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", PRELUDE + code, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def run_mounted(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code where mounts are private to it and end with it; skips where that takes rights we lack."""
    prefix = ("unshare", "--mount", "--propagation", "private")
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("private mounts need root and unshare(1)")

    def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return run_python(code, *arguments, prefix=prefix)

    return run

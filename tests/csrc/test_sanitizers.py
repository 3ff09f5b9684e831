"""The C++ core alone, under the address, undefined-behaviour and thread sanitizers: no report, and every claim holds.

Each program is plain C++ built here from its sources and run with one argument, a directory it may write to.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    # program in this directory: the sources in csrc/ it is built with
    "test_adam.cpp": ["adam.cpp", "adam_avx2.cpp", "adam_avx512.cpp", "thread_pool.cpp"],
    "test_io_engine.cpp": ["crc32c.cpp", "file.cpp", "io_engine.cpp", "io_workers.cpp"],
}
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1", "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
TRIVIAL = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"


def build(sources: list[Path], sanitizer: str, into: Path) -> "subprocess.CompletedProcess[str]":
    """Compiles and links `sources` with one of SANITIZERS."""
    assert COMPILER is not None
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread", *SANITIZERS[sanitizer]]
    command = [COMPILER, *flags, *map(str, sources), "-o", str(into)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(params=SANITIZERS)
def sanitizer(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each sanitizer that can be built and run here."""
    if COMPILER is None:
        pytest.skip("no C++ compiler here")
    source, program = tmp_path / "trivial.cpp", tmp_path / "trivial"
    source.write_text(TRIVIAL)
    if build([source], request.param, program).returncode or subprocess.run([program], timeout=60).returncode:
        pytest.skip(f"this compiler or kernel has no {request.param} sanitizer")
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_core_runs_clean(name: str, sanitizer: str, tmp_path: Path) -> None:
    sources = [Path(__file__).parent / name, *(ROOT / "csrc" / source for source in PROGRAMS[name])]
    program = tmp_path / "program"
    built = build(sources, sanitizer, program)
    assert built.returncode == 0, built.stderr
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, **OPTIONS}
    ran = subprocess.run([program, scratch], capture_output=True, text=True, timeout=250, env=environment)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert list(scratch.iterdir()) == []


def test_a_sanitizer_that_finds_something_fails_the_run(sanitizer: str, tmp_path: Path) -> None:
    racy = """
#include <thread>
#include <vector>
int shared = 0;
int main() {
  std::thread other([] { shared = 1; });
  shared = 2;
  other.join();
  std::vector<int> three(3);
  volatile int past = 3;
  volatile int found = three.data()[past];
  return found * 0;
}
"""
    source, program = tmp_path / "racy.cpp", tmp_path / "racy"
    source.write_text(racy)
    assert build([source], sanitizer, program).returncode == 0
    ran = subprocess.run([program], capture_output=True, timeout=60, env={**os.environ, **OPTIONS})
    assert ran.returncode != 0
    assert ran.stderr

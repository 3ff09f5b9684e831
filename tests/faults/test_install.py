"""Installing where no compiler works: it succeeds, without the extension, and what is installed trains."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS_OF_THE_PAGE = ("page.html", "page.css", "page.js", "chart.js", "units.js")
PROGRAM = """
import logging, sys
import torch, tiered
from tiered.optim import kernels
assert tiered.__file__.startswith(sys.argv[1]), tiered.__file__
assert not kernels.native()
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
config = tiered.Config(device="cpu", host_budget="2MiB", nvme=sys.argv[2], param_tier="nvme", optimizer_tier="nvme")
with tiered.shard(model, config):
    optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tiered.stats(model).read_bytes["nvme"] > 0
"""


@pytest.mark.slow
def test_without_a_compiler_the_package_installs_and_trains_without_the_extension(tmp_path: Path, swap: Path) -> None:
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("csrc", "tiered"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", str(wheels), str(source)],
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = wheels.glob("tiered-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_native" in name]
        assert {f"tiered/cli/{name}" for name in PARTS_OF_THE_PAGE} <= set(archive.namelist())
        archive.extractall(site)
    # the unpacked wheel goes first on the path, and the finder of an editable install out of the way
    hide = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]"
    run = subprocess.run(
        [sys.executable, "-c", f"{hide}; sys.path.insert(0, sys.argv[1])\n{PROGRAM}", str(site), str(swap)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "portable" in run.stderr, "the notice that names the mode is missing"

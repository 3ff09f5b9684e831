"""What the tests of inspections share: a small model, what it saves and what it leaves, and a look at what is touched.

Invariant: `untouched` compares names, sizes, modes, times of change and contents of all that is below a folder.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tiered.checkpoint import manifest
from tiered.checkpoint.folder import MANIFEST

WIDTH = 300
PLACES = {"device": "cpu", "host_budget": "64MiB", "param_tier": "nvme", "optimizer_tier": "nvme"}


class Ended(Exception):
    """How a run ends before its time."""


@contextlib.contextmanager
def running(swap: Any, steps: int) -> Iterator[tuple[nn.Module, tiered.AdamW]]:
    """A run that has taken so many steps; it leaves its last one in `swap` where the block ends by an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 7))
    with tiered.shard(model, tiered.Config(nvme=swap, **PLACES)):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(steps):
            step(model, optimizer)
        yield model, optimizer


def step(model: nn.Module, optimizer: tiered.AdamW) -> None:
    model(torch.randn(6, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def leave(swap: Any, steps: int = 2) -> None:
    """A run ends by an error."""
    with pytest.raises(Ended), running(swap, steps):
        raise Ended


def data_file(saved: Path) -> Path:
    (found,) = saved.glob("*/rank-0.safetensors")
    return found


def rewritten(saved: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest, and make its hash fit."""
    body = json.loads((saved / MANIFEST).read_text())["manifest"]
    change(body)
    text = json.dumps(body, indent=1)
    digest = manifest.hash_of(text.encode())
    (saved / MANIFEST).write_text(f'{{"xxh3": "{digest}", "manifest":\n{text}}}\n')


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def kinds(found: tiered.Inspection) -> list[str]:
    """Of the faults."""
    return [finding.kind for finding in found.faults]


@contextlib.contextmanager
def untouched(folder: Path) -> Iterator[None]:
    before = _all(folder)
    yield
    assert _all(folder) == before


def _all(folder: Path) -> dict[str, Any]:
    made = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        whole = path.is_file() and not path.is_symlink() and about.st_size < 1 << 30
        data = hashlib.sha256(path.read_bytes()).hexdigest() if whole else ""
        made[str(path)] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns, data)
    return made

"""A program that trains in a fresh process and prints, as JSON, what the process holds at each moment.

Usage: probe.py SCENARIO SWAP_DIRECTORY. Run by `test_leaks`, which sets the time limit: process-wide counts (threads,
descriptors, mappings, resident bytes) mean nothing in a test process shared with other tests.
"""

import contextlib
import gc
import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

import tiered

WIDTH = 512  # one layer is 1 MiB of float32
LAYERS = 8
MIB = 1 << 20


class Chain(nn.Module):
    """Equal layers in a row."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, broken: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == broken:
                raise ZeroDivisionError
            x = layer(x).tanh()
        return x.pow(2).mean()


def config(swap: Path, **settings: Any) -> Any:
    chosen = {"device": "cpu", "host_budget": "24MiB", "param_tier": "nvme", "optimizer_tier": "nvme"}
    return tiered.Config(nvme=swap, **{**chosen, **settings})


def held(swap: Path) -> dict[str, Any]:
    """What this process holds now."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "python threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "resident": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024,
        "peak": int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024,
        "files": sum(len(files) + len(folders) for _, folders, files in os.walk(swap)),
        "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
    }


def cycle(swap: Path, *, fail: bool = False, **settings: Any) -> weakref.ref:
    """Opens, trains, maybe fails in the middle of a forward, and closes; returns a weak reference to the model."""
    model = Chain()
    x = torch.ones(2, WIDTH)
    tiered.shard(model, config(swap, **settings))
    optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    if fail:
        with contextlib.suppress(ZeroDivisionError):
            model(x, broken=LAYERS // 2)
        model(x)  # a forward whose graph is dropped, then one with gradients still waiting at the close
        model(x).backward()
    tiered.close(model)
    return weakref.ref(model)


def repeated(swap: Path, **how: Any) -> list[dict[str, Any]]:
    """Counts after the 1st, the 5th and the 20th cycle, and how many models of them live on."""
    moments = []
    models = []
    for index in range(20):
        models.append(cycle(swap, **how))
        if index in (0, 4, 19):
            moments.append(held(swap))
    moments[-1]["models alive"] = sum(model() is not None for model in models)
    return moments


def cycles(swap: Path) -> list[dict[str, Any]]:
    return repeated(swap)


def cycles_on_a_device(swap: Path) -> list[dict[str, Any]]:
    return repeated(swap, device="emulated", device_budget="16MiB")


def cycles_with_failures(swap: Path) -> list[dict[str, Any]]:
    return repeated(swap, fail=True)


def steps(swap: Path) -> list[dict[str, Any]]:
    """One model over many steps: counts after the 3rd and after the 25th."""
    model = Chain()
    x = torch.ones(2, WIDTH)
    moments = []
    with tiered.shard(model, config(swap)):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
        for index in range(25):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if index in (2, 24):
                model.state_dict()
                moments.append(held(swap))
    return moments


def peak(swap: Path) -> list[dict[str, Any]]:
    """A model whose states are 128 MiB under a host budget of 24 MiB, from construction on."""
    chosen = config(swap)
    before = held(swap)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    with tiered.deferred_init(chosen):
        model = Chain(32)
    tiered.shard(model, chosen)
    optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    after = held(swap)
    tiered.close(model)
    return [before, after]


def left_open(swap: Path) -> list[dict[str, Any]]:
    """Ends without close(), with an update still open and gradients waiting."""
    model = Chain()
    tiered.shard(model, config(swap))
    optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    return [held(swap)]


def raised(swap: Path) -> list[dict[str, Any]]:
    """Ends by an uncaught error in the middle of a forward pass."""
    model = Chain()
    tiered.shard(model, config(swap))
    print(json.dumps([held(swap)]), flush=True)
    model(torch.ones(2, WIDTH), broken=4)
    return []


SCENARIOS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    function.__name__: function
    for function in (cycles, cycles_on_a_device, cycles_with_failures, steps, peak, left_open, raised)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))))

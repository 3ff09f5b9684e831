"""What the parts of `tools/gpu_check` share: the device they time on, the decoder they train, and how they report.

Owns: `Settings` (what the parent process tells a part), `Machine` (one device, real or emulated), `decoder` (random
weights without the time and the memory of real initialisation), `emit` (one line of JSON, merged by the parent).
Invariants:
1. A figure has its unit in its name: _s, _bytes, _bytes_per_s, _tokens_per_s, _share.
2. What a part has measured is printed at once, so that a part that is stopped loses only what was still to come.
"""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tiered.cli.gpt import GPT, GPTShape

Figures = dict[str, Any]
_TILE = (1 << 20) + 7  # odd, so that no two rows of a matrix repeat


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the parent tells a part. `seconds`: until the parent stops it; `probes`: what this run measured before."""

    device: str
    small: bool
    seconds: float
    swap: str
    ram_bytes: int
    tiers: Literal["auto", "host"]
    probes: Figures = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    @classmethod
    def given(cls) -> "Settings":
        """From the last argument of the command line."""
        return cls(**json.loads(sys.argv[-1]))

    def left_s(self) -> float:
        """Seconds until the parent stops this process, less what it takes to end well."""
        return self.seconds - 5 - (time.monotonic() - self.started_s)

    def free_swap_bytes(self) -> int:
        """Bytes free on the drive of `swap`."""
        return shutil.disk_usage(Path(self.swap)).free


class Machine:
    """The device that figures are of: a GPU, or the CPU standing in for one."""

    def __init__(self, name: str) -> None:
        self.cuda = name == "cuda"
        self.device = torch.device("cuda" if self.cuda else "cpu")
        if self.cuda:
            torch.zeros(1, device=self.device)  # creates the context: no part of any figure

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def peak_allocated_bytes(self) -> int:
        """Most bytes allocated since `forget_peak`; 0 where there is no GPU."""
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def forget_peak(self) -> None:
        """Give back what the allocator keeps, and count peaks from now on."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of one `work`, over `times` given one after the other, everything they started included."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return (time.perf_counter() - start) / times


def emit(**figures: Any) -> None:
    """Report figures to the parent process."""
    print(json.dumps(figures), flush=True)


def decoder(shape: GPTShape, dtype: torch.dtype = torch.bfloat16) -> GPT:
    """A GPT on the CPU, all of it in `dtype`: `dtype.itemsize` bytes of RAM a parameter, filled at memory speed.

    Matrices repeat one random tile, norms are ones, biases zeros. Built without values first, because initialising 6 B
    fp32 parameters on a CPU takes minutes and 24 GB.
    """
    with torch.device("meta"):
        model = GPT(shape).to(dtype)
    model.to_empty(device="cpu")
    tile = (torch.randn(_TILE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:
                _repeat(param.view(-1), tile)
            else:
                param.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model


def _repeat(flat: Tensor, tile: Tensor) -> None:
    whole = flat.numel() // _TILE * _TILE
    flat[:whole].view(-1, _TILE).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])


def batch(shape: GPTShape, tokens: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, int64 (tokens / context, context) each, on `device`."""
    text = torch.randint(shape.vocabulary, (tokens // context, context + 1), generator=torch.Generator().manual_seed(1))
    text = text.to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def compute_seconds(machine: Machine, shape: GPTShape, given: Sequence[Tensor]) -> float:
    """Seconds of forward and backward of the whole decoder in plain torch, were all of it on the device.

    Measured with one block and with three, everything else the same, and extrapolated in a straight line. Recomputation
    under checkpointing is part of it, an optimizer is not.
    """

    def measured(layers: int) -> float:
        model = decoder(dataclasses.replace(shape, layers=layers)).to(machine.device)

        def work() -> None:
            model(*given).backward()
            model.zero_grad()

        work()
        return min(machine.seconds(work) for _ in range(3))

    one, three = measured(1), measured(3)
    return one + (shape.layers - 1) * (three - one) / 2


def train_step(model: nn.Module, optimizer: Any, given: Sequence[Tensor]) -> Tensor:
    """One whole step; returns the loss, which nobody has waited for."""
    loss: Tensor = model(*given)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

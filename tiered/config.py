"""Settings: what a user may choose, checked when it is chosen.

Owns the spelling and the range of every setting. Invariants:
1. A `Config` that exists is self-consistent; sizes are whole bytes, directories are absolute paths.
2. Nothing here looks at a model or a machine: whether budgets suffice for a model is `zero.placing`'s question.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch

from tiered.errors import ConfigError

TierName = Literal["auto", "device", "host", "nvme"]
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(value: int | str, field: str = "size") -> int:
    """Whole bytes from an int or text such as "512MiB", "20GiB", "1.5GB" (MiB = 2**20, MB = 10**6).

    Raises ConfigError naming `field` where the text is no size or the size is negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2].lower() in _UNITS:
        return int(float(match[1]) * _UNITS[match[2].lower()])
    raise ConfigError(f"{field}={value!r} is not a size: give bytes as an int, or text such as '512MiB' or '20GiB'")


def format_size(nbytes: int) -> str:
    """`nbytes` for people: "64.0 MiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Which dtypes compute and gradients use; optimizer states and master weights are always fp32.

    param_dtype: the dtype parameters have and compute in, as after `model.to(dtype)`; state_dict() still gives each
        parameter in its own dtype, from the master. None keeps each parameter's own dtype. Norms with running
        statistics keep theirs.
    reduce_dtype: the dtype gradients are reduced and accumulated in; None means the compute dtype.
    cast_inputs: cast floating-point tensors given to the model's forward to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        allowed = (None, torch.float32, torch.bfloat16, torch.float16)
        for field in ("param_dtype", "reduce_dtype"):
            if getattr(self, field) not in allowed:
                raise ConfigError(f"{field}={getattr(self, field)!r}: use torch.float32, bfloat16, float16 or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emulation:
    """How device="emulated" behaves: link speeds in bytes per second (None: unthrottled), a random delay of up to
    `max_delay_s` seconds before every copy, and `poison`: freed and not yet arrived device memory reads as NaN."""

    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    max_delay_s: float = 0.0
    seed: int = 0
    poison: bool = True

    def __post_init__(self) -> None:
        for field in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
            speed = getattr(self, field)
            if speed is not None and not speed > 0:
                raise ConfigError(f"{field}={speed!r}: a link speed is a positive number of bytes per second, or None")
        if not self.max_delay_s >= 0:
            raise ConfigError(f"max_delay_s={self.max_delay_s!r}: a delay is a number of seconds >= 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where a model's states may live, and how much of each memory they may use.

    device: "cuda", "cpu" or "emulated" (a CPU device behind an asynchronous link, for tests); None is the GPU where
        torch sees one, else the CPU.
    device_budget: bytes (or "20GiB") of the device for everything: gathered parameters, states that live there and,
        on a GPU, activations as measured. None: on a GPU nine tenths of what is free, on a CPU a window of the three
        largest groups.
    host_budget: bytes of RAM for everything kept on the host: parameters, gradients, optimizer states, staging.
        None: four fifths of the memory that is available (cgroup limits respected).
    nvme: directory or directories for swap files; None: nothing goes to a drive.
    param_tier, optimizer_tier: "device", "host", "nvme", or "auto": the fastest tier first within the budgets, what
        does not fit goes down, group by group. optimizer_tier="device" keeps whole groups on a GPU, updated there by
        torch's fused kernel (with several ranks, or another param_tier, their optimizer states alone); "auto" does so
        with the first groups, once a step has shown what activations need. Where the device is the CPU it is the host.
    stage: ZeRO stage, of what several ranks share: 1 partitions optimizer states, 2 gradients too, 3 parameters too.
        What is not partitioned every rank has whole, on any tier. At one rank it changes nothing.
    budgets: whether the budgets given are those of each rank ("rank"), or of all ranks of one node together ("node").
    rank_timeout_s: seconds that other ranks wait for one that makes no call; ten times that while it computes.
    initial_values: where ranks come to `shard` with different values, take those of rank 0 ("rank0"), or refuse them
        by name ("equal").
    groups: module classes whose instances are each gathered as one group; None: elements of ModuleList and
        Sequential, large single layers, and the rest.
    io_threads: threads per drive.
    drive_timeout_s: seconds a drive may take over one transfer of 1 MiB or less. After them it is reported by name, and
        a read is made once more; after as many again it is an error. None: no limit.
    drive_endurance: bytes that a drive may be written in its life, as its maker rates it ("600TB"); one for all, or one
        for each directory. `tiered.stats` then says how many days that lasts. None: not known.
    durability: what of a run that is killed is on the drives, where all its states live there: each step ("process":
        whatever ends the process, or the system), each step and that through a loss of power ("power": one flush of
        the drives more a step), or nothing, in half the space ("none").
    overlap: what goes on beside computation: "none", everything happens when it is needed; "prefetch", parameters come
        ahead of use; "forward", beside that a step's update goes on under the next forward; "backward", beside that
        updates are computed during backward already, as far as the step can be expected to be what it then is; "auto":
        the last, in the steps that it makes faster. Results are the same, bit for bit.
    trace: a file to write a timeline of the run to, which chrome://tracing and Perfetto (ui.perfetto.dev) open; what
        is there is replaced. With several ranks each has its own: run.json becomes run-r0.json, run-r1.json, ...

    Raises ConfigError naming field, value and what would work.
    """

    device: str | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    nvme: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None
    param_tier: TierName = "auto"
    optimizer_tier: TierName = "auto"
    stage: int = 3
    budgets: Literal["rank", "node"] = "rank"
    rank_timeout_s: float = 30.0
    initial_values: Literal["rank0", "equal"] = "rank0"
    precision: MixedPrecision = MixedPrecision()
    groups: tuple[type[torch.nn.Module], ...] | None = None
    io_threads: int = 8
    drive_timeout_s: float | None = 30.0
    drive_endurance: int | str | Iterable[int | str] | None = None
    durability: Literal["process", "power", "none"] = "process"
    overlap: Literal["auto", "none", "prefetch", "forward", "backward"] = "auto"
    trace: str | os.PathLike[str] | None = None
    emulation: Emulation = Emulation()

    def __post_init__(self) -> None:
        if self.device not in (None, "cuda", "cpu", "emulated"):
            raise ConfigError(f"device={self.device!r}: use 'cuda', 'cpu', 'emulated', or None to choose")
        for field in ("device_budget", "host_budget"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, parse_size(value, field))
        for field in ("param_tier", "optimizer_tier"):
            if getattr(self, field) not in ("auto", "device", "host", "nvme"):
                raise ConfigError(f"{field}={getattr(self, field)!r}: use 'auto', 'device', 'host' or 'nvme'")
        object.__setattr__(self, "nvme", _directories(self.nvme))
        for field in ("param_tier", "optimizer_tier"):
            if getattr(self, field) == "nvme" and not self.nvme:
                raise ConfigError(f"{field}='nvme' needs a swap directory: set nvme='/path/on/a/drive'")
        self._check_ranks()
        if not isinstance(self.io_threads, int) or not 1 <= self.io_threads <= 256:
            raise ConfigError(f"io_threads={self.io_threads!r}: use a whole number from 1 to 256")
        if self.drive_timeout_s is not None:
            if not isinstance(self.drive_timeout_s, (int, float)) or not 0 < self.drive_timeout_s < float("inf"):
                raise ConfigError(f"drive_timeout_s={self.drive_timeout_s!r}: use a number of seconds above 0, or None")
            object.__setattr__(self, "drive_timeout_s", float(self.drive_timeout_s))
        object.__setattr__(self, "drive_endurance", _endurance(self.drive_endurance, len(self.directories)))
        if self.durability not in ("process", "power", "none"):
            raise ConfigError(f"durability={self.durability!r}: use 'process', 'power' or 'none'")
        if self.overlap not in ("auto", "none", "prefetch", "forward", "backward"):
            raise ConfigError(f"overlap={self.overlap!r}: use 'auto', 'none', 'prefetch', 'forward' or 'backward'")
        if self.trace is not None:
            if not isinstance(self.trace, (str, os.PathLike)) or not os.fspath(self.trace):
                raise ConfigError(f"trace={self.trace!r}: give the path of a file, or None")
            object.__setattr__(self, "trace", Path(os.path.abspath(os.path.expanduser(self.trace))))
        for field, kind in (("precision", MixedPrecision), ("emulation", Emulation)):
            if not isinstance(getattr(self, field), kind):
                raise ConfigError(f"{field}={getattr(self, field)!r}: give a tiered.{kind.__name__}(...)")
        if self.groups is not None:
            groups = tuple(self.groups)
            if not all(isinstance(g, type) and issubclass(g, torch.nn.Module) for g in groups):
                raise ConfigError(f"groups={self.groups!r}: give a tuple of torch.nn.Module classes, or None")
            object.__setattr__(self, "groups", groups)

    def _check_ranks(self) -> None:
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise ConfigError(
                f"stage={self.stage!r}: use 1 (optimizer states are partitioned), 2 (gradients too) or 3 (parameters "
                f"too); stage 0, nothing partitioned, is torch's DistributedDataParallel"
            )
        if self.budgets not in ("rank", "node"):
            raise ConfigError(f"budgets={self.budgets!r}: use 'rank' or 'node'")
        if not isinstance(self.rank_timeout_s, (int, float)) or not 0 < self.rank_timeout_s < float("inf"):
            raise ConfigError(f"rank_timeout_s={self.rank_timeout_s!r}: use a number of seconds above 0")
        object.__setattr__(self, "rank_timeout_s", float(self.rank_timeout_s))
        if self.initial_values not in ("rank0", "equal"):
            raise ConfigError(f"initial_values={self.initial_values!r}: use 'rank0' or 'equal'")

    @property
    def endurance(self) -> tuple[int, ...]:
        """Rated bytes of each directory's drive; empty where they are not known."""
        return self.drive_endurance  # type: ignore[return-value]

    @property
    def directories(self) -> tuple[Path, ...]:
        """Swap directories as absolute paths; empty where nothing goes to a drive."""
        return self.nvme  # type: ignore[return-value]


def _endurance(given: int | str | Iterable[int | str] | None, drives: int) -> tuple[int, ...]:
    if given is None:
        return ()
    several = not isinstance(given, (int, str))
    each: Iterable[int | str] = (given,) if isinstance(given, (int, str)) else given
    rated = tuple(parse_size(one, "drive_endurance") for one in each)
    if rated and several and len(rated) != drives:
        raise ConfigError(f"drive_endurance={given!r}: got {len(rated)} ratings for {drives} directories in nvme")
    if not all(rated):
        raise ConfigError(f"drive_endurance={given!r}: a drive's rating is more than 0 bytes, such as '600TB'")
    return rated if several else rated * drives


def _directories(
    nvme: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None,
) -> tuple[Path, ...]:
    if nvme is None:
        return ()
    given = [nvme] if isinstance(nvme, (str, os.PathLike)) else list(nvme)
    if not all(isinstance(d, (str, os.PathLike)) and os.fspath(d) for d in given):
        raise ConfigError(f"nvme={nvme!r}: give a directory, or a list of directories")
    found = tuple(Path(os.path.abspath(os.path.expanduser(d))) for d in given)
    if len(set(found)) != len(found):
        raise ConfigError(f"nvme={[str(d) for d in found]!r}: the same directory is named twice")
    return found

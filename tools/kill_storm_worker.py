"""One rank of tools/kill_storm: a small run whose states are all on NVMe, which tells what it does and what it has.

    shard -> resume -> (load) -> { forward and backward, step, every few steps a save } -> close

Marks go to a pipe, a byte at the beginning and one at the end of each phase (PHASES). Facts go to a file, a line of
JSON each: {"step": s} once step s has returned, with "digest" where it is complete, and {"saved": s}. The numbers
and data of a step depend on nothing but the seed, the step and the rank, so whatever was killed before it, a step has
one state.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiered
from tiered.io.generations import Generations

PHASES = {
    "shard": "h",
    "resume": "r",
    "load": "l",
    "backward": "b",
    "step": "s",
    "commit": "c",
    "save": "v",
    "background": "g",
    "close": "x",
}
"""The byte that begins a phase; the capital letter ends it."""
JOINED = "j"
WIDTH, SAVE_EVERY, RANK_TIMEOUT_S = 48, 3, 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks of one attempt are to do."""

    swap: tuple[Path, ...]
    saved: Path | None
    """Folder of the checkpoints; None: none are written."""
    steps: int
    ranks: int
    meeting: Path
    """A file for the ranks to find each other by; new in each attempt."""
    load: bool = False
    """Go back to the last checkpoint after resuming."""


class Counted(nn.Module):
    """Computes with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * (1 + self.seen[0] / 64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Counted(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers)


def made(model: nn.Module) -> tiered.AdamW:
    return tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)


def digest(model: nn.Module, optimizer: tiered.AdamW) -> str:
    """Of every value, moment, step count and hyperparameter."""
    seen = hashlib.sha256()

    def take(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            seen.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                take(f"{name}.{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                take(f"{name}.{number}", each)
        else:
            seen.update(f"{name} {value!r}\n".encode())

    take("model", dict(model.state_dict()))
    take("optimizer", optimizer.state_dict())
    return seen.hexdigest()


def train_step(model: nn.Module, optimizer: tiered.AdamW, step: int, rank: int, mark: "Mark") -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step % 5)  # as a scheduler would
    optimizer.max_grad_norm = 0.5 if step % 5 == 4 else None  # what was computed before such a step may be wrong
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    with mark("backward"):
        model(batch).square().mean().backward()
    with mark("step"):
        optimizer.step()
    optimizer.zero_grad()


Mark = Callable[[str], AbstractContextManager[None]]
Tell = Callable[..., None]


def marking(pipe: int) -> Mark:
    """Tells the beginning and, where it ends well, the end of a phase."""

    @contextmanager
    def mark(phase: str) -> Any:
        os.write(pipe, PHASES[phase].encode())
        yield
        os.write(pipe, PHASES[phase].upper().encode())

    return mark


def mark_commits(mark: Mark) -> None:
    """From now on each commit of this process is a phase."""
    commit = Generations.commit

    def marked(*given: Any) -> None:
        with mark("commit"):
            commit(*given)

    Generations.commit = marked  # type: ignore[method-assign]


def work(order: Order, rank: int, facts: Path, pipe: int, go: int) -> None:
    """Run until all steps are done, or something ends it."""
    torch.set_num_threads(1)
    mark = marking(pipe)
    mark_commits(mark)
    if order.ranks > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(order.ranks)
        meeting = f"file://{order.meeting}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=order.ranks)
    os.write(pipe, JOINED.encode())
    os.read(go, 1)  # who is killed before all have met is no concern of this package
    with facts.open("a") as out:

        def tell(**fact: Any) -> None:
            out.write(json.dumps(fact) + "\n")
            out.flush()

        places = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme": order.swap, "host_budget": "16MiB"}
        with mark("shard"):
            config = tiered.Config(device="cpu", rank_timeout_s=RANK_TIMEOUT_S, overlap="backward", **places)
            model = tiered.shard(network(), config)
        optimizer = made(model)
        with mark("resume"):
            step = tiered.resume(model, optimizer)
        tell(step=step, digest=digest(model, optimizer), resumed=True)
        if order.load:
            with mark("load"):
                step = tiered.load(model, optimizer, order.saved)["step"]
            tell(step=step, digest=digest(model, optimizer))
        saves = None if order.saved is None else _Saves(model, optimizer, order.saved, mark, tell)
        while step < order.steps:
            train_step(model, optimizer, step, rank, mark)
            step += 1
            tell(step=step)
            if saves is None or step % 2:  # reading completes the step; others are completed under the next forward
                tell(step=step, digest=digest(model, optimizer))
            if saves is not None:
                saves.look()
                if step % SAVE_EVERY == 0:
                    saves.save(step)
        if saves is not None:
            saves.look(wait=True)
        with mark("close"):
            tiered.close(model)


class _Saves:
    """Saves a step in the foreground, the next one beside training; each is told of once it is there."""

    def __init__(self, model: nn.Module, optimizer: tiered.AdamW, folder: Path, mark: Mark, tell: Tell) -> None:
        self._model, self._optimizer, self._folder = model, optimizer, folder
        self._mark, self._tell = mark, tell
        self._beside: tuple[int, AbstractContextManager[None]] | None = None

    def save(self, step: int) -> None:
        beside = step % (2 * SAVE_EVERY) == 0
        self.look(wait=True)
        phase = self._mark("background" if beside else "save")
        phase.__enter__()
        tiered.save(self._model, self._optimizer, self._folder, extra={"step": step}, keep=2, background=beside)
        self._beside = step, phase
        if not beside:
            self.look(wait=True)

    def look(self, wait: bool = False) -> None:
        """Tell of what is over."""
        if self._beside is not None and not tiered.saving(self._model, wait=wait):
            step, phase = self._beside
            phase.__exit__(None, None, None)
            self._tell(saved=step)
            self._beside = None


def inspect_checkpoint(folder: Path) -> tuple[int, str | None]:
    """The step that the newest checkpoint in `folder` says it is of, and the digest of what it holds; 0 and None where
    there is none yet."""
    torch.set_num_threads(1)
    with tiered.shard(network(), tiered.Config(device="cpu")) as model:
        optimizer = made(model)
        try:
            step = tiered.load(model, optimizer, folder)["step"]
        except tiered.StorageError as error:
            if error.errno == errno.ENOENT and not list(folder.glob("step-*/manifest.json")):
                return 0, None
            raise
        return step, digest(model, optimizer)

"""One rank's side of a parity run: where its bytes live, its part of each joined batch, and what it observed.

Owns: placements and their budgets, a model with its optimizer from shard to close, and the training loop.
Invariants:
1. The same scenario runs on every rank and, with `Where.ranks == 1`, in one process that has the whole joined batch.
   There a model that is told its part plays every part in one forward each, and any other takes the batch as a whole.
2. A session closes; on a clean exit the module must be plain and hold the values it trained.
3. An observation holds what must be the same on every rank, bit for bit, beside two entries: "losses", one of each
   step, whose mean over ranks is the joined one, and "own", part -> what only that part's rank has seen.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity.harness import ADAM, SEED, copied, same
from ranks.parity_models import Case
from torch import Tensor, nn

import tiered

STAGES = (1, 2, 3)
DELAY_S = 5e-4  # at most, before each copy over the emulated link
LINK = tiered.Emulation(max_delay_s=DELAY_S, seed=SEED)
DRIVE = {"param_tier": "nvme", "optimizer_tier": "nvme"}
AMPLE = "32MiB"
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu", "host_budget": AMPLE},
    "drive": {"device": "cpu", "host_budget": AMPLE, **DRIVE},
    "states on drive": {"device": "cpu", "host_budget": AMPLE, "param_tier": "host", "optimizer_tier": "nvme"},
    "device": {"device": "emulated", "emulation": LINK, "host_budget": AMPLE, "optimizer_tier": "host"},
    "device and drive": {"device": "emulated", "emulation": LINK, "host_budget": AMPLE, **DRIVE},
    "states on device": {"device": "emulated", "emulation": LINK, "host_budget": AMPLE, "optimizer_tier": "device"},
    "device states, drive": {
        "device": "emulated",
        "emulation": LINK,
        "host_budget": AMPLE,
        "param_tier": "nvme",
        "optimizer_tier": "device",
    },
    "tight": {"device": "cpu", "device_budget": 1, "host_budget": 1},
    "tight device": {"device": "emulated", "emulation": LINK, "device_budget": 1, "host_budget": 1},
    "tight device states": {
        "device": "emulated",
        "emulation": LINK,
        "device_budget": 1,
        "host_budget": 1,
        "optimizer_tier": "device",
    },
}
ENOUGH = re.compile(r"^(device_budget|host_budget)=.* at least (\d+)")


@dataclass(frozen=True)
class Where:
    """Which rank this is, of how many, which parts of the joined batch exist, and where bytes live."""

    rank: int
    ranks: int
    parts: int
    stage: int
    place: str
    swap: Path

    @property
    def mine(self) -> Sequence[int]:
        """The parts of the joined batch that this process plays."""
        return range(self.parts) if self.ranks == 1 else [self.rank]

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"stage": self.stage, "nvme": self.swap, **PLACES[self.place], **more}


@dataclass
class Session:
    """A sharded model in training."""

    where: Where
    case: Case
    model: nn.Module
    optimizer: tiered.AdamW
    apart: bool = (
        False  # one process runs a backward for each part, so that 16-bit gradients are rounded, and overflow,
    )
    # as on ranks: undivided. Their sum is a multiple of the mean, so a step is the same only where it is clipped.

    def parts(self, seed: int) -> list[tuple[tuple[Tensor, ...], dict[str, int]]]:
        """What this process gives to the model for joined batch number `seed`: rows, and which part they are."""
        where, rows = self.where, self.case.rows(seed)
        if where.ranks == 1 and not self.case.by_part and not self.apart:
            return [(rows, {})]
        of = [{"part": p} if self.case.by_part else {} for p in where.mine]
        return [(tuple(r.chunk(where.parts)[p] for r in rows), how) for p, how in zip(where.mine, of, strict=True)]

    def backward(self, seed: int, share: float = 1.0) -> float:
        """Forward and backward of this process's part of joined batch number `seed`; returns the loss."""
        parts = self.parts(seed)
        losses = [self.model(*rows, **how) for rows, how in parts]
        for loss in losses if self.apart else [sum(losses) / len(losses)]:
            self.optimizer.scale_loss(loss * share).backward()
        return sum(loss.item() for loss in losses) / len(losses)

    def step(self, *, set_to_none: bool = True) -> float:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        return self.optimizer.grad_norm / (len(self.where.mine) if self.apart else 1)

    def train(self, seeds: Sequence[int]) -> dict[str, list[float]]:
        """One whole step on each joined batch."""
        losses, norms = [], []
        for seed in seeds:
            losses.append(self.backward(seed))
            norms.append(self.step())
        return {"losses": losses, "norms": norms}

    def weights(self) -> dict[str, Tensor]:
        return copied(self.model.state_dict())

    def outcome(self) -> dict[str, Any]:
        """What training has made: weights, moments (of parameters that any rank used), skipped steps."""
        moments = copied(self.optimizer.state_dict()["state"])
        return {"weights": self.weights(), "moments": moments, "skipped": self.optimizer.skipped_steps}


@contextlib.contextmanager
def sharded(
    where: Where,
    case: Case,
    *,
    seed: int = SEED,
    build: Callable[[Any], nn.Module] | None = None,
    config: dict[str, Any] | None = None,
    apart: bool = False,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    **adam: Any,
) -> Iterator[Session]:
    """A session; on a clean exit the module is plain and holds its weights, after an error it holds none.

    build: makes the model under a Config; None: as the case does. config: settings beside those of the placement.
    groups: what of the model the optimizer gets.
    """
    torch.manual_seed(seed)
    model = case.build() if build is None else build(tiered.Config(**where.settings(**(config or {}))))
    shard(where, model, **(config or {}))
    try:
        yield Session(where, case, model, tiered.AdamW(groups(model), **{**ADAM, **adam}), apart)
        trained = copied(model.state_dict())
        if not config:  # settings of its own may move more
            _moved(where, tiered.stats(model))
    except BaseException:
        tiered.close(model, keep_weights=False)
        raise
    tiered.close(model)
    assert all(type(p) is nn.Parameter for p in model.parameters()), "close() left a parameter that is not plain"
    same(copied(model.state_dict()), trained, exact=True, where="weights after close")


def _moved(where: Where, stats: tiered.Stats) -> None:
    """The placement did what its name says."""
    read = stats.read_bytes
    if not where.place.startswith("tight"):
        assert (read["nvme"] > 0) == ("drive" in where.place), f"{where.place}: {read}"
    assert (read["device"] > 0) == ("device" in where.place), f"{where.place}: {read}"


def shard(where: Where, model: nn.Module, **config: Any) -> None:
    """tiered.shard; where the placement is tight, with the least budgets that its refusals name."""
    settings = where.settings(**config)
    for _ in range(8):
        try:
            tiered.shard(model, tiered.Config(**settings))
            return
        except tiered.ConfigError as refusal:
            named = ENOUGH.match(str(refusal))
            if named is None or not where.place.startswith("tight"):
                raise
            assert int(named[2]) > settings[named[1]], f"named {named[2]} after it was given: {refusal}"
            settings[named[1]] = int(named[2])
    raise AssertionError(f"the least budgets named do not suffice: {settings}")

"""Runs one piece of training in plain torch and in tiered, wherever its bytes live, and compares what it observed.

Owns: placements, budgets, sessions (a model with its optimizer, opened and closed) and the comparison.
Invariants:
1. The same scenario function runs against plain torch, against tiered with everything on the host, and against tiered
   in each other placement. The last two must agree bit for bit; tiered on the host and plain torch within
   `RTOL`/`ATOL`, as only the order of sums (the gradient norm) and the last bit of an update may differ.
2. A session in tiered always closes, and checks then that the module holds its trained values and the swap is empty.
3. Budgets are far below the bytes they hold, so that what should move does.
`eps` is 1e-4 rather than torch's 1e-8: a gradient that is zero but for rounding would else be scaled up to a full step,
and two correct runs would differ. `ATOL` is a thousandth of one step's usual change.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deferred
import torch
from models import Batch, Case
from torch import Tensor, nn

import tiered
from tiered.errors import TieredError

SEED = 11
RTOL = 1e-5
ATOL = 1e-5
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
PAGE = 4096
LATEST_S = 0.05  # that what computes is late where nobody waits for it


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where tiered keeps a run's bytes; `delay_s` bounds the random delay of each emulated copy.

    `late`: what computes is late too, as on a GPU; see `deferred`."""

    name: str
    device: str = "cpu"
    param: str = "host"
    optimizer: str = "host"
    deferred: bool = False
    delay_s: float = 0.0
    late: bool = False


HOST = Placement(name="host")
NVME = Placement(name="nvme", param="nvme", optimizer="nvme")
EMULATED = Placement(name="emulated", device="emulated", param="nvme", optimizer="nvme", deferred=True, delay_s=5e-4)
LATE = replace(EMULATED, name="late", late=True)
PROMPT = (HOST, NVME, EMULATED)  # what computes is not late
PLACEMENTS = (*PROMPT, LATE)


class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW with clipping by `clip_grad_norm_` and the skip of a non-finite step, as the reference."""

    def __init__(self, params: Iterable[Any], *, max_grad_norm: float | None = None, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.max_grad_norm = max_grad_norm
        self.grad_norm = 0.0
        self.skipped_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = float(torch.nn.utils.get_total_norm([p.grad for p in params]))
        if not math.isfinite(self.grad_norm):
            self.skipped_steps += 1
            return loss
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        super().step()
        return loss


@dataclass
class Session:
    """A model in training; `config` is None in plain torch."""

    case: Case
    model: nn.Module
    optimizer: Any
    config: Any

    def batch(self, seed: int) -> Batch:
        return self.case.make_batch(seed)

    def backward(self, seed: int, share: float = 1.0) -> float:
        """Forward and backward of batch number `seed`; returns the loss."""
        loss = self.model(*self.batch(seed))
        (loss * share).backward()
        return loss.item()

    def train(self, seed: int) -> tuple[float, float]:
        """One whole step on batch number `seed`; returns loss and gradient norm."""
        loss = self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, self.optimizer.grad_norm

    def train_on(self, seeds: range) -> list[tuple[float, float]]:
        return [self.train(seed) for seed in seeds]

    def weights(self) -> dict[str, Tensor]:
        return copied(self.model.state_dict())

    def moments(self) -> dict[int, dict[str, Tensor]]:
        return copied(self.optimizer.state_dict()["state"])


Scenario = Callable[[Session], Any]
Prepare = Callable[[nn.Module], Any]


def copied(value: Any) -> Any:
    """A deep copy of nested containers with tensors detached and cloned."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [copied(entry) for entry in value]
    return value


def parameters(model: nn.Module) -> Iterable[Any]:
    return model.parameters()


@functools.cache
def units(build: Callable[[], nn.Module]) -> tuple[int, ...]:
    """float32 bytes, in whole pages, of each part of a model that is gathered by itself, as near as a test can know.

    Those are the elements of lists and sequences of modules, and every other module that owns parameters.
    """
    model = build()
    stacks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]

    def unit(name: str) -> str:
        for stack in stacks:
            if name.startswith(f"{stack}."):
                return ".".join(name.split(".")[: stack.count(".") + 2])
        return name.rpartition(".")[0]

    elements: dict[str, int] = {}
    for name, p in model.named_parameters():
        elements[unit(name)] = elements.get(unit(name), 0) + p.numel()
    return tuple(-(-4 * count // PAGE) * PAGE for count in elements.values())


def budgets(build: Callable[[], nn.Module], place: Placement) -> tuple[int | None, int]:
    """(device budget, host budget) in bytes: what the placement keeps there, and room to move the largest units."""
    total, largest = sum(units(build)), max(units(build))
    keeps_host = ("host", "device") if place.device == "cpu" else ("host",)
    host = 24 * largest + 24 * PAGE + total * (place.param in keeps_host) + 3 * total * (place.optimizer in keeps_host)
    if place.device == "cpu":
        return None, host
    keeps = total * (place.param == "device") + 4 * total * (place.optimizer == "device")
    return 5 * largest + 8 * PAGE + keeps, host


def config_for(build: Callable[[], nn.Module], place: Placement, swap: Path, **settings: Any) -> Any:
    """The `tiered.Config` of a placement for one architecture."""
    device_budget, host_budget = budgets(build, place)
    if place.device == "emulated":
        settings["device_budget"] = device_budget
        settings["emulation"] = tiered.Emulation(max_delay_s=place.delay_s, seed=SEED, poison=True)
    return tiered.Config(
        **{"device": place.device, "host_budget": host_budget, "nvme": swap, **settings},
        param_tier=place.param,
        optimizer_tier=place.optimizer,
    )


@contextmanager
def plain_session(case: Case, *, prepare: Prepare | None = None, groups: Any = parameters, **settings: Any) -> Any:
    """A session in plain torch."""
    torch.manual_seed(SEED)
    model = case.build()
    if prepare is not None:
        prepare(model)
    yield Session(case, model, PlainAdamW(groups(model), **{**ADAM, **settings}), None)


@contextmanager
def tiered_session(
    case: Case,
    place: Placement,
    swap: Path,
    *,
    prepare: Prepare | None = None,
    groups: Any = parameters,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Session]:
    """A session in tiered; on a clean exit the module must be plain, hold its weights, and leave no swap file."""
    with contextlib.ExitStack() as stack:
        if place.late:
            stack.enter_context(deferred.compute(LATEST_S, SEED))
        yield stack.enter_context(_sharded(case, place, swap, prepare, groups, config or {}, settings))
    assert not list(swap.iterdir()), "close() left something in the swap directory"


@contextmanager
def _sharded(
    case: Case,
    place: Placement,
    swap: Path,
    prepare: Prepare | None,
    groups: Any,
    config: dict[str, Any],
    settings: dict[str, Any],
) -> Iterator[Session]:
    chosen = config_for(case.build, place, swap, **config)
    torch.manual_seed(SEED)
    if place.deferred:
        with tiered.deferred_init(chosen):
            model = case.build()
    else:
        model = case.build()
    if prepare is not None:
        prepare(model)
    tiered.shard(model, chosen)
    try:
        session = Session(case, model, tiered.AdamW(groups(model), **{**ADAM, **settings}), chosen)
        yield session
        trained = session.weights()
    finally:
        tiered.close(model)
    same(copied(model.state_dict()), trained, exact=True, where="weights after close")


def same(got: Any, want: Any, *, exact: bool, where: str = "result", rtol: float = RTOL, atol: float = ATOL) -> None:
    """Raises AssertionError naming the first place where two observations differ in structure, dtype or value."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{where}: got {got!r}, expected a tensor"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{where}: {got.shape} {got.dtype}"
        if exact or not want.is_floating_point():
            assert torch.equal(bits(got), bits(want)), f"{where}: {worst(got, want)}"
        else:
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: keys {list(got)} and {list(want)}"
        for key in want:
            same(got[key], want[key], exact=exact, where=f"{where}[{key!r}]", rtol=rtol, atol=atol)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{where}: {len(got)} entries, expected {len(want)}"
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, exact=exact, where=f"{where}[{index}]", rtol=rtol, atol=atol)
    elif isinstance(want, float) and not exact and math.isfinite(want):
        assert math.isclose(got, want, rel_tol=rtol, abs_tol=atol), f"{where}: got {got}, expected {want}"
    else:
        assert got == want or (got != got and want != want), f"{where}: got {got!r}, expected {want!r}"


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that equal means equal down to the sign of zero and the kind of NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def worst(got: Tensor, want: Tensor) -> str:
    difference = (got.double() - want.double()).abs()
    return f"{int((difference > 0).sum())} of {got.numel()} elements differ, by at most {difference.max():.3g}"


def agree(scenario: Scenario, case: Case, place: Placement, swap: Path, *, refusable: bool = False, **how: Any) -> None:
    """Runs the scenario on the host and compares with plain torch, or in another placement and compares with the host.

    The placements of one test together close the chain. `refusable`: a named error is as good as the right answer.
    """
    if place == HOST:
        with plain_session(case, **{key: value for key, value in how.items() if key != "config"}) as session:
            want = copied(scenario(session))
    else:
        want = observed(scenario, case, HOST, swap, refusable, how)
    got = observed(scenario, case, place, swap, refusable, how)
    if place == HOST and got is REFUSED:
        return
    assert (got is REFUSED) == (want is REFUSED), "refused in one placement only"
    if got is not REFUSED:
        same(got, want, exact=place != HOST, where=f"{place.name} against {'plain torch' if place == HOST else 'host'}")


REFUSED = object()


def observed(scenario: Scenario, case: Case, place: Placement, swap: Path, refusable: bool, how: dict[str, Any]) -> Any:
    """What the scenario saw in tiered, or `REFUSED` where a named error was allowed and came."""
    with tiered_session(case, place, swap, **how) as session:
        try:
            return copied(scenario(session))
        except TieredError as refusal:
            if not refusable:
                raise
            refused(refusal)
            return REFUSED


def refused(refusal: TieredError, *words: str) -> None:
    """The message of a refusal names what it must and is long enough to say what to do."""
    message = str(refusal)
    assert len(message) > 20, f"the refusal does not say what to do: {message!r}"
    assert all(word in message for word in words), f"the refusal does not name {words}: {message!r}"


def frozen(*names: str) -> Prepare:
    """A `prepare` that freezes every parameter whose name contains one of `names`."""

    def freeze(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if any(part in name for part in names):
                p.requires_grad_(False)

    return freeze


def variant(case: Case, name: str, build: Callable[[], nn.Module]) -> Case:
    """The same batches for another model."""
    return replace(case, name=name, build=build)

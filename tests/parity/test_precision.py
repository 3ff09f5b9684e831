"""16-bit computing with float32 masters, against loops written out by hand in plain torch.

The reference keeps a float32 master of every parameter, computes with a 16-bit copy, adds gradients up in the policy's
reduce dtype, and steps the masters with torch's AdamW. Everything but the last bit of an update is then the same
arithmetic, and with tiny models the runs must agree closely on every step. Also here: what dtypes the user sees, and
float16 with its dynamic loss scale.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CONV, MIXED, MOE, SIAMESE, Case, Gpt, class_batch, token_batch
from parity.harness import ADAM, EMULATED, HOST, NVME, SEED, Placement, Session, copied, refused, same, tiered_session
from torch import Tensor, nn

import tiered
from tiered.errors import TieredError

RTOL_LOW = 1e-3  # one flipped rounding of a 16-bit weight moves a loss by about 1e-5
LOW = [torch.bfloat16, torch.float16]
TINY = Case("tiny_gpt", partial(Gpt, 2), token_batch)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype is not None and isinstance(value, Tensor) and value.is_floating_point() else value


class Reference:
    """A hand-written mixed-precision loop: float32 masters beside a model that holds the compute copies."""

    def __init__(self, case: Case, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
        torch.manual_seed(SEED)
        self.case, self.dtype = case, param_dtype
        self.model = case.build()
        self.masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in self.model.named_parameters()}
        for p in self.model.parameters():
            p.data = cast(p.data, param_dtype)
        self.added: dict[str, Tensor] = {}
        self.reduce_dtype = reduce_dtype
        self.optimizer = torch.optim.AdamW(self.masters.values(), **ADAM)
        self.skipped_steps = 0

    def backward(self, batch: Any, scale: float = 1.0) -> float:
        loss = self.model(*(cast(value, self.dtype) for value in batch))
        (loss * scale).backward()
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                grad = p.grad.to(self.reduce_dtype or p.dtype)
                kept = self.added.get(name)
                self.added[name] = grad if kept is None else (kept.float() + grad.float()).to(grad.dtype)
                p.grad = None
        return loss.item()

    def step(self, scale: float = 1.0, limit: float | None = None) -> float:
        """Steps the masters and refreshes the copies; returns the norm of the unscaled gradient."""
        for name, master in self.masters.items():
            master.grad = self.added[name].float() / scale if name in self.added else None
        self.added = {}
        live = [master for master in self.masters.values() if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([master.grad for master in live]))
        if not math.isfinite(norm):
            self.skipped_steps += 1
            return norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(live, limit)
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])
        return norm

    def weights(self) -> dict[str, Tensor]:
        return copied(dict(self.masters))


@contextmanager
def mixed(case: Case, place: Placement, swap: Path, param: Any, reduce: Any = None, **how: Any) -> Iterator[Session]:
    config = {"precision": tiered.MixedPrecision(param_dtype=param, reduce_dtype=reduce)}
    with tiered_session(case, place, swap, config=config, **how) as session:
        yield session


def named(session: Session) -> dict[str, Tensor]:
    """The state dict's entries of the parameters, ties once."""
    weights = session.weights()
    return {name: weights[name] for name, _ in session.model.named_parameters()}


def close_updates(got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    """The whole updates agree to within 1 %: single elements whose gradient is rounding noise may not, in 16 bits."""
    assert list(got) == list(want)
    apart = math.sqrt(sum(float((got[name].double() - want[name].double()).pow(2).sum()) for name in want))
    moved = math.sqrt(sum(float((want[name].double() - start[name].double()).pow(2).sum()) for name in want))
    assert moved > 0
    assert apart < 0.01 * moved, f"weights are {apart / moved:.2%} of their update away from the hand-written loop's"


def start_of(case: Case) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return {name: copied(p) for name, p in case.build().named_parameters()}


def run_mixed(case: Case, place: Placement, swap: Path, param: Any, reduce: Any, counts: tuple[int, ...]) -> list[Any]:
    seen: list[Any] = []
    seed = 0
    with mixed(case, place, swap, param, reduce, max_grad_norm=0.5) as session:
        for count in counts:
            for _ in range(count):
                seen.append(session.backward(seed))
                seed += 1
            session.optimizer.step()
            session.optimizer.zero_grad()
            seen.append(session.optimizer.grad_norm)
        seen.append(named(session))
    return seen


def run_reference(case: Case, param: Any, reduce: Any, counts: tuple[int, ...]) -> list[Any]:
    reference, seed = Reference(case, param, reduce), 0
    seen: list[Any] = []
    for count in counts:
        for _ in range(count):
            seen.append(reference.backward(case.make_batch(seed)))
            seed += 1
        seen.append(reference.step(limit=0.5))
    return [*seen, reference.weights()]


@pytest.mark.parametrize("reduce", [None, torch.float32], ids=["reduce as computed", "reduce in float32"])
@pytest.mark.parametrize("case", [TINY, MOE, SIAMESE], ids=lambda case: case.name)
def test_bfloat16_computing_follows_the_hand_written_loop_and_its_place_changes_no_bit(
    case: Case, reduce: torch.dtype | None, swap: Path
) -> None:
    counts = (1, 3, 1)
    want = run_reference(case, torch.bfloat16, reduce, counts)
    host = run_mixed(case, HOST, swap, torch.bfloat16, reduce, counts)
    same(host[:-1], want[:-1], exact=False, rtol=RTOL_LOW, where="host run against the hand-written loop")
    close_updates(host[-1], want[-1], start_of(case))
    for place in (NVME, EMULATED):
        got = run_mixed(case, place, swap, torch.bfloat16, reduce, counts)
        same(got, host, exact=True, where=place.name)


def test_float32_reduction_keeps_what_bfloat16_would_lose(placement: Placement, swap: Path) -> None:
    """Sixteen small gradients after a large one: bfloat16 sums would not move, float32 sums must."""
    with mixed(TINY, placement, swap, torch.bfloat16, torch.float32) as session:
        loss = session.model(*session.batch(0))
        loss.backward(retain_graph=True)
        large = {name: copied(p.grad).double() for name, p in session.model.named_parameters()}
        for _ in range(16):
            (loss / 1024).backward(retain_graph=True)
        for name, p in session.model.named_parameters():
            growth = (copied(p.grad).double().norm() / large[name].norm()).item()
            assert growth == pytest.approx(1 + 16 / 1024, rel=2e-3), name


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_parameters_compute_in_16_bits_while_files_and_masters_stay_float32(
    dtype: torch.dtype, placement: Placement, swap: Path
) -> None:
    """The policy's dtype is the parameters', the user's is the file's: small updates show in the state dict."""
    with mixed(TINY, placement, swap, dtype, lr=1e-5) as session:
        seen: list[torch.dtype] = []
        hook = session.model.blocks[0].register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
        before = session.weights()
        settle(session)
        hook.remove()
        after = session.weights()
        assert set(seen) == {dtype}
        assert all(p.dtype == dtype for p in session.model.parameters())
        assert all(value.dtype == torch.float32 for value in after.values() if value.is_floating_point())
        changed = (after["blocks.0.up.weight"] - before["blocks.0.up.weight"]).abs()
        assert 1e-6 < float(changed.median()) < 1e-4
        moments = session.moments()
        assert all(state["exp_avg"].dtype == torch.float32 for state in moments.values())


def test_batch_norm_under_16_bit_computing_keeps_float32_buffers_or_is_refused_by_name(
    placement: Placement, swap: Path
) -> None:
    """torch's CPU BatchNorm takes 16-bit input with float32 weights and statistics, not with 16-bit weights."""
    try:
        with mixed(CONV, placement, swap, torch.bfloat16) as session:
            session.train(0)
            with torch.no_grad():
                session.model.eval()(*session.batch(1))
            buffers = dict(session.model.named_buffers())
            assert buffers["stem.1.running_mean"].dtype == torch.float32
            assert buffers["stem.1.num_batches_tracked"].dtype == torch.int64
            assert float(buffers["stem.1.running_var"].sub(1).abs().sum()) > 0
    except TieredError as refusal:
        refused(refusal, "stem.1")


def test_a_parameter_reads_as_its_float32_master_rounded_to_the_dtype_it_shows(
    placement: Placement, swap: Path
) -> None:
    with mixed(TINY, placement, swap, torch.bfloat16) as session:
        session.train(0)
        with torch.no_grad():
            session.model(*session.batch(1))
        want = {name: value.bfloat16() for name, value in named(session).items()}
        assert {p.dtype for p in session.model.parameters()} == {torch.bfloat16}
        same({name: copied(p) for name, p in session.model.named_parameters()}, want, exact=True)


def test_a_float32_checkpoint_loads_into_the_masters_unrounded_and_the_next_step_keeps_it(
    placement: Placement, swap: Path
) -> None:
    torch.manual_seed(99)
    checkpoint = copied(TINY.build().state_dict())
    with mixed(TINY, placement, swap, torch.bfloat16) as session:
        session.train(0)
        session.model.load_state_dict(checkpoint)
        same(session.weights(), checkpoint, exact=True)
        session.train(1)
        moved = [(session.weights()[name] - value).abs().max() for name, value in checkpoint.items()]
        assert 0 < float(max(moved)) < 3 * ADAM["lr"]


def test_an_edit_of_a_parameter_in_16_bits_reaches_its_master(placement: Placement, swap: Path) -> None:
    with mixed(TINY, placement, swap, torch.bfloat16) as session:
        session.train(0)
        before = named(session)
        with torch.no_grad():
            session.model.blocks[1].up.weight.mul_(0.5)
            session.model.position.fill_(0.25)
        after = named(session)
        same(after["blocks.1.up.weight"], before["blocks.1.up.weight"] / 2, exact=False, rtol=2**-8)
        assert bool((after["position"] == 0.25).all())
        untouched = [name for name in before if name not in ("blocks.1.up.weight", "position")]
        same([after[name] for name in untouched], [before[name] for name in untouched], exact=True)
        session.train(1)
        assert float((named(session)["position"] - 0.25).abs().max()) < 3 * ADAM["lr"]


class Buffered(nn.Module):
    """A buffer too fine for 16 bits, beside weights that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 4)
        self.register_buffer("fine", torch.full((4,), 1.0009765625))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x).float() * self.fine, y)


def test_buffers_are_not_cast_with_the_parameters(placement: Placement, swap: Path) -> None:
    with mixed(Case("buffered", Buffered, class_batch), placement, swap, torch.bfloat16) as session:
        seen: list[Tensor] = []
        hook = session.model.linear.register_forward_hook(lambda *_: seen.append(session.model.fine.clone()))
        session.train(0)
        hook.remove()
        same(seen, [torch.full((4,), 1.0009765625)], exact=True)
        assert session.weights()["fine"].dtype == torch.float32


def low_gpt(dtype: torch.dtype) -> nn.Module:
    return Gpt(2).to(dtype)


def test_a_bfloat16_model_trains_through_float32_masters(placement: Placement, swap: Path) -> None:
    """Updates far below bfloat16's resolution add up in the master; pure bfloat16 training would stand still."""
    case = Case("bf16_gpt", partial(low_gpt, torch.bfloat16), token_batch)
    reference = Reference(case, None, None)
    with tiered_session(case, placement, swap, max_grad_norm=0.5) as session:
        for step in range(4):
            want = [reference.backward(session.batch(step)), reference.step(limit=0.5)]
            same(list(session.train(step)), want, exact=False, rtol=RTOL_LOW, where=f"step {step}")
        weights = session.weights()
        assert all(value.dtype == torch.bfloat16 for value in weights.values())
        want_weights = {name: copied(p) for name, p in reference.model.named_parameters()}
        close_updates(named(session), want_weights, start_of(case))


def test_tiny_updates_of_a_bfloat16_model_add_up(placement: Placement, swap: Path) -> None:
    case = Case("bf16_gpt", partial(low_gpt, torch.bfloat16), token_batch)
    with tiered_session(case, placement, swap, lr=2e-4, weight_decay=0.0) as session:
        before = session.weights()["norm.weight"].float()
        for _ in range(12):
            session.train(0)
        moved = (session.weights()["norm.weight"].float() - before).abs()
    assert float(moved.max()) > 0, "each update alone is lost in bfloat16 at 1.0; twelve together are not"


def test_mixed_dtypes_keep_each_parameters_own(placement: Placement, swap: Path) -> None:
    reference = Reference(MIXED, None, None)
    with tiered_session(MIXED, placement, swap, max_grad_norm=0.5) as session:
        kinds = {name: p.dtype for name, p in session.model.named_parameters()}
        assert set(kinds.values()) == {torch.float32, torch.bfloat16}
        for step in range(4):
            want = [reference.backward(session.batch(step)), reference.step(limit=0.5)]
            same(list(session.train(step)), want, exact=False, rtol=RTOL_LOW, where=f"step {step}")
            assert {name: p.dtype for name, p in session.model.named_parameters()} == kinds
        want_weights = {name: copied(p) for name, p in reference.model.named_parameters()}
        close_updates(named(session), want_weights, start_of(MIXED))
        assert {name: value.dtype for name, value in session.weights().items()} == kinds


def test_mixed_dtypes_are_bit_equal_wherever_they_live(swap: Path) -> None:
    results = []
    for place in (HOST, NVME, EMULATED):
        with tiered_session(MIXED, place, swap, max_grad_norm=0.5) as session:
            losses = [session.train(step) for step in range(4)]
            results.append([losses, session.weights(), session.moments()])
    same(results[1], results[0], exact=True, where="nvme")
    same(results[2], results[0], exact=True, where="emulated")


def test_float16_computing_scales_the_loss_and_follows_the_hand_written_loop(placement: Placement, swap: Path) -> None:
    reference = Reference(TINY, torch.float16, torch.float32)
    with mixed(TINY, placement, swap, torch.float16, torch.float32, max_grad_norm=0.5) as session:
        assert session.optimizer.loss_scale > 1
        for step in range(6):
            scale = session.optimizer.loss_scale
            want = [reference.backward(session.batch(step), scale), reference.step(scale, 0.5)]
            loss = session.model(*session.batch(step))
            session.optimizer.scale_loss(loss).backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
            got = [loss.item(), session.optimizer.grad_norm]
            same(got, want, exact=False, rtol=RTOL_LOW, where=f"step {step}")
            assert session.optimizer.skipped_steps == reference.skipped_steps
        close_updates(named(session), reference.weights(), start_of(TINY))
        assert reference.skipped_steps < 4, "too few steps were taken to show anything"


def scaled_step(session: Session, factor: float = 1.0) -> None:
    loss = session.model(*session.batch(1)) * factor
    session.optimizer.scale_loss(loss).backward()
    session.optimizer.step()
    session.optimizer.zero_grad()


def settle(session: Session) -> int:
    """Steps until one is not skipped, as the first scales may be too large; returns how many were skipped by then."""
    for _ in range(20):
        skipped = session.optimizer.skipped_steps
        scaled_step(session)
        if session.optimizer.skipped_steps == skipped:
            return skipped
    raise AssertionError("twenty halvings of the loss scale did not make a gradient finite")


def test_an_overflow_skips_the_step_and_halves_the_loss_scale(placement: Placement, swap: Path) -> None:
    with mixed(TINY, placement, swap, torch.float16, max_grad_norm=0.5) as session:
        skipped = settle(session)
        scale = session.optimizer.loss_scale
        before = [session.weights(), session.moments()]
        scaled_step(session, 1e6)
        assert session.optimizer.loss_scale == scale / 2
        scaled_step(session, 1e6)
        assert session.optimizer.loss_scale == scale / 4
        assert session.optimizer.skipped_steps == skipped + 2
        same([session.weights(), session.moments()], before, exact=True, where="state over skipped steps")
        scaled_step(session)
        assert session.optimizer.skipped_steps == skipped + 2
        assert not torch.equal(session.weights()["norm.weight"], before[0]["norm.weight"])


def test_the_reported_norm_is_that_of_the_unscaled_loss(swap: Path) -> None:
    """The scale of the loss is an inner matter: norms compare with those of a float32 run."""
    norms = []
    for dtype in (None, torch.float16):
        with mixed(TINY, HOST, swap, dtype, lr=0.0) as session:
            settle(session)
            norms.append(session.optimizer.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_float16_and_bfloat16_runs_are_bit_equal_wherever_they_live(dtype: torch.dtype, swap: Path) -> None:
    results = []
    for place in (HOST, NVME, EMULATED):
        with mixed(TINY, place, swap, dtype, max_grad_norm=0.5) as session:
            losses = []
            for step in range(3):
                for part in range(2):
                    loss = session.model(*session.batch(2 * step + part))
                    session.optimizer.scale_loss(loss / 2).backward()
                    losses.append(loss.item())
                session.optimizer.step()
                session.optimizer.zero_grad()
                losses.append(session.optimizer.grad_norm)
            results.append([losses, session.weights(), session.moments()])
    same(results[1], results[0], exact=True, where="nvme")
    same(results[2], results[0], exact=True, where="emulated")


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_scaling_a_loss_without_float16_changes_nothing(scale: float, placement: Placement, swap: Path) -> None:
    with tiered_session(TINY, placement, swap) as session:
        loss = session.model(*session.batch(0)) * scale
        assert session.optimizer.scale_loss(loss).item() == loss.item()
        assert session.optimizer.loss_scale == 1.0
        session.optimizer.scale_loss(loss).backward()
        session.optimizer.step()

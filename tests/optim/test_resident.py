"""State that lives on the device, tensors alone: the norm, the decision, the update, and the outcome's way to the host.

torch's fused kernel runs on the CPU too, so what is computed is checked here on any machine. That nothing waits for the
device is checked on meta tensors, which have no values to read, and on an emulated device that comes late. Leaves whole
steps of a model to tests/parity/test_resident.py.
"""

import gc
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from deferred import Unreached
from torch import Tensor

from tiered.config import Emulation
from tiered.device.emulated import EmulatedDevice, computing_on
from tiered.device.memory import Memory
from tiered.optim import kernels, resident
from tiered.optim.kernels import Segment
from tiered.optim.outcome import Outcome
from tiered.optim.resident import State, Verdict

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
SIZES = (1, 33, 64, 7, 500)  # of parameters, each at a multiple of 32 elements, so with gaps between them
STARTS = (0, 32, 96, 160, 192)
NUMEL = 704
TAKEN = Verdict(None, None)


def segments(step: int = 1, **changes: Any) -> list[Segment]:
    base = Segment(start=0, stop=0, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, step=step)
    return [replace(base, start=start, stop=start + size, **changes) for start, size in zip(STARTS, SIZES, strict=True)]


def make_state(grad_dtype: torch.dtype = torch.float32, param_dtype: torch.dtype = torch.float32) -> State:
    g = torch.Generator().manual_seed(1)
    master = torch.randn(NUMEL, generator=g)
    moments = torch.randn(NUMEL, generator=g) * 0.1, torch.rand(NUMEL, generator=g) * 0.01
    out = None if param_dtype is torch.float32 else master.to(param_dtype)
    return State(master, *moments, torch.randn(NUMEL, generator=g).to(grad_dtype), out)


def copied(state: State) -> dict[str, Tensor]:
    names = ("master", "exp_avg", "exp_avg_sq", "grad", "param_out")
    return {name: t.clone() for name in names if (t := getattr(state, name)) is not None}


def assert_bits(state: State, before: dict[str, Tensor], names: Sequence[str]) -> None:
    for name in names:
        assert torch.equal(getattr(state, name).view(torch.uint8), before[name].view(torch.uint8)), name


def views(flat: Tensor, cuts: Sequence[Segment]) -> list[Tensor]:
    return [flat[s.start : s.stop] for s in cuts]


def update(cuts: Sequence[Segment], state: State, verdict: Verdict = TAKEN) -> None:
    resident.update(cuts, state, verdict, resident.scratch_for([state], verdict))


# --- the norm ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_the_largest_finite_gradients_is_finite_and_exact(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    flats = [torch.full((300,), largest, dtype=dtype), torch.full((5,), -largest, dtype=dtype)]
    assert resident.norm_partials(flats).item() == pytest.approx(305 * largest**2, rel=1e-14)


def test_gradients_of_several_dtypes_and_empty_ones_add_up() -> None:
    flats = [torch.full((4,), 0.5, dtype=dtype) for dtype in (*DTYPES, torch.float32)]
    found = resident.norm_partials([flats[0], torch.empty(0), *flats[1:], torch.empty(0, dtype=torch.bfloat16)])
    assert (found.shape, found.dtype, found.item()) == ((), torch.float64, 4.0)
    assert resident.norm_partials([torch.empty(0)]).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_stops_the_step(dtype: torch.dtype, bad: float) -> None:
    flats = [torch.ones(100, dtype=dtype), torch.ones(100, dtype=dtype)]
    assert resident.judge(resident.norm_partials(flats), max_norm=None, scale=1.0).found_inf == 0.0
    flats[1][63] = bad
    assert resident.judge(resident.norm_partials(flats).sqrt(), max_norm=1.0, scale=1.0).found_inf == 1.0


def test_the_clip_factor_is_that_of_clip_grad_norm_and_divides_by_the_loss_scale() -> None:
    grad = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for max_norm, scale in itertools.product((0.1, 1e6), (1.0, 1024.0)):
        param = torch.nn.Parameter(torch.zeros(50))
        param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([param], max_norm)
        norm = resident.norm_partials([grad * scale]).sqrt() / scale
        verdict = resident.judge(norm, max_norm=max_norm, scale=scale)
        assert verdict.factor is not None
        torch.testing.assert_close(grad * scale * verdict.factor, param.grad, rtol=1e-6, atol=0)


# --- the update ---


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_steps_equal_those_of_torchs_fused_adamw_with_its_clipping(
    grad_dtype: torch.dtype, max_norm: float | None
) -> None:
    state, cuts = make_state(grad_dtype), segments()
    params = [torch.nn.Parameter(p.clone()) for p in views(state.master, cuts)]
    options = [
        {"lr": 1e-2, "weight_decay": 0.1},
        {"lr": 3e-2, "weight_decay": 0.0, "maximize": True},
        {"lr": 1e-3, "betas": (0.5, 0.8), "eps": 1e-3},
    ]
    owner = (0, 1, 0, 2, 1)  # of each parameter: its options
    common = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    groups = [{"params": [p for p, i in zip(params, owner, strict=True) if i == k], **options[k]} for k in range(3)]
    reference = torch.optim.AdamW(groups, **common, fused=True)
    rtol = 1e-6 if max_norm is None else 1e-5  # torch sums the squares for its norm in fp32
    for step in range(1, 5):
        state.grad.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)))
        kept = copied(state)
        for param, grad in zip(params, views(state.grad, cuts), strict=True):
            param.grad = grad.clone().float()  # clipped in place
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        reference.step()

        norm = resident.norm_partials(views(state.grad, cuts)).sqrt()
        mine = []
        for cut, index in zip(cuts, owner, strict=True):
            chosen = {**common, **options[index]}
            (beta1, beta2), maximize = chosen.pop("betas"), bool(chosen.pop("maximize", False))
            mine.append(replace(cut, beta1=beta1, beta2=beta2, maximize=maximize, step=step, **chosen))
        update(mine, state, resident.judge(norm, max_norm=max_norm, scale=1.0))
        for k, param in enumerate(params):
            s, theirs = cuts[k], reference.state[param]
            for name, want in (("master", param.detach()), ("exp_avg", theirs["exp_avg"])):
                torch.testing.assert_close(getattr(state, name)[s.start : s.stop], want, rtol=rtol, atol=1e-6)
            torch.testing.assert_close(state.exp_avg_sq[s.start : s.stop], theirs["exp_avg_sq"], rtol=rtol, atol=1e-12)
        assert_bits(state, kept, ["grad"])


@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_an_update_is_that_of_the_host_within_rounding(grad_dtype: torch.dtype) -> None:
    state, factor = make_state(grad_dtype, torch.bfloat16), torch.tensor([0.37])
    host = copied(state)
    kernels.adamw(segments(3), **host, grad_scale=0.37)
    update(segments(3), state, Verdict(factor, torch.zeros(())))
    for cut in segments():
        for name in ("master", "exp_avg", "exp_avg_sq"):
            found, want = (t[cut.start : cut.stop] for t in (getattr(state, name), host[name]))
            torch.testing.assert_close(found, want, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_parameter_is_the_new_master_rounded(dtype: torch.dtype) -> None:
    state = make_state(dtype, dtype)
    assert state.param_out is not None
    update(segments(2), state)
    for cut in segments():
        assert torch.equal(state.param_out[cut.start : cut.stop], state.master[cut.start : cut.stop].to(dtype))


@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_a_step_that_found_inf_changes_no_bit(grad_dtype: torch.dtype) -> None:
    state = make_state(grad_dtype, torch.bfloat16)
    state.grad[40] = math.inf
    before = copied(state)
    verdict = resident.judge(resident.norm_partials([state.grad]).sqrt(), max_norm=1.0, scale=2.0)
    update(segments(2), state, verdict)
    assert_bits(state, before, list(before))
    update(segments(2), state, replace(verdict, found_inf=torch.zeros(())))
    assert not torch.equal(state.master, before["master"])


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_elements_outside_the_segments_and_gradients_keep_their_bits(
    grad_dtype: torch.dtype, factor: float | None
) -> None:
    state = make_state(grad_dtype, torch.float16)
    outside = torch.ones(NUMEL, dtype=torch.bool)
    for cut in segments()[1::2]:
        outside[cut.start : cut.stop] = False
    state.grad[outside] = math.nan  # of a parameter without a gradient: left over, or never written
    before = copied(state)
    update(segments(2)[1::2], state, Verdict(None if factor is None else torch.tensor([factor]), torch.zeros(())))
    assert_bits(state, before, ["grad"])
    for name in ("master", "exp_avg", "exp_avg_sq", "param_out"):
        found = getattr(state, name)
        assert torch.equal(found[outside], before[name][outside]), name
        assert found[~outside].isfinite().all(), name
        assert not torch.equal(found, before[name]), name


def test_at_step_one_moments_start_from_zero_whatever_they_held() -> None:
    state, clean = make_state(), make_state()
    state.exp_avg.fill_(math.nan)
    state.exp_avg_sq.fill_(math.nan)
    clean.exp_avg.zero_()
    clean.exp_avg_sq.zero_()
    update(segments(1), state)
    update(segments(1), clean)
    for cut in segments():
        assert torch.equal(state.master[cut.start : cut.stop], clean.master[cut.start : cut.stop])


def test_parameters_of_different_step_counts_are_corrected_each_by_its_own() -> None:
    mixed, cuts = make_state(), [replace(s, step=step) for s, step in zip(segments(), (2, 9, 2, 400, 3), strict=True)]
    update(cuts, mixed)
    for cut in cuts:
        alone = make_state()
        update([cut], alone)
        assert torch.equal(mixed.master[cut.start : cut.stop], alone.master[cut.start : cut.stop])


@pytest.mark.parametrize("most", [32, 64, 96, 4096])
def test_the_scratch_bounds_what_is_taken_at_once_and_not_the_result(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = make_state(torch.bfloat16), make_state(torch.bfloat16)
    verdict = Verdict(torch.tensor([0.25]), torch.zeros(()))
    update(segments(2), whole, verdict)
    monkeypatch.setattr(resident, "_MOST_AT_ONCE", most)
    scratch = resident.scratch_for([pieces], verdict)
    assert scratch is not None
    assert scratch.numel() <= most
    resident.update(segments(2), pieces, verdict, scratch)
    for cut in segments():
        torch.testing.assert_close(
            pieces.master[cut.start : cut.stop], whole.master[cut.start : cut.stop], rtol=1e-6, atol=1e-7
        )


def meta_state(numel: int, grad_dtype: torch.dtype) -> State:
    state = (torch.empty(numel, device="meta") for _ in range(3))
    return State(*state, torch.empty(numel, device="meta", dtype=grad_dtype), torch.empty(numel, device="meta"))


def test_a_scratch_is_taken_only_where_gradients_are_cast_or_scaled_and_never_beyond_its_bound() -> None:
    huge, factor = 10**10, torch.ones(1, device="meta")
    for grad_dtype, given, wanted in (
        (torch.float32, None, False),
        (torch.float32, factor, True),
        (torch.bfloat16, None, True),
    ):
        scratch = resident.scratch_for([meta_state(huge, grad_dtype)], Verdict(given, None))
        assert (scratch is not None) == wanted
        assert scratch is None or scratch.nbytes == resident.SCRATCH_BYTES


def test_a_step_needs_no_value_on_the_host() -> None:
    state = meta_state(NUMEL, torch.bfloat16)
    norm = resident.norm_partials(views(state.grad, segments())).sqrt()
    with pytest.raises(RuntimeError, match="meta"):
        norm.item()  # what any read would do
    update(segments(1), state, resident.judge(norm, max_norm=1.0, scale=65536.0))


# --- the outcome's way to the host ---


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_sending_an_outcome_does_not_wait_and_receiving_it_does() -> None:
    device, stream = EmulatedDevice(Emulation(max_delay_s=1e-3)), Unreached()
    try:
        outcome = Outcome(device)
        value = number(math.nan)
        with computing_on(stream):
            outcome.send(value)
        value.fill_(2.5)  # what work given before makes of it
        stream.reached.finish()
        assert outcome.receive() == 2.5
        with pytest.raises(RuntimeError, match="no number"):
            outcome.receive()
        outcome.send(number(1.0))
        outcome.send(number(math.inf))  # nobody wanted the first
        assert outcome.receive() == math.inf
    finally:
        device.close()


def test_the_outcomes_memory_is_page_locked_until_its_last_copy_is_over() -> None:
    stream, pinned = Unreached(), list[Memory]()

    class Pinning(EmulatedDevice):
        def pin(self, memory: Memory) -> None:
            pinned.append(memory)

        def unpin(self, memory: Memory) -> None:
            assert stream.reached.done(), "unpinned under a copy"
            pinned.remove(memory)

    device = Pinning(Emulation())
    timer = threading.Timer(0.05, stream.reached.finish)
    try:
        outcome = Outcome(device)
        with computing_on(stream):
            outcome.send(number(1.0))
        assert len(pinned) == 1
        del outcome
        gc.collect()
        assert len(pinned) == 1, "a collection may not wait"
        timer.start()
        other = Outcome(device)
        assert len(pinned) == 1, "the first one's went, the other's came"
        del other
    finally:
        timer.join()
        device.close()

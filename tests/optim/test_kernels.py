"""The CPU kernels, native and portable: exact against a numpy model, close to torch, independent of how they are run.

The numpy model rounds every operation to fp32 by itself, which is what invariant 1 of tiered/optim/kernels.py says, so
both backends must equal it bit for bit. What torch computes is compared within the tolerance the docstring states.
"""

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiered.optim import kernels
from tiered.optim.kernels import Segment
from tiered.optim.portable import PortableKernels

needs_native = pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
NATIVE = pytest.param("native", marks=(needs_native, pytest.mark.native))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 1000, 16383, 16385, 65535, 65537, 131077)


@pytest.fixture(params=[NATIVE, "portable"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "portable":
        monkeypatch.setattr(kernels, "_backend", PortableKernels())
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    kernels.set_threads(None)


def segment(start: int, stop: int, **changes: Any) -> Segment:
    base = Segment(start=start, stop=stop, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
    return replace(base, **changes)


def make_state(n: int, grad_dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "master": torch.randn(n, generator=g),
        "exp_avg": torch.randn(n, generator=g) * 0.1,
        "exp_avg_sq": torch.rand(n, generator=g) * 0.01,
        "grad": torch.randn(n, generator=g).to(grad_dtype),
    }


def cloned(state: dict[str, Tensor], piece: slice = slice(None)) -> dict[str, Tensor]:
    return {name: t[piece].clone() for name, t in state.items()}


def bits(t: Tensor) -> Tensor:
    """t as integers, every NaN made the same one: equality of these is equality of values, signed zeros included."""
    return t.masked_fill(t.isnan(), math.nan).view(torch.int32 if t.element_size() == 4 else torch.int16)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, t in expected.items():
        assert torch.equal(bits(actual[name]), bits(t)), name


def numpy_adamw(s: Segment, state: dict[str, Tensor], grad_scale: float) -> dict[str, Tensor]:
    f = np.float32
    p, m, v, g = (state[k].float().numpy()[s.start : s.stop] for k in ("master", "exp_avg", "exp_avg_sq", "grad"))
    with np.errstate(all="ignore"):
        g = g * f(grad_scale) * f(-1 if s.maximize else 1)
        weight = f(1 - s.beta1)
        m = m + weight * (g - m) if weight < 0.5 else g - (f(1) - weight) * (g - m)
        v = v * f(s.beta2) + f(1 - s.beta2) * g * g
        denominator = np.sqrt(v) / f(math.sqrt(1 - s.beta2**s.step)) + f(s.eps)
        p = p * f(1 - s.lr * s.weight_decay) - f(s.lr / (1 - s.beta1**s.step)) * m / denominator
    result = cloned(state)
    for name, values in (("master", p), ("exp_avg", m), ("exp_avg_sq", v)):
        result[name][s.start : s.stop] = torch.from_numpy(values)
    return result


# --- AdamW ---


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_adamw_equals_the_numpy_model_bit_for_bit(n: int, grad_dtype: torch.dtype) -> None:
    state = make_state(n, grad_dtype)
    expected = numpy_adamw(segment(0, n), state, 0.3)
    kernels.adamw([segment(0, n)], **state, grad_scale=0.3)
    assert_same(state, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"maximize": True},
        {"weight_decay": 0.0},
        {"beta1": 0.5},
        {"beta1": 0.2, "beta2": 0.0},
        {"beta1": 0.0},
        {"step": 1},
        {"step": 100_000},
        {"eps": 0.0},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_each_hyperparameter_means_what_the_numpy_model_says(changes: dict[str, Any]) -> None:
    state = make_state(1001)
    s = segment(0, 1001, **changes)
    expected = numpy_adamw(s, state, 1.0)
    kernels.adamw([s], **state)
    assert_same(state, expected)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("maximize", [False, True])
def test_each_step_stays_within_rounding_of_torch(kind: str, grad_dtype: torch.dtype, maximize: bool) -> None:
    n, steps, ulp = 515, 30, 2.0**-23
    start = make_state(n)
    parameter = torch.nn.Parameter(start["master"].clone())
    s = segment(0, n, maximize=maximize)
    hyper: dict[str, Any] = {"lr": s.lr, "weight_decay": s.weight_decay, "maximize": maximize, kind: True}
    optimizer = torch.optim.AdamW([parameter], **hyper)
    before = {"master": parameter.detach().clone(), "exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}
    for step in range(1, steps + 1):
        grad = make_state(n, grad_dtype, seed=step)["grad"]
        parameter.grad = grad.float()
        optimizer.step()
        theirs = {k: optimizer.state[parameter][k] for k in ("exp_avg", "exp_avg_sq")}
        ours = cloned(before)
        kernels.adamw([replace(s, step=step)], grad=grad, **ours)
        m_room = 2 * ulp * torch.maximum(grad.float().abs(), before["exp_avg"].abs())
        denominator = (theirs["exp_avg_sq"] / (1 - s.beta2**step)).sqrt() + s.eps
        change = s.lr / (1 - s.beta1**step) * theirs["exp_avg"].abs() / denominator
        p_room = 2 * ulp * before["master"].abs() + 8 * ulp * change
        p_room += s.lr / (1 - s.beta1**step) * m_room / denominator
        assert ((ours["exp_avg_sq"] - theirs["exp_avg_sq"]).abs() <= 2 * ulp * theirs["exp_avg_sq"]).all()
        assert ((ours["exp_avg"] - theirs["exp_avg"]).abs() <= m_room).all()
        assert ((ours["master"] - parameter.detach()).abs() <= p_room).all()
        before = {"master": parameter.detach().clone()} | {k: t.clone() for k, t in theirs.items()}


@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_a_long_run_follows_torch(grad_dtype: torch.dtype) -> None:
    state = make_state(300)
    parameter = torch.nn.Parameter(state["master"].clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, fused=True)
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()
    for step in range(1, 201):
        state["grad"] = make_state(300, grad_dtype, seed=step)["grad"]
        parameter.grad = state["grad"].float()
        optimizer.step()
        kernels.adamw([segment(0, 300, step=step)], **state)
    torch.testing.assert_close(state["master"], parameter.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_param_out_is_the_rounded_new_master(grad_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    state = make_state(4099, grad_dtype)
    out = torch.zeros(4099, dtype=out_dtype)
    kernels.adamw([segment(0, 4099)], **state, param_out=out)
    assert torch.equal(out, state["master"].to(out_dtype))


def test_results_do_not_depend_on_chunking_or_alignment() -> None:
    n = 40_003
    state = make_state(n, torch.bfloat16)
    whole, whole_out = cloned(state), torch.zeros(n, dtype=torch.bfloat16)
    kernels.adamw([segment(0, n)], **whole, param_out=whole_out)
    cuts = (0, 1, 8, 25, 16_411, 16_427, 39_990, n)
    pieces = list(itertools.pairwise(cuts))
    together, out = cloned(state), torch.zeros(n, dtype=torch.bfloat16)
    kernels.adamw([segment(a, b) for a, b in pieces], **together, param_out=out)
    assert_same(together | {"out": out}, whole | {"out": whole_out})
    for start, stop in pieces:  # in a tensor of its own, so at every place within a vector
        alone = cloned(state, slice(start, stop))
        kernels.adamw([segment(0, stop - start)], **alone)
        assert_same(alone, cloned(whole, slice(start, stop)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [2, 3, 7])
def test_results_do_not_depend_on_the_number_of_threads(count: int) -> None:
    n = 200_003
    one, many = make_state(n), make_state(n)
    segments = [segment(a, b) for a, b in itertools.pairwise((0, 5, 100_000, 100_001, n))]
    torch_threads = torch.get_num_threads()
    kernels.set_threads(1)
    kernels.adamw(segments, **one)
    norm = kernels.accumulate(one["master"], one["grad"], add=True)
    kernels.set_threads(count)
    kernels.adamw(segments, **many)
    assert kernels.accumulate(many["master"], many["grad"], add=True) == norm
    assert kernels.sum_of_squares(many["master"]) == norm
    assert_same(many, one)
    assert torch.get_num_threads() == torch_threads


@pytest.mark.usefixtures("threads")
def test_calls_from_several_python_threads_do_not_disturb_each_other() -> None:
    kernels.set_threads(3)
    expected = make_state(70_001)
    kernels.adamw([segment(0, 70_001)], **expected)

    def one_call(_: int) -> dict[str, Tensor]:
        state = make_state(70_001)
        kernels.adamw([segment(0, 70_001)], **state)
        return state

    with ThreadPoolExecutor(4) as pool:
        for state in pool.map(one_call, range(12)):
            assert_same(state, expected)


def test_elements_outside_the_segments_are_untouched() -> None:
    n, inside = 300, [(3, 20), (20, 21), (50, 50), (64, 290)]
    state = make_state(n) | {"param_out": torch.full((n,), 7.0, dtype=torch.float16)}
    before = cloned(state)
    kernels.adamw([segment(a, b) for a, b in inside], **state)
    outside = torch.ones(n, dtype=torch.bool)
    for a, b in inside:
        outside[a:b] = False
    for name, t in state.items():
        assert torch.equal(t[outside], before[name][outside]), name
        assert name == "grad" or not torch.eq(t, before[name])[~outside].any(), name


def test_non_finite_gradients_stay_in_their_element_and_are_not_hidden() -> None:
    state = make_state(100)
    clean = numpy_adamw(segment(0, 100), state, 1.0)
    state["grad"][[5, 40, 99]] = torch.tensor([math.nan, math.inf, -math.inf])
    expected = numpy_adamw(segment(0, 100), state, 1.0)
    kernels.adamw([segment(0, 100)], **state)
    assert_same(state, expected)
    assert state["master"].isnan().nonzero().view(-1).tolist() == [5, 40, 99]
    finite = ~state["master"].isnan()
    assert torch.equal(state["master"][finite], clean["master"][finite])


def test_denormals_and_an_overflowing_second_moment_are_exact() -> None:
    state = make_state(64)
    state["grad"][:32] = torch.logspace(-45, 38, 32)
    state["exp_avg"][:16] = 1e-44
    state["exp_avg_sq"][:20] = 1e-45
    state["master"][10:30] = 1e-42
    expected = numpy_adamw(segment(0, 64), state, 1.0)
    assert expected["exp_avg_sq"].isinf().any()
    assert expected["master"].isfinite().all()
    kernels.adamw([segment(0, 64)], **state)
    assert_same(state, expected)


# --- rounding, accumulation, sums ---


def all_16_bit(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def fp32_of_every_rounding_class() -> Tensor:
    """Each 16-bit value, its neighbours, the midpoints between them and theirs: fp32, finite and not."""
    exact = torch.cat([all_16_bit(dtype).float() for dtype in HALVES]).view(torch.int32)
    offsets = [0, 1, -1, 0x8000, 0x7FFF, 0x8001, 0x1000, 0x0FFF, 0x1001]
    patterns = torch.cat([exact + offset for offset in offsets])
    values = torch.arange(-64, 65).float()
    halfway = torch.cat([values * 2.0**-25, values * 2.0**-26, torch.tensor([65519.996, 65520.0, -65520.0])])
    return torch.cat([patterns.view(torch.float32), halfway])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value_widens_exactly(dtype: torch.dtype) -> None:
    source = all_16_bit(dtype)
    wide = torch.zeros(source.numel())
    kernels.accumulate(wide, source, add=False)
    assert torch.equal(bits(wide), bits(source.float()))


@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_rounds_every_class_to_nearest_even(dtype: torch.dtype) -> None:
    source = fp32_of_every_rounding_class()
    for shift in (0, 1):  # each value once in a vector's lanes and once elsewhere
        stored = torch.zeros(source.numel() - shift, dtype=dtype)
        kernels.accumulate(stored, source[shift:].clone(), add=False)
        assert torch.equal(bits(stored), bits(source[shift:].to(dtype)))
    one_by_one = torch.zeros(300, dtype=dtype)
    picks = torch.linspace(0, source.numel() - 1, 300).long()
    for i, pick in enumerate(picks.tolist()):  # single elements: the tail's conversion
        kernels.accumulate(one_by_one[i : i + 1], source[pick : pick + 1], add=False)
    assert torch.equal(bits(one_by_one), bits(source[picks].to(dtype)))


@pytest.mark.parametrize("dtype", HALVES)
def test_param_out_rounds_every_class_to_nearest_even(dtype: torch.dtype) -> None:
    source = fp32_of_every_rounding_class()
    state = make_state(source.numel()) | {"master": source.clone()}
    for name in ("exp_avg", "grad"):  # a change of exactly +0 also keeps the sign of zero
        state[name].zero_()
    out = torch.zeros(source.numel(), dtype=dtype)
    kernels.adamw([segment(0, source.numel(), lr=0.0)], **state, param_out=out)
    assert torch.equal(bits(out), bits(source.to(dtype)))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("src_dtype", DTYPES)
@pytest.mark.parametrize("dst_dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 17, 65537])
def test_accumulate_matches_torch_and_returns_the_square_sum_of_what_it_stored(
    n: int, dst_dtype: torch.dtype, src_dtype: torch.dtype, add: bool
) -> None:
    state = make_state(n)
    dst, src = state["master"].to(dst_dtype), state["grad"].to(src_dtype)
    expected = (dst.float() + src.float() if add else src.float()).to(dst_dtype)
    total = kernels.accumulate(dst, src, add=add)
    assert torch.equal(dst, expected)
    assert total == kernels.sum_of_squares(dst)
    assert total == pytest.approx(expected.double().square().sum().item(), rel=1e-14)


def test_accumulating_a_tensor_onto_itself_doubles_it() -> None:
    t = torch.arange(100.0)
    kernels.accumulate(t, t, add=True)
    assert torch.equal(t, torch.arange(100.0) * 2)


@pytest.mark.parametrize("n", [0, 1, 16, 37, 65536, 131_100])
def test_sum_of_squares_adds_in_the_documented_order(n: int) -> None:
    values = (make_state(n)["grad"] * torch.logspace(-8, 8, n)).tolist()
    expected = 0.0
    for first in range(0, n, 65536):
        lanes = [0.0] * 16
        for i, x in enumerate(values[first : first + 65536]):
            lanes[i % 16] += x * x
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        expected += lanes[0]
    assert kernels.sum_of_squares(torch.tensor(values)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 16, 20])
def test_sums_of_squares_propagate_infinity_and_nan(dtype: torch.dtype, position: int) -> None:
    t = torch.ones(21, dtype=dtype)
    t[position] = -math.inf
    assert kernels.sum_of_squares(t) == math.inf
    t[position] = math.nan
    assert math.isnan(kernels.sum_of_squares(t))
    assert math.isnan(kernels.accumulate(torch.zeros(21, dtype=dtype), t, add=True))


def test_sum_of_squares_does_not_overflow_where_fp32_would() -> None:
    assert kernels.sum_of_squares(torch.full((4,), 3e38)) == pytest.approx(4 * 9e76, rel=1e-6)

"""The mean of several ranks' gradients in one pass, native and portable: exact, in order, the same however it is run.

The numpy model rounds every operation to fp32 by itself (kernels.py, invariant 1), so both backends equal it bit for
bit. What a process chooses once (backend, instruction set, worker threads) is tested in processes of their own.
"""

import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiered.errors import UsageError
from tiered.optim import kernels
from tiered.optim.portable import PortableKernels

needs_native = [pytest.mark.native, pytest.mark.skipif(not kernels.native(), reason="the extension is not built")]
NATIVE = pytest.param("native", marks=needs_native)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N = 40


@pytest.fixture(params=[NATIVE, "portable"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "portable":
        monkeypatch.setattr(kernels, "_backend", PortableKernels())
    return str(request.param)


def gradients(count: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=random).to(dtype) for _ in range(count)]


def numpy_mean(dst: Tensor, sources: list[Tensor], divisor: int, add: bool) -> Tensor:
    with np.errstate(all="ignore"):
        total = sources[0].float().numpy()
        for source in sources[1:]:
            total = total + source.float().numpy()
        mean = total / np.float32(divisor)
        result = dst.float().numpy() + mean if add else mean
    assert result.dtype == np.float32
    return torch.from_numpy(result).to(dst.dtype)


def bits(t: Tensor) -> Tensor:
    """t as integers, every NaN made the same one: equality of these is equality of values, signed zeros included."""
    return t.masked_fill(t.isnan(), math.nan).view(torch.int32 if t.element_size() == 4 else torch.int16)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(bits(actual), bits(expected))


# --- arithmetic ---


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("src_dtype", DTYPES)
@pytest.mark.parametrize("dst_dtype", DTYPES)
def test_a_mean_equals_the_numpy_model_and_returns_the_square_sum_of_what_it_stored(
    dst_dtype: torch.dtype, src_dtype: torch.dtype, add: bool
) -> None:
    for n, count, divisor in [(0, 2, 2), (1, 1, 1), (17, 3, 3), (1000, 2, 2), (1003, 7, 5), (65537, 4, 4)]:
        sources = gradients(count, n, src_dtype)
        before = [source.clone() for source in sources]
        (dst,) = gradients(1, n, dst_dtype, seed=1)
        expected = numpy_mean(dst, sources, divisor, add)
        total = kernels.average(dst, sources, divisor, add=add)
        assert_same(dst, expected)
        assert total == kernels.sum_of_squares(dst)
        assert total == pytest.approx(expected.double().square().sum().item(), rel=1e-14)
        assert all(torch.equal(source, kept) for source, kept in zip(sources, before, strict=True))


@pytest.mark.usefixtures("backend")
def test_every_divisor_divides_as_ieee_does() -> None:
    powers = torch.logspace(-45, 38, 300)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, 3 * 2.0**-149, 2.0**-126, 3.4e38])
    (noise,) = gradients(1, 300)
    source = torch.cat([powers, -powers, special, noise])
    dst = torch.empty_like(source)
    for divisor in (*range(1, 65), 1000, 65536, 2**24 - 1, 2**24):
        kernels.average(dst, [source], divisor, add=False)
        assert_same(dst, numpy_mean(dst, [source], divisor, add=False))


@pytest.mark.usefixtures("backend")
def test_sources_are_added_in_the_order_given() -> None:
    one, large = torch.ones(N), torch.full((N,), 2.0**30)
    dst = torch.empty(N)
    kernels.average(dst, [large, -large, one], 1, add=False)
    assert torch.equal(dst, one)
    kernels.average(dst, [one, large, -large], 1, add=False)
    assert torch.equal(dst, torch.zeros(N))


@pytest.mark.usefixtures("backend")
def test_dst_is_added_after_the_division() -> None:
    dst = torch.full((N,), 2.0**-24)
    kernels.average(dst, [torch.full((N,), 2.0**24), torch.ones(N)], 2**24, add=True)
    assert torch.equal(dst, torch.ones(N))  # 2**24 + 1 rounds to 2**24; 1 + 2**-24 rounds to 1
    dst = torch.full((N,), 3.0)
    kernels.average(dst, [torch.ones(N), torch.full((N,), 4.0)], 2, add=True)
    assert torch.equal(dst, torch.full((N,), 5.5))


@pytest.mark.usefixtures("backend")
def test_the_sum_of_half_precision_sources_is_not_rounded_to_their_dtype() -> None:
    dst = torch.empty(N)
    kernels.average(dst, [torch.full((N,), 60000.0, dtype=torch.float16)] * 64, 64, add=False)
    assert torch.equal(dst, torch.full((N,), 60000.0, dtype=torch.float16).float())
    dst = torch.empty(N, dtype=torch.float16)
    kernels.average(dst, [torch.full((N,), 60000.0, dtype=torch.float16)] * 64, 64, add=False)
    assert dst.isfinite().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_source_over_one_is_accumulate(dtype: torch.dtype) -> None:
    (source,) = gradients(1, 1003, dtype)
    source[:3] = torch.tensor([-0.0, math.inf, math.nan])
    for add in (False, True):
        mean, plain = torch.zeros(1003), torch.zeros(1003)
        total = kernels.average(mean[3:], [source[3:]], 1, add=add)
        assert total == kernels.accumulate(plain[3:], source[3:], add=add)
        kernels.average(mean[:3], [source[:3]], 1, add=add)
        kernels.accumulate(plain[:3], source[:3], add=add)
        assert_same(mean, plain)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("position", [0, 20, 39])
def test_infinity_and_nan_reach_the_result_and_its_sum(position: int) -> None:
    sources = [torch.ones(N) for _ in range(3)]
    dst = torch.zeros(N)
    sources[1][position] = math.inf
    assert kernels.average(dst, sources, 3, add=False) == math.inf
    assert dst.isinf().nonzero().view(-1).tolist() == [position]
    sources[2][position] = -math.inf
    assert math.isnan(kernels.average(dst, sources, 3, add=False))
    assert dst.isnan().nonzero().view(-1).tolist() == [position]


# --- memory ---


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_dst_may_be_any_of_the_sources(places: tuple[int, ...], dtype: torch.dtype, add: bool) -> None:
    n = 65536 + 37
    sources = gradients(3, n, dtype)
    dst = sources[places[0]]
    for place in places:
        sources[place] = dst
    expected = numpy_mean(dst, [source.clone() for source in sources], 3, add)
    total = kernels.average(dst, sources, 3, add=add)
    assert_same(dst, expected)
    assert total == kernels.sum_of_squares(expected)


@pytest.mark.usefixtures("backend")
def test_results_do_not_depend_on_chunking_or_alignment() -> None:
    n = 70_003
    sources = gradients(3, n, torch.bfloat16)
    whole = torch.zeros(n, dtype=torch.float16)
    kernels.average(whole, sources, 3, add=False)
    pieces = torch.zeros(n, dtype=torch.float16)
    for start, stop in itertools.pairwise((0, 1, 8, 25, 16_411, 65_537, 69_990, n)):
        kernels.average(pieces[start:stop], [source[start:stop] for source in sources], 3, add=False)
        alone = torch.zeros(stop - start, dtype=torch.float16)  # at another place within a vector
        kernels.average(alone, [source[start:stop].clone() for source in sources], 3, add=False)
        assert_same(alone, whole[start:stop])
    assert_same(pieces, whole)


@pytest.mark.usefixtures("backend")
def test_results_do_not_depend_on_the_number_of_threads_asked_for_or_set() -> None:
    n = 300_003  # five blocks
    sources = gradients(2, n)
    one = torch.zeros(n)
    total = kernels.average(one, sources, 2, add=True, threads=1)
    try:
        for count in (2, 3, 7):
            many = torch.zeros(n)
            assert kernels.average(many, sources, 2, add=True, threads=count) == total
            assert_same(many, one)
            kernels.set_threads(count)
            many.zero_()
            assert kernels.average(many, sources, 2, add=True) == total
            assert_same(many, one)
    finally:
        kernels.set_threads(None)


@pytest.mark.usefixtures("backend")
def test_means_and_the_other_kernels_from_several_python_threads_do_not_disturb_each_other() -> None:
    n = 200_003
    sources = gradients(3, n)
    segment = kernels.Segment(start=0, stop=n, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2)

    def means(threads: int | None) -> list[Any]:
        dst = sources[0].clone()
        return [kernels.average(dst, [dst, *sources[1:]], 3, add=True, threads=threads), dst]

    def sums(_: int | None) -> list[Any]:
        dst = sources[0].clone()
        return [kernels.accumulate(dst, sources[1], add=True), dst]

    def update(_: int | None) -> list[Any]:
        state = {"master": sources[0].clone(), "exp_avg": sources[1].clone(), "exp_avg_sq": sources[2].square()}
        kernels.adamw([segment], grad=sources[1], **state)
        return [0.0, torch.cat(list(state.values()))]

    kernels.set_threads(3)
    try:
        expected = {call: call(1) for call in (means, sums, update)}
        with ThreadPoolExecutor(4) as pool:
            asked = [(call, threads) for _ in range(4) for call in expected for threads in (1, None)]
            running = [(call, pool.submit(call, threads)) for call, threads in asked]
            for call, result in running:
                total, values = result.result()
                assert total == expected[call][0], call.__name__
                assert_same(values, expected[call][1])
    finally:
        kernels.set_threads(None)


# --- refused input ---


def away() -> Tensor:
    t = torch.zeros(N)
    t.untyped_storage().resize_(0)
    return t


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sources": []}, "got 0 sources, expected 1 to 64"),
    ({"sources": [torch.zeros(N)] * 65}, "got 65 sources"),
    ({"sources": [torch.zeros(N), torch.zeros(N - 1)]}, r"sources\[1\] has 39 elements, expected 40 as in dst"),
    (
        {"sources": [torch.zeros(N), torch.zeros(N).half()]},
        r"sources\[1\]: got dtype torch.float16, expected .*float32",
    ),
    ({"sources": [torch.zeros(N).double()]}, r"sources\[0\]: got dtype torch.float64"),
    ({"sources": [torch.zeros(N), None]}, r"sources\[1\]: got NoneType, expected a torch.Tensor"),
    ({"sources": [torch.zeros(2 * N)[::2]]}, "contiguous"),
    ({"sources": [torch.zeros(N, device="meta")]}, "on meta, expected a strided one on cpu"),
    ({"sources": [torch.zeros(N), away()]}, r"sources\[1\]: its storage holds 0 bytes, expected at least 160"),
    ({"dst": torch.zeros(N, dtype=torch.int8)}, "dst: got dtype torch.int8"),
    ({"dst": away()}, "dst: its storage holds 0 bytes"),
    ({"divisor": 0}, "got divisor 0, expected an integer from 1 to 16777216"),
    ({"divisor": -2}, "got divisor -2"),
    ({"divisor": 2**24 + 1}, "got divisor 16777217"),
    ({"divisor": 2.0}, "got divisor 2.0"),
    ({"threads": 0}, "average: got 0, expected at least 1 thread"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_average_refuses_what_it_cannot_take_and_touches_nothing(change: dict[str, Any], message: str) -> None:
    dst = torch.ones(N)
    call = {"dst": dst, "sources": [torch.full((N,), 2.0)] * 2, "divisor": 2, "add": True, "threads": 1} | change
    with pytest.raises(UsageError, match=message):
        kernels.average(**call)
    assert torch.equal(dst, torch.ones(N))


def test_average_refuses_a_source_that_overlaps_dst_in_part_or_in_another_dtype() -> None:
    t = torch.ones(N + 1)
    with pytest.raises(UsageError, match=r"dst and sources\[1\] overlap"):
        kernels.average(t[1:], [torch.ones(N), t[:N]], 2, add=False)
    with pytest.raises(UsageError, match=r"dst and sources\[0\] overlap"):
        kernels.average(t[:8], [t.view(torch.bfloat16)[:8]], 2, add=False)
    with pytest.raises(UsageError, match=r"dst and sources\[0\] overlap"):
        kernels.average(t.view(torch.bfloat16), [t.view(torch.float16)], 2, add=False)
    assert torch.equal(t, torch.ones(N + 1))


# --- processes ---

# Prints a digest of means over every type, of ordinary values and of arbitrary bit patterns; NaNs are made equal.
BATTERY = """
import hashlib, math, torch
from tiered.optim import kernels
digest = hashlib.sha256()
dtypes = (torch.float32, torch.bfloat16, torch.float16)
random = torch.Generator().manual_seed(1)
n = 131_203
patterns = torch.randint(-2**31, 2**31 - 1, (3, n), generator=random).to(torch.int32).view(torch.float32)
for given in (torch.randn(3, n, generator=random), patterns):
    for dtype in dtypes:
        for dst_dtype in dtypes:
            for divisor, add in ((3, True), (4, False)):
                dst = given[0].to(dst_dtype)
                total = kernels.average(dst, list(given.to(dtype)), divisor, add=add, threads=3)
                digest.update(total.hex().encode())
                digest.update(dst.masked_fill(dst.isnan(), math.nan).view(torch.uint8).numpy().tobytes())
print(kernels.native(), digest.hexdigest())
"""


def run_script(script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {k: v for k, v in os.environ.items() if k not in ("TIERED_ISA", "TIERED_PORTABLE")}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_instruction_set_and_the_portable_kernels_give_the_same_means() -> None:
    done = run_script(BATTERY, TIERED_PORTABLE="1")
    assert done.returncode == 0, done.stderr
    native, portable = done.stdout.split()
    assert native == "False"
    compared = 0
    for isa in ("scalar", "avx2", "avx512") if kernels.native() else ():
        done = run_script(BATTERY, TIERED_ISA=isa)
        if done.returncode and "this processor lacks" in done.stderr:
            continue
        assert done.stdout.split() == ["True", portable], isa + done.stderr
        compared += 1
    assert compared >= 1 or not kernels.native()


@pytest.mark.native
@pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
def test_one_thread_or_a_small_mean_wakes_no_worker_and_a_large_one_does() -> None:
    script = """
import os, torch
from tiered.optim import kernels
kernels.set_threads(4)
def workers_after(n, **threads):
    before = len(os.listdir("/proc/self/task"))
    kernels.average(dst[:n], [source[:n]] * 2, 2, add=True, **threads)
    return len(os.listdir("/proc/self/task")) - before
dst, source = torch.zeros(300_000), torch.ones(300_000)
print(workers_after(131_072), workers_after(300_000, threads=1))
print(workers_after(300_000, threads=2), workers_after(300_000))
"""
    done = run_script(script)
    assert (done.stdout.split(), done.stderr) == (["0", "0", "1", "2"], "")


@pytest.mark.native
@pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
def test_other_python_threads_run_while_a_mean_is_computed() -> None:
    script = """
import sys, threading, torch
from tiered.optim import kernels
sys.setswitchinterval(1000)  # a thread keeps the interpreter until it lets go of it by itself
dst, source = torch.zeros(1 << 20), torch.ones(1 << 20)
stop, seen = [], []
def compute():
    for _ in range(3000):
        kernels.average(dst, [source, source], 2, add=False, threads=1)
        if stop:
            seen.append(True)
            return
background = threading.Thread(target=compute)
background.start()
stop.append(True)
background.join()
print(seen)
"""
    done = run_script(script)
    assert (done.stdout.split(), done.stderr) == (["[True]"], "")


@pytest.mark.native
@pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
def test_the_callers_flush_to_zero_mode_does_not_reach_a_mean() -> None:
    dst, tiny = torch.zeros(100), torch.full((100,), 1e-40)  # made before: flushing would make these zeros
    expected = numpy_mean(dst, [tiny, tiny], 3, add=True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        kernels.average(dst, [tiny, tiny], 3, add=True)
    finally:
        torch.set_flush_denormal(False)
    assert dst.count_nonzero() == 100
    assert_same(dst, expected)

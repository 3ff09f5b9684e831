"""What surrounds the CPU kernels' arithmetic: refused input, instruction sets, forks, interpreter exit, environment.

A process chooses its backend and instruction set once, so these tests run small scripts in processes of their own.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.errors import UsageError
from tiered.optim import kernels
from tiered.optim.kernels import Segment

N = 40
needs_native = [pytest.mark.native, pytest.mark.skipif(not kernels.native(), reason="the extension is not built")]
NATIVE = pytest.param("native", marks=needs_native)

# Prints a digest of everything the kernels compute on one battery of inputs; NaN patterns are made equal first.
BATTERY = """
import hashlib, math, torch
from tiered.optim import kernels
from tiered.optim.kernels import Segment
kernels.set_threads(2)
digest = hashlib.sha256()
def take(t):
    digest.update(t.masked_fill(t.isnan(), math.nan).contiguous().view(torch.uint8).numpy().tobytes())
dtypes = (torch.float32, torch.bfloat16, torch.float16)
random = torch.Generator().manual_seed(1)
n = 33_003
patterns = torch.randint(-2**31, 2**31 - 1, (3, n), generator=random).to(torch.int32).view(torch.float32)
for source in (torch.randn(3, n, generator=random), patterns):
    for dtype in dtypes:
        for out_dtype in dtypes:
            m, v, grad = source[0] * 0.1, source[1].square(), source[2].to(dtype)
            master, out = source[0].clone(), torch.zeros(n, dtype=out_dtype)
            common = dict(lr=1e-2, beta2=0.95, eps=1e-8, weight_decay=0.1, step=2)
            segments = [Segment(start=0, stop=13, beta1=0.9, **common),
                        Segment(start=15, stop=20_001, beta1=0.3, maximize=True, **common),
                        Segment(start=20_001, stop=n, beta1=0.99, **common)]
            kernels.adamw(segments, master=master, exp_avg=m, exp_avg_sq=v, grad=grad, grad_scale=0.7, param_out=out)
            for t in (master, m, v, out):
                take(t)
            for add in (True, False):
                digest.update(kernels.accumulate(out, grad, add=add).hex().encode())
                take(out)
            digest.update(kernels.sum_of_squares(grad).hex().encode())
print(kernels.native(), digest.hexdigest())
"""


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TIERED_ISA", "TIERED_PORTABLE")}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=120, check=False
    )


def succeed(script: str, **environment: str) -> str:
    done = run_script(script, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# --- refused input ---

BASE = Segment(start=0, stop=N, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


def make_call() -> dict[str, Any]:
    call: dict[str, Any] = {name: torch.full((N,), 0.5) for name in ("master", "exp_avg", "exp_avg_sq", "grad")}
    return call | {"param_out": torch.full((N,), 0.5, dtype=torch.bfloat16), "segments": [BASE]}


def away(dtype: torch.dtype = torch.float32) -> Tensor:
    t = torch.zeros(N, dtype=dtype)
    t.untyped_storage().resize_(0)
    return t


BAD_TENSORS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("master", lambda call: torch.zeros(N, dtype=torch.bfloat16), "got dtype torch.bfloat16, expected torch.float32"),
    ("exp_avg", lambda call: torch.zeros(N, dtype=torch.float64), "got dtype torch.float64"),
    ("exp_avg_sq", lambda call: torch.zeros(N, dtype=torch.float16), "got dtype torch.float16"),
    ("grad", lambda call: torch.zeros(N, dtype=torch.int32), "got dtype torch.int32, expected .*bfloat16"),
    ("param_out", lambda call: torch.zeros(N, dtype=torch.int16), "got dtype torch.int16"),
    ("exp_avg", lambda call: torch.zeros(N - 1), "got 39 elements, expected 40"),
    ("param_out", lambda call: torch.zeros(N + 1), "got 41 elements, expected 40"),
    ("grad", lambda call: torch.zeros(2 * N)[::2], "contiguous"),
    ("grad", lambda call: torch.zeros(N // 2, 2), "1-D"),
    ("exp_avg", lambda call: torch.zeros(N, device="meta"), "on meta, expected a strided one on cpu"),
    ("grad", lambda call: torch.zeros(N).to_sparse(), "expected a strided one"),
    ("grad", lambda call: None, "got NoneType, expected a torch.Tensor"),
    ("master", lambda call: [0.0] * N, "got list"),
    ("grad", lambda call: away(), "holds 0 bytes, expected at least 160"),
    ("param_out", lambda call: away(torch.bfloat16), "holds 0 bytes"),
    ("grad", lambda call: call["master"], "overlap"),
    ("param_out", lambda call: call["exp_avg"].view(torch.bfloat16)[:N], "overlap"),
]

BAD_SEGMENTS: list[tuple[list[Segment], str]] = [
    ([replace(BASE, stop=N + 1)], r"segments\[0\]: got elements \[0, 41\)"),
    ([replace(BASE, start=-1)], r"got elements \[-1, 40\)"),
    ([replace(BASE, start=9, stop=5)], r"got elements \[9, 5\)"),
    ([replace(BASE, stop=9), replace(BASE, start=8)], r"segments\[1\]: got elements \[8, 40\)"),
    ([replace(BASE, start=20), replace(BASE, stop=20)], r"segments\[1\]"),
    ([replace(BASE, stop=9), replace(BASE, start=9, step=0)], r"segments\[1\]: got step 0, expected >= 1"),
    ([replace(BASE, beta1=1.0)], r"got beta1 1.0"),
    ([replace(BASE, beta2=-0.1)], r"got beta2 -0.1"),
    ([replace(BASE, beta2=math.nan)], r"got beta2 nan"),
]


def assert_refused_untouched(call: dict[str, Any], message: str) -> None:
    usable = {k: t for k, t in call.items() if isinstance(t, Tensor) and t.device.type == "cpu" and not t.is_sparse}
    before = {k: t.clone() for k, t in usable.items() if t.untyped_storage().nbytes()}
    with pytest.raises(UsageError, match=message):
        kernels.adamw(call.pop("segments"), **call)
    for name, t in before.items():
        assert torch.equal(call[name], t), name


@pytest.mark.parametrize(("name", "make_bad", "message"), BAD_TENSORS)
def test_adamw_refuses_a_bad_tensor_and_touches_nothing(
    name: str, make_bad: Callable[[dict[str, Any]], object], message: str
) -> None:
    call = make_call()
    call[name] = make_bad(call)
    assert_refused_untouched(call, message)


@pytest.mark.parametrize(("segments", "message"), BAD_SEGMENTS)
def test_adamw_refuses_bad_segments_and_touches_nothing(segments: list[Segment], message: str) -> None:
    assert_refused_untouched(make_call() | {"segments": segments}, message)


@pytest.mark.parametrize(
    ("dst", "src", "message"),
    [
        (torch.zeros(3), torch.zeros(4), "src has 4 elements, expected 3"),
        (torch.zeros(3, dtype=torch.int8), torch.zeros(3), "dst: got dtype torch.int8"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "src: got dtype torch.float64"),
        (torch.zeros(6)[::2], torch.zeros(3), "dst: got shape"),
        (away(), torch.zeros(N), "dst: its storage holds 0 bytes"),
    ],
)
def test_accumulate_refuses_bad_tensors(dst: Tensor, src: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kernels.accumulate(dst, src, add=True)


def test_accumulate_refuses_shifted_overlap_which_would_depend_on_the_order() -> None:
    t = torch.ones(10)
    with pytest.raises(UsageError, match="overlap"):
        kernels.accumulate(t[:9], t[1:], add=True)
    with pytest.raises(UsageError, match="overlap"):
        kernels.accumulate(t[:5], t.view(torch.bfloat16)[:5], add=True)
    assert torch.equal(t, torch.ones(10))


def test_sum_of_squares_refuses_other_tensors_and_set_threads_zero() -> None:
    with pytest.raises(UsageError, match="int64"):
        kernels.sum_of_squares(torch.arange(3))
    with pytest.raises(UsageError, match="got 0, expected at least 1"):
        kernels.set_threads(0)


# --- instruction sets and the environment ---


def test_every_instruction_set_and_the_portable_kernels_give_the_same_bits() -> None:
    _, portable = succeed(BATTERY, TIERED_PORTABLE="1").split()
    compared = 0
    for isa in ("scalar", "avx2", "avx512") if kernels.native() else ():
        done = run_script(BATTERY, TIERED_ISA=isa)
        if done.returncode and "this processor lacks" in done.stderr:
            continue
        assert done.stdout.split() == ["True", portable], isa + done.stderr
        compared += 1
    assert compared >= 1 or not kernels.native()


def test_tiered_portable_1_forces_the_portable_kernels() -> None:
    assert succeed("from tiered.optim import kernels; print(kernels.native())", TIERED_PORTABLE="1") == "False"


@pytest.mark.parametrize(
    "environment",
    [{"TIERED_PORTABLE": "yes"}, pytest.param({"TIERED_ISA": "sse9"}, marks=needs_native)],
    ids=str,
)
def test_an_unknown_setting_is_a_named_error(environment: dict[str, str]) -> None:
    done = run_script("import tiered.optim.kernels", **environment)
    (name, value), *_ = environment.items()
    assert done.returncode == 1
    assert f"ConfigError: {name}: got" in done.stderr
    assert value in done.stderr


@pytest.mark.native
@pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
def test_the_callers_flush_to_zero_mode_changes_nothing_and_survives_the_call() -> None:
    t, tiny = torch.zeros(100), torch.full((100,), 1e-40)  # made before: flushing would make these zeros
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        total = kernels.accumulate(t, tiny, add=True)
        kept = t.view(torch.int32).tolist()
        still_flushing = (tiny * 1.0).view(torch.int32).eq(0).all()
    finally:
        torch.set_flush_denormal(False)
    assert kept == tiny.view(torch.int32).tolist() != [0] * 100
    assert total == pytest.approx(100 * 1e-80, rel=1e-4, abs=0.0)
    assert still_flushing


# --- processes ---

CALL = """
import os, sys, threading, torch
from tiered.optim import kernels
kernels.set_threads(4)
t, ones = torch.zeros(300_000), torch.ones(300_000)
"""


@pytest.mark.parametrize("mode", [NATIVE, "portable"])
def test_a_forked_child_computes_with_threads_of_its_own(mode: str) -> None:
    script = (
        CALL
        + """
torch.set_num_threads(1)  # torch's own pool does not survive a fork
assert kernels.accumulate(t, ones, add=True) == 300_000
child = os.fork()
if child == 0:
    ok = kernels.accumulate(t, ones, add=True) == 4 * 300_000
    workers = len(os.listdir("/proc/self/task")) - 1
    os._exit(0 if ok and (workers == 3 or not kernels.native()) else 1)
assert os.waitpid(child, 0)[1] == 0
assert kernels.accumulate(t, ones, add=True) == 4 * 300_000
"""
    )
    succeed(script, TIERED_PORTABLE="1" if mode == "portable" else "0")


@pytest.mark.native
@pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
def test_the_interpreter_exits_while_daemon_threads_compute() -> None:
    script = (
        CALL
        + """
running = threading.Barrier(4)
def compute(own):
    kernels.accumulate(own, ones, add=True)
    running.wait()
    while True:  # only this package's calls: torch's own, when they let go of the GIL, do end such a process
        kernels.accumulate(own, ones, add=True)
for _ in range(3):
    threading.Thread(target=compute, args=(t.clone(),), daemon=True).start()
running.wait()
print("end")
"""
    )
    assert succeed(script) == "end"


@pytest.mark.native
@pytest.mark.skipif(not kernels.native(), reason="the extension is not built")
def test_idle_workers_use_no_processor_time() -> None:
    script = (
        CALL
        + """
import time
kernels.accumulate(t, ones, add=True)
time.sleep(0.05)
before = time.process_time()
time.sleep(0.3)
print(time.process_time() - before)
"""
    )
    assert float(succeed(script)) < 0.1  # processor seconds of four threads; spinning would use 0.9

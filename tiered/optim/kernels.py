"""The CPU arithmetic of the optimizer: AdamW on flat fp32 state, gradient accumulation, means, sums of squares.

Owns the checks of what a caller passes, the scalar constants of an update, and the choice between two backends: the
native kernels (csrc/adam.h; vector code, own threads, GIL released) and torch with numpy (portable.py) where the
extension is not built or TIERED_PORTABLE=1 asks for it. This is the only importer of the extension in `optim/`.

Invariants
1. An element's result depends on that element's inputs and its segment's numbers alone: bit-equal for any position,
   alignment, chunking, thread count, instruction set and backend. So no step is fused or contracted: each multiply,
   add, divide and square root is rounded to fp32 on its own. torch's fused AdamW does not give this (its vector body
   contracts a multiply and an add, its tail differently), so it is the reference of the tests and not a backend.
2. Sums of squares are bit-equal for any thread count, instruction set and backend: blocks of 65536 elements from the
   tensor's start, element i of a block in lane i mod 16, lanes folded as a tree, blocks added in order, all in fp64.
3. A call that raises has changed nothing. Elements outside every segment are neither read nor written.
4. NaN stays NaN and infinities propagate; which NaN bit pattern comes out is not promised.
5. Several Python threads may call at once: each call's result is what it would be alone.

Left to the callers: when to call, clipping (through `grad_scale`), which parameter an element range belongs to, and
autograd (kernels write through raw addresses: no graph is recorded and no version counter is raised).
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tiered.errors import ConfigError, UsageError
from tiered.optim.portable import PortableKernels, State, Update

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the enum DType of csrc/adam.h
_MOST_SOURCES = 64
_MOST_DIVISOR = 2**24  # fp32 holds every integer up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements [start, stop) of the given 1-D tensors that share one parameter's hyperparameters.

    `step` counts this update, so it is at least 1. `lr`, `weight_decay` and the rest mean what torch.optim.AdamW's do.
    """

    start: int
    stop: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False


class _Backend(Protocol):
    is_native: bool

    def adamw(self, updates: Sequence[Update], state: State) -> None: ...

    def accumulate(self, dst: Tensor, src: Tensor, add: bool) -> float: ...

    def average(self, dst: Tensor, sources: Sequence[Tensor], divisor: int, add: bool, threads: int) -> float: ...

    def sum_of_squares(self, t: Tensor) -> float: ...


# --- public functions ---


def adamw(
    segments: Sequence[Segment],
    *,
    master: Tensor,  # fp32 [n], updated in place
    exp_avg: Tensor,  # fp32 [n], updated in place
    exp_avg_sq: Tensor,  # fp32 [n], updated in place
    grad: Tensor,  # fp32 | bf16 | fp16 [n], read
    grad_scale: float = 1.0,
    param_out: Tensor | None = None,  # fp32 | bf16 | fp16 [n], written
) -> None:
    """One AdamW update (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2) of each segment.

    Per element, every operation rounded to fp32, in the order of torch.optim.AdamW(fused=True):
    `g = grad * grad_scale` (negated for `maximize`); `p = master * (1 - lr * weight_decay)`;
    `m = exp_avg + (1 - beta1) * (g - exp_avg)`; `v = exp_avg_sq * beta2 + (1 - beta2) * g * g`;
    `p - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)`.
    Given the same state, v is within 2 ulp of torch's, m within 2 ulp of its largest operand, and the change of the
    parameter follows from those (torch contracts some of these operations). `param_out` gets the new master rounded
    to nearest even. `grad_scale` folds in the clip factor and 1 / loss scale.

    Raises UsageError, before anything is touched, for a tensor that is not a contiguous, allocated 1-D CPU tensor of
    the right dtype and size, for tensors that overlap in memory, and for segments that are unsorted, overlap, leave
    the tensors, or have step < 1 or a beta outside [0, 1).
    """
    state = State(master, exp_avg, exp_avg_sq, grad, param_out)
    _check_state(state)
    updates = _updates(segments, master.numel(), grad_scale)
    if updates:
        _backend.adamw(updates, state)


def accumulate(dst: Tensor, src: Tensor, *, add: bool) -> float:
    """`dst += src` (add=True) or `dst[:] = src`: fp32 arithmetic, stored rounded to nearest even in dst's dtype.

    Both are contiguous 1-D CPU tensors of one size, each fp32, bf16 or fp16. Returns the fp64 sum of squares of what
    is now stored in dst, so a gradient's norm costs no second pass; inf and NaN propagate into it. Raises UsageError
    for tensors of another kind or size, and for two that overlap in memory without being the same.
    """
    _check_tensor("dst", dst, _DTYPE_CODES)
    _check_source("src", src, dst)
    return _backend.accumulate(dst, src, add)


def average(
    dst: Tensor,  # fp32 | bf16 | fp16 [n], written
    sources: Sequence[Tensor],  # 1 to 64 of one dtype, fp32 | bf16 | fp16 [n], read
    divisor: int,
    *,
    add: bool,
    threads: int | None = None,
) -> float:
    """`dst += mean` (add=True) or `dst[:] = mean` in one pass, where mean is the sum of `sources` over `divisor`.

    All in fp32, each operation rounded on its own: the sources are added in the order given, the sum is divided, dst
    is added, and the result is rounded once, to nearest even in dst's dtype. dst may be one of the sources. Returns
    the fp64 sum of squares of what is now stored in dst, as `accumulate` does; inf and NaN propagate into it.
    `threads` is this call's number, the caller's included, in place of set_threads'; the portable backend uses torch's.

    Raises UsageError, before anything is touched, for no source or more than 64, a divisor outside 1 .. 2**24,
    threads < 1, tensors that are not contiguous, allocated 1-D CPU tensors of one size, sources of several dtypes,
    and a source that overlaps dst in memory without being the same.
    """
    _check_tensor("dst", dst, _DTYPE_CODES)
    if not 1 <= len(sources) <= _MOST_SOURCES:
        raise UsageError(f"average: got {len(sources)} sources, expected 1 to {_MOST_SOURCES}")
    for index, source in enumerate(sources):
        _check_source(f"sources[{index}]", source, dst)
        if source.dtype != sources[0].dtype:
            raise UsageError(
                f"sources[{index}]: got dtype {source.dtype}, expected {sources[0].dtype} as in sources[0]"
            )
    if not isinstance(divisor, int) or not 1 <= divisor <= _MOST_DIVISOR:
        raise UsageError(f"average: got divisor {divisor!r}, expected an integer from 1 to {_MOST_DIVISOR}")
    _check_threads("average", threads)
    return _backend.average(dst, sources, divisor, add, _thread_count() if threads is None else threads)


def sum_of_squares(t: Tensor) -> float:
    """The sum of t's squared elements in fp64 (0.0 when empty); inf and NaN propagate.

    `t` is a contiguous 1-D CPU tensor, fp32, bf16 or fp16; anything else raises UsageError.
    """
    _check_tensor("t", t, _DTYPE_CODES)
    return _backend.sum_of_squares(t)


def native() -> bool:
    """True if the compiled kernels are in use, False for the portable ones (same results, slower)."""
    return _backend.is_native


def set_threads(count: int | None) -> None:
    """Threads for each native call, the caller's included; None (the start value) follows torch.get_num_threads().

    torch's own setting is neither changed nor used up. The portable backend always uses torch's. Raises UsageError
    for count < 1. Results do not depend on it.
    """
    global _threads
    _check_threads("set_threads", count)
    _threads = count


# --- checks; each raises before anything is written ---


def _check_tensor(name: str, t: Tensor | None, dtypes: dict[torch.dtype, int]) -> Tensor:
    if not isinstance(t, Tensor):
        raise UsageError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
    if t.device.type != "cpu" or t.layout != torch.strided:
        raise UsageError(f"{name}: got a {t.layout} tensor on {t.device}, expected a strided one on cpu; copy it first")
    if t.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise UsageError(f"{name}: got dtype {t.dtype}, expected {expected}")
    if t.dim() != 1 or not t.is_contiguous():
        raise UsageError(
            f"{name}: got shape {tuple(t.shape)} with strides {t.stride()}, expected 1-D and contiguous; "
            "pass t.view(-1) of a contiguous tensor"
        )
    end = (t.storage_offset() + t.numel()) * t.element_size()
    held = t.untyped_storage().nbytes()
    if held < end and t.numel():
        raise UsageError(
            f"{name}: its storage holds {held} bytes, expected at least {end}; the tensor is away, fetch it before use"
        )
    return t


def _span(name: str, t: Tensor) -> tuple[int, int, str]:
    """(first byte, end, name) of t's memory."""
    address = t.data_ptr()
    return address, address + t.numel() * t.element_size(), name


def _check_source(name: str, src: Tensor, dst: Tensor) -> None:
    """src can be read while dst is written: it has its size, and lies apart from it or exactly on it."""
    _check_tensor(name, src, _DTYPE_CODES)
    if dst.numel() != src.numel():
        raise UsageError(f"{name} has {src.numel()} elements, expected {dst.numel()} as in dst")
    (start, end, _), (src_start, src_end, _) = _span("dst", dst), _span(name, src)
    same = start == src_start and dst.dtype == src.dtype
    if not same and src_start < end and start < src_end:
        raise UsageError(f"dst and {name} overlap in memory; pass separate tensors (or the same one twice)")


def _check_threads(call: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise UsageError(f"{call}: got {count}, expected at least 1 thread, or None")


def _check_state(state: State) -> None:
    fp32 = {torch.float32: 0}
    numel = _check_tensor("master", state.master, fp32).numel()
    spans = [_span("master", state.master)]
    for name, given in zip(State._fields[1:], state[1:], strict=True):
        if given is None and name == "param_out":
            continue
        t = _check_tensor(name, given, _DTYPE_CODES if name in ("grad", "param_out") else fp32)
        if t.numel() != numel:
            raise UsageError(f"{name}: got {t.numel()} elements, expected {numel} as in master")
        spans.append(_span(name, t))
    spans.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise UsageError(f"{name} and {other} overlap in memory, expected separate tensors")


def _updates(segments: Sequence[Segment], numel: int, grad_scale: float) -> list[Update]:
    updates = []
    floor = 0
    for index, s in enumerate(segments):
        if not floor <= s.start <= s.stop <= numel:
            raise UsageError(
                f"segments[{index}]: got elements [{s.start}, {s.stop}), expected a range inside [{floor}, {numel}): "
                "segments are sorted, do not overlap and stay inside the tensors"
            )
        if s.step < 1:
            raise UsageError(f"segments[{index}]: got step {s.step}, expected >= 1: the number of this update")
        for name, beta in (("beta1", s.beta1), ("beta2", s.beta2)):
            if not 0.0 <= beta < 1.0:
                raise UsageError(f"segments[{index}]: got {name} {beta}, expected 0 <= {name} < 1")
        floor = s.stop
        if s.start < s.stop:
            updates.append(_constants(s, grad_scale))
    return updates


def _constants(s: Segment, grad_scale: float) -> Update:
    weight = 1.0 - s.beta1
    lerp_from_grad = not weight < 0.5  # torch.lerp keeps the nearer end exact, and its fused AdamW does the same
    return Update(
        start=s.start,
        stop=s.stop,
        grad_scale=-grad_scale if s.maximize else grad_scale,
        decay=1.0 - s.lr * s.weight_decay,
        lerp=_fp32(weight) - 1.0 if lerp_from_grad else weight,
        lerp_from_grad=lerp_from_grad,
        beta2=s.beta2,
        grad_sq_weight=1.0 - s.beta2,
        bias2_sqrt=math.sqrt(1.0 - s.beta2**s.step),
        eps=s.eps,
        step_size=s.lr / (1.0 - s.beta1**s.step),
    )


def _fp32(x: float) -> float:
    return float(np.float32(x))


# --- backends ---


class _NativeKernels:
    """Passes addresses and counts to the extension, which copies nothing and keeps nothing after the call."""

    is_native = True

    def __init__(self, extension: ModuleType) -> None:
        try:
            extension.isa()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._extension = extension

    def adamw(self, updates: Sequence[Update], state: State) -> None:
        out = state.param_out
        self._extension.adamw(
            updates,
            (state.master.data_ptr(), state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr()),
            (state.grad.data_ptr(), _DTYPE_CODES[state.grad.dtype]),
            None if out is None else (out.data_ptr(), _DTYPE_CODES[out.dtype]),
            _thread_count(),
        )

    def accumulate(self, dst: Tensor, src: Tensor, add: bool) -> float:
        dst_array = (dst.data_ptr(), _DTYPE_CODES[dst.dtype])
        src_array = (src.data_ptr(), _DTYPE_CODES[src.dtype])
        return float(self._extension.accumulate(dst_array, src_array, dst.numel(), add, _thread_count()))

    def average(self, dst: Tensor, sources: Sequence[Tensor], divisor: int, add: bool, threads: int) -> float:
        dst_array = (dst.data_ptr(), _DTYPE_CODES[dst.dtype])
        arrays = ([source.data_ptr() for source in sources], _DTYPE_CODES[sources[0].dtype])
        return float(self._extension.average(dst_array, arrays, dst.numel(), divisor, add, threads))

    def sum_of_squares(self, t: Tensor) -> float:
        array = (t.data_ptr(), _DTYPE_CODES[t.dtype])
        return float(self._extension.sum_of_squares(array, t.numel(), _thread_count()))


def _thread_count() -> int:
    return torch.get_num_threads() if _threads is None else _threads


def _choose_backend() -> _Backend:
    portable = os.environ.get("TIERED_PORTABLE", "0")
    if portable not in ("", "0", "1"):
        raise ConfigError(f"TIERED_PORTABLE: got {portable!r}, expected 1 (portable kernels) or 0")
    if portable == "1":
        return PortableKernels()
    try:
        extension = importlib.import_module("tiered._native")
    except ModuleNotFoundError:  # any other failure to import is a broken build, and is shown
        return PortableKernels()
    return _NativeKernels(extension)


_threads: int | None = None
_backend: _Backend = _choose_backend()

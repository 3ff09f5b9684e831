"""The kernels of kernels.py in torch and numpy operations, for an install without the extension.

Owns this backend, and the shapes in which kernels.py hands a checked call to either backend (`Update`, `State`).
Invariants: those of kernels.py, which it numbers; they hold here too, bit for bit, as no operation used here fuses or
contracts two roundings into one. Arguments were checked there: nothing here raises for one.
Left to kernels.py: checks, constants, the choice of backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_SUM_BLOCK = 65536  # elements; invariant 2
_SUM_LANES = 16
_SCRATCH = 65536  # elements per pass of AdamW: six such fp32 arrays stay in a core's L2 cache


class Update(NamedTuple):
    """One segment's constants, computed in fp64 as torch does and rounded to fp32 where they meet an element."""

    start: int
    stop: int
    grad_scale: float  # sign carries `maximize`
    decay: float  # 1 - lr * weight_decay
    lerp: float  # exp_avg' = (lerp_from_grad ? grad : exp_avg) + lerp * (grad - exp_avg)
    lerp_from_grad: bool
    beta2: float
    grad_sq_weight: float  # 1 - beta2
    bias2_sqrt: float  # sqrt(1 - beta2 ** step)
    eps: float
    step_size: float  # lr / (1 - beta1 ** step)


class State(NamedTuple):
    """The 1-D tensors of one AdamW call; `param_out` may be absent."""

    master: Tensor  # fp32
    exp_avg: Tensor  # fp32
    exp_avg_sq: Tensor  # fp32
    grad: Tensor  # fp32 | bf16 | fp16
    param_out: Tensor | None  # fp32 | bf16 | fp16


class PortableKernels:
    """torch elementwise operations, one rounding each, on cache-sized pieces.

    numpy takes the square root (torch's is MKL's, off by an ulp for 0.6% of inputs) and sums the lanes (its reduction
    over the outer axis adds row by row, as invariant 2 asks). torch.set_flush_denormal reaches this backend.
    """

    is_native = False

    @torch.no_grad()
    def adamw(self, updates: Sequence[Update], state: State) -> None:
        most = max(u.stop - u.start for u in updates)
        scratch = torch.empty(2, min(_SCRATCH, most), dtype=torch.float32, device="cpu")
        with np.errstate(all="ignore"):
            for u in updates:
                for start in range(u.start, u.stop, _SCRATCH):
                    piece = slice(start, min(start + _SCRATCH, u.stop))
                    views = (None if t is None else t[piece] for t in state)
                    self._update(u, State._make(views), scratch[:, : piece.stop - start])

    def _update(self, u: Update, state: State, scratch: Tensor) -> None:
        g, tmp = scratch[0], scratch[1]
        m, v = state.exp_avg, state.exp_avg_sq
        g.copy_(state.grad).mul_(u.grad_scale)
        torch.sub(g, m, out=tmp).mul_(u.lerp)
        torch.add(g if u.lerp_from_grad else m, tmp, out=m)
        torch.mul(g, u.grad_sq_weight, out=tmp).mul_(g)
        v.mul_(u.beta2).add_(tmp)
        np.sqrt(v.numpy(), out=tmp.numpy())
        tmp.div_(u.bias2_sqrt).add_(u.eps)
        torch.mul(m, u.step_size, out=g).div_(tmp)
        state.master.mul_(u.decay).sub_(g)
        if state.param_out is not None:
            state.param_out.copy_(state.master)

    @torch.no_grad()
    def accumulate(self, dst: Tensor, src: Tensor, add: bool) -> float:
        total = 0.0
        for start in range(0, dst.numel(), _SUM_BLOCK):
            piece = slice(start, start + _SUM_BLOCK)
            stored = dst[piece]
            if add:
                stored.copy_(stored.float() + src[piece].float())
            else:
                stored.copy_(src[piece])
            total += self._block_sum(stored)
        return total

    @torch.no_grad()
    def average(self, dst: Tensor, sources: Sequence[Tensor], divisor: int, add: bool, threads: int) -> float:
        total = 0.0
        scratch = torch.empty(min(_SUM_BLOCK, dst.numel()), dtype=torch.float32, device="cpu")
        for start in range(0, dst.numel(), _SUM_BLOCK):
            piece = slice(start, start + _SUM_BLOCK)
            stored = dst[piece]
            mean = scratch[: stored.numel()].copy_(sources[0][piece])
            for source in sources[1:]:
                mean.add_(source[piece])
            mean.div_(divisor)
            if add:
                mean.add_(stored)
            stored.copy_(mean)
            total += self._block_sum(stored)
        return total

    @torch.no_grad()
    def sum_of_squares(self, t: Tensor) -> float:
        total = 0.0
        for start in range(0, t.numel(), _SUM_BLOCK):
            total += self._block_sum(t[start : start + _SUM_BLOCK])
        return total

    def _block_sum(self, block: Tensor) -> float:
        padded = -(-block.numel() // _SUM_LANES) * _SUM_LANES
        values = torch.zeros(padded, dtype=torch.float64, device="cpu")  # a zero added to a lane leaves it as it is
        values[: block.numel()] = block
        with np.errstate(all="ignore"):
            lanes = np.add.reduce(values.square_().numpy().reshape(-1, _SUM_LANES), axis=0)
            while lanes.size > 1:
                half = lanes.size // 2
                lanes = lanes[:half] + lanes[half:]
        return float(lanes[0])

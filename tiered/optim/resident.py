"""AdamW on state that lives on a device: the norm, the decision to clip or skip, and the update, in tensors alone.

Nothing here reads a tensor on the host, so on a GPU a step is given to the device and nobody waits for it. The update
is torch's fused kernel on views of flat state, one view for each parameter.

Invariants:
1. A norm that is not finite changes nothing that counts: `found_inf` stops the kernel where the numbers are.
2. Gradients are read, never written. (The fused kernel writes unscaled gradients back where it is given a `grad_scale`,
   on a GPU and on the CPU, and wants gradients of the parameters' dtype; so scaling and casting happen in a scratch.)
3. Beyond the state an update takes at most SCRATCH_BYTES of the device, whatever the size of a group.
4. Elements outside every segment are not written. The scratch may read them, whatever they hold.

Results are those of `optim.kernels` within fp32 rounding and not bit for bit: torch's kernel contracts multiplications
and additions, and on a GPU rounds the betas to fp32, which moves exp_avg_sq by up to 2**-25 / (1 - beta2) of itself
(3e-5 for 0.999; steps hardly, as the bias correction holds the same rounded beta).

Left to the callers: where state lives, which elements are whose, step counts, autograd's version counters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tiered.optim.kernels import Segment

SCRATCH_BYTES = 64 << 20
_MOST_AT_ONCE = SCRATCH_BYTES // 4  # elements of fp32 gradient; a multiple of the layout's alignment


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """One group's flat tensors, 1-D, equally long, on one device."""

    master: Tensor  # fp32, updated in place; the parameters themselves where they are fp32
    exp_avg: Tensor  # fp32, updated in place
    exp_avg_sq: Tensor  # fp32, updated in place
    grad: Tensor  # fp32 | bf16 | fp16, read
    param_out: Tensor | None = None  # bf16 | fp16: gets the new master rounded to nearest even


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a step does with its gradients; tensors of one element on the device."""

    factor: Tensor | None  # (1,) fp32: gradients are multiplied by it; None: they are taken as they are
    found_inf: Tensor | None  # () fp32: 1.0 where nothing may change; None: the host knows that all is finite


def norm_partials(flats: Sequence[Tensor]) -> Tensor:
    """() fp64: the sum of squares of the elements of `flats` (at least one; fp32, bf16 or fp16, any shape, one device).

    Summed in fp64, so no finite gradients overflow it; inf and NaN propagate. A few launches for all of them.
    """
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for flat in flats:
        if flat.numel():  # torch's CUDA kernel has taken empty tensors' neighbours for them
            of_dtype.setdefault(flat.dtype, []).append(flat)
    if not of_dtype:
        return torch.zeros((), dtype=torch.float64, device=flats[0].device)
    # of one dtype each: lists of several would take a launch for each tensor
    norms = [norm for same in of_dtype.values() for norm in torch._foreach_norm(same, 2, dtype=torch.float64)]
    return torch.stack(norms).square_().sum()


def judge(norm: Tensor, *, max_norm: float | None, scale: float) -> Verdict:
    """The verdict over gradients whose global L2 norm is `norm` (() fp64), after division by the loss scale `scale`.

    `max_norm`: clip to it by torch.nn.utils.clip_grad_norm_'s formula; None: no clipping.
    """
    found_inf = norm.isfinite().logical_not_().to(torch.float32)
    if max_norm is None:
        return Verdict(known_factor(1.0 / scale, norm.device), found_inf)
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0).div_(scale)
    return Verdict(factor.to(torch.float32).reshape(1), found_inf)


def known_factor(factor: float, device: torch.device) -> Tensor | None:
    """A factor that the host knows, for `Verdict`; None for 1.0, which saves the scratch."""
    return None if factor == 1.0 else torch.full((1,), factor, dtype=torch.float32, device=device)


def scratch_for(states: Sequence[State], verdict: Verdict) -> Tensor | None:
    """1-D fp32: what the updates of `states` under `verdict` need, one after the other; None where they need nothing.

    Taken before anything is changed, so that a device without room for it leaves everything as it was.
    """
    numels = [s.grad.numel() for s in states if verdict.factor is not None or s.grad.dtype != torch.float32]
    if not numels:
        return None
    return torch.empty(min(_MOST_AT_ONCE, max(numels)), dtype=torch.float32, device=states[0].grad.device)


@torch.no_grad()
def update(segments: Sequence[Segment], state: State, verdict: Verdict, scratch: Tensor | None) -> None:
    """One AdamW update of each segment (sorted, apart); `segment.step` counts this update as if it will be taken.

    At step 1 the moments start from zero whatever they held. `scratch`: of `scratch_for`.
    """
    found = [s for s in segments if s.start < s.stop]
    if not found:
        return
    fresh = [t[s.start : s.stop] for s in found if s.step == 1 for t in (state.exp_avg, state.exp_avg_sq)]
    if fresh:  # under found_inf too: moments of no step mean nothing
        torch._foreach_zero_(fresh)
    steps = {step: torch.full((), float(step), device=state.master.device) for step in {s.step for s in found}}
    direct = verdict.factor is None and state.grad.dtype == torch.float32
    for piece in [found] if direct or scratch is None else _pieces(found, scratch.numel()):
        base = 0
        grad = state.grad
        if not direct and scratch is not None:
            base = piece[0].start
            grad = _scaled(state.grad[base : piece[-1].stop], verdict.factor, scratch)
        for alike in _alike(piece):
            _launch(alike, state, [grad[s.start - base : s.stop - base] for s in alike], steps, verdict.found_inf)
    if state.param_out is not None:
        torch._foreach_copy_(
            [state.param_out[s.start : s.stop] for s in found], [state.master[s.start : s.stop] for s in found]
        )


def _scaled(grad: Tensor, factor: Tensor | None, scratch: Tensor) -> Tensor:
    """`grad` in fp32, times `factor`, in the scratch."""
    out = scratch[: grad.numel()]
    if factor is None:
        return out.copy_(grad)
    return torch.mul(grad, factor, out=out)  # `factor` is 1-D, so a 16-bit gradient is promoted before, not after


def _pieces(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """The segments cut into lists that each span at most `most` elements, gaps included."""
    piece: list[Segment] = []
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            if piece and start - piece[0].start >= most:
                yield piece
                piece = []
            stop = min(segment.stop, (piece[0].start if piece else start) + most)
            piece.append(dataclasses.replace(segment, start=start, stop=stop))
            start = stop
    if piece:
        yield piece


def _alike(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """The segments by equal hyperparameters: a launch takes one set for all its tensors, only steps may differ."""
    alike: dict[tuple[float, ...], list[Segment]] = {}
    for s in segments:
        alike.setdefault((s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.maximize), []).append(s)
    yield from alike.values()


def _launch(
    segments: Sequence[Segment],
    state: State,
    grads: list[Tensor],
    steps: dict[int, Tensor],
    found_inf: Tensor | None,
) -> None:
    first = segments[0]
    torch._fused_adamw_(
        [state.master[s.start : s.stop] for s in segments],
        grads,
        [state.exp_avg[s.start : s.stop] for s in segments],
        [state.exp_avg_sq[s.start : s.stop] for s in segments],
        [],
        [steps[s.step] for s in segments],
        lr=first.lr,
        beta1=first.beta1,
        beta2=first.beta2,
        weight_decay=first.weight_decay,
        eps=first.eps,
        amsgrad=False,
        maximize=first.maximize,
        found_inf=found_inf,
    )

"""Crossing: the update of a chunk whose optimizer states live on a device, and whose parameters and gradients do not.

    host: gradient, parameter --copy--> device: update beside the states --copy--> host: parameter

Invariants:
1. Beyond the states an update takes SCRATCH_BYTES of the device at most, all of it before anything is changed.
2. When `update` returns nothing is in flight: the chunk's host memory is the caller's again.
3. Elements outside every segment come back as they went.
Leaves to whom: the arithmetic is `resident`'s; which bytes of the host a chunk is, the pipeline's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tiered.optim import resident
from tiered.optim.kernels import Segment
from tiered.optim.plan import within
from tiered.optim.resident import SCRATCH_BYTES
from tiered.zero.group import ParamGroup
from tiered.zero.runtime import Runtime

_PIECE = SCRATCH_BYTES // 12  # elements that cross at once: gradient, parameter and scaled gradient, of 4 bytes at most


class Crossing:
    """See the file's contract; for one step over `groups`."""

    def __init__(self, runtime: Runtime, groups: Sequence[ParamGroup], factor: float) -> None:
        """`factor`: gradients are multiplied by it. Raises MemoryError where the device has no room."""
        self._runtime = runtime
        device = runtime.device.torch_device
        self._verdict = resident.Verdict(resident.known_factor(factor, device), None)
        self._piece = min(_PIECE, max((group.spec.shard_numel for group in groups), default=0))
        self._grad, self._param, self._scaled = (
            torch.empty(self._piece, dtype=torch.float32, device=device) for _ in range(3)
        )

    @torch.no_grad()
    def update(
        self, segments: Sequence[Segment], group: ParamGroup, start: int, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Update the elements of `group`'s shard from `start` on that `tensors` has: "param" in place, "grad" (1-D, of
        the host). `segments` count from `start`."""
        numel = tensors["param"].numel()
        for low in range(0, numel, max(self._piece, 1)):
            high = min(low + self._piece, numel)
            if found := within(segments, low, high):
                piece = {kind: tensor[low:high] for kind, tensor in tensors.items()}
                self._cross(found, group, start + low, piece)

    def _cross(
        self, segments: Sequence[Segment], group: ParamGroup, start: int, host: Mapping[str, torch.Tensor]
    ) -> None:
        device, meter, stop = self._runtime.device, self._runtime.meter, start + host["param"].numel()
        grad = self._grad.view(host["grad"].dtype)[: stop - start]
        param = self._param.view(host["param"].dtype)[: stop - start]
        for here, there in ((host["grad"], grad), (host["param"], param)):
            device.order(device.copy_in(there, here))
            meter.count("device", written=here.nbytes)
        has_master = "master" in group.blocks
        state = resident.State(
            master=group.on_device("master", torch.float32)[start:stop] if has_master else param,
            exp_avg=group.on_device("exp_avg", torch.float32)[start:stop],
            exp_avg_sq=group.on_device("exp_avg_sq", torch.float32)[start:stop],
            grad=grad,
            param_out=param if has_master else None,
        )
        resident.update(segments, state, self._verdict, self._scaled)
        back = device.copy_out(host["param"], param)
        meter.count("device", read=param.nbytes)
        with meter.stalled("optimizer copy"):
            back.wait()

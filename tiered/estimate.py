"""What a training run must keep between steps, in bytes, before anything is allocated.

Owns the arithmetic of "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al.,
arXiv 1910.02054, figure 1 and section 3) and its tiers ("ZeRO-Infinity", arXiv 2104.07857, section 3). With P
parameters, N ranks, and w, g, o bytes of weight, gradient and optimizer state a parameter, one rank keeps

    stage 0: (w + g + o) P          stage 1: (w + g) P + o P / N
    stage 3: (w + g + o) P / N      stage 2: w P + (g + o) P / N

1. Pure: no tensor, device or file is touched.
2. Every kind of bytes stands on exactly one tier, so the tiers add up to `total`.

Leaves activations, buffers and temporaries out, and says so in `Estimate.left_out`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tiered.errors import ConfigError

Offload = Literal["host", "nvme"] | None

LEFT_OUT = (
    "activations and the batch; the weights gathered for the layers at work; buffers for reading, writing and "
    "reducing; temporaries; the padding of a shard; a second slot on a drive that keeps the previous step"
)
"""What an estimate does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Persistent model-state bytes of one rank.

    `tiers` maps "device", "host" and "nvme" to the bytes of each kind there ("param", "grad", "master", "exp_avg",
    "exp_avg_sq"; only kinds that stand on that tier). "host" and "nvme" are a rank's own share: ranks of one machine
    add up.
    """

    parameters: int
    ranks: int
    stage: int
    tiers: Mapping[str, Mapping[str, int]]
    left_out: str = LEFT_OUT

    def on(self, tier: str) -> int:
        """Bytes of one rank on "device", "host" or "nvme"."""
        if tier not in self.tiers:
            raise ConfigError(f"tier: got {tier!r}, expected one of {', '.join(self.tiers)}")
        return sum(self.tiers[tier].values())

    @property
    def total(self) -> int:
        """Bytes of one rank on all tiers together."""
        return sum(self.on(tier) for tier in self.tiers)


def estimate(
    parameters: int,
    *,
    ranks: int = 1,
    stage: int = 3,
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    offload_params: Offload = None,
    offload_optimizer: Offload = None,
) -> Estimate:
    """Bytes that one rank keeps for Adam's training of `parameters` parameters, by tier and kind.

    A parameter costs its weight (`param_dtype`), its gradient (`grad_dtype`, by default the weight's dtype), two fp32
    moments, and an fp32 master copy unless the weight is fp32 and so its own master: 16 bytes with either dtype.
    An offloaded optimizer takes the gradients along: to RAM with "host", and with "nvme" to RAM too, where they are
    added up until the step while there is room.

    Raises ConfigError naming the argument that is impossible.
    """
    _check(parameters, ranks, stage, offload_params, offload_optimizer)
    for name, dtype in (("param_dtype", param_dtype), ("grad_dtype", grad_dtype or param_dtype)):
        if not dtype.is_floating_point:
            raise ConfigError(f"{name}: got {dtype}, expected a floating point dtype such as torch.bfloat16")
    shard = -(-parameters // ranks)  # the largest rank's part
    param = (shard if stage >= 3 else parameters) * param_dtype.itemsize
    grad = (shard if stage >= 2 else parameters) * (grad_dtype or param_dtype).itemsize
    state = (shard if stage >= 1 else parameters) * torch.float32.itemsize
    kinds = {"exp_avg": state, "exp_avg_sq": state}
    if param_dtype != torch.float32:
        kinds["master"] = state
    tiers: dict[str, dict[str, int]] = {"device": {}, "host": {}, "nvme": {}}
    tiers[offload_params or "device"]["param"] = param
    tiers["host" if offload_optimizer else "device"]["grad"] = grad
    tiers[offload_optimizer or "device"].update(kinds)
    return Estimate(parameters=parameters, ranks=ranks, stage=stage, tiers=tiers)


def _check(parameters: int, ranks: int, stage: int, offload_params: Offload, offload_optimizer: Offload) -> None:
    if parameters < 0:
        raise ConfigError(f"parameters: got {parameters}, expected a count of 0 or more")
    if ranks < 1:
        raise ConfigError(f"ranks: got {ranks}, expected at least 1")
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"stage: got {stage!r}, expected 0, 1, 2 or 3")
    for name, tier, least in (("offload_params", offload_params, 1), ("offload_optimizer", offload_optimizer, 1)):
        if tier not in (None, "host", "nvme"):
            raise ConfigError(f"{name}: got {tier!r}, expected None, 'host' or 'nvme'")
        if tier is not None and stage < least:
            raise ConfigError(
                f"{name}: got {tier!r} with stage={stage}, expected stage {least} or more, or {name}=None"
            )

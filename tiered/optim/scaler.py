"""LossScaler: the dynamic loss scale of fp16 training (Micikevicius et al., "Mixed Precision Training", 2018).

The loss is multiplied by the scale before backward, gradients are divided by it inside the optimizer's kernel. A step
with a non-finite gradient is skipped and halves the scale; `growth_interval` good steps in a row double it.
Invariant: the scale is a power of two times its initial value, so scaling and unscaling are exact short of overflow.
"""

from __future__ import annotations

import dataclasses

GROWTH_INTERVAL = 2000  # steps, as torch.amp.GradScaler
_LARGEST, _SMALLEST = 2.0**24, 2.0**-24


@dataclasses.dataclass(slots=True)
class LossScaler:
    """The scale, and how many steps in a row it has held."""

    scale: float = 65536.0
    growth_interval: int = GROWTH_INTERVAL
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Account for one step: taken (`finite`) or skipped."""
        if not finite:
            self.scale = max(self.scale / 2, _SMALLEST)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale = min(self.scale * 2, _LARGEST)
            self.good_steps = 0

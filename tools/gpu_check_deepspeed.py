"""Part of `tools/gpu_check`: the same resident and offload steps by DeepSpeed ZeRO-3.

    python tools/gpu_check_deepspeed.py resident|offload SETTINGS        run by tools/gpu_check

Runs under an interpreter that has deepspeed and can import this package, whose decoder it trains: same weights, same
batches, same order of work. DeepSpeed keeps bf16 parameters, fp32 masters and moments, and clips to 1, as
`gpu_check_steps` does. resident: ZeRO-3 without offload, torch's fused AdamW. offload: parameters and optimizer in
page-locked RAM, its own CPU Adam. Its settings go into the figures. Nothing limits its device memory.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from gpu_check_decoder import Figures, Machine, Settings, batch, decoder, emit
from gpu_check_steps import (
    CLIP,
    LR,
    OFFLOAD,
    OFFLOAD_SMALL,
    RESIDENT,
    RESIDENT_SMALL,
    WARM_STEPS,
    fitting,
)
from torch import Tensor


def main() -> None:
    settings = Settings.given()
    machine = Machine(settings.device)
    variant = sys.argv[1]
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29547"}
    for name, value in single.items():
        os.environ.setdefault(name, value)
    import deepspeed  # reads the rank from the environment, which must be there before

    deepspeed.init_distributed(dist_backend="nccl" if machine.cuda else "gloo")
    if variant == "resident":
        shape, sizes, context = (RESIDENT_SMALL, (64,), 32) if settings.small else (RESIDENT, (16384,), 2048)
    else:
        shape = OFFLOAD_SMALL if settings.small else fitting(OFFLOAD, settings.ram_bytes)
        sizes, context = ((64, 32), 32) if settings.small else ((32768, 8192), 2048)
    chosen = configuration(offload=variant == "offload", sequences=sizes[0] // context)
    model = decoder(shape)
    own = None if variant == "offload" else torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=own, config=chosen)
    for tokens in sizes:
        machine.forget_peak()
        found = timed(settings, machine, engine, batch(shape, tokens, context, machine.device))
        name = "deepspeed_resident" if variant == "resident" else f"deepspeed_offload_{tokens}"
        emit(**{name: {"parameters": shape.parameters, "tokens": tokens, "settings": chosen, **found}})


def configuration(*, offload: bool, sequences: int) -> dict[str, Any]:
    """DeepSpeed's settings: bf16, ZeRO-3, communication overlapped, copies from page-locked memory."""
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sequences,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if offload:
        zero |= {place: {"device": "cpu", "pin_memory": True} for place in ("offload_optimizer", "offload_param")}
        chosen["optimizer"] = {"type": "AdamW", "params": {"lr": LR}}
    return chosen


def timed(settings: Settings, machine: Machine, engine: Any, given: Sequence[Tensor]) -> Figures:
    """Seconds of a step after the warm ones, as many as time allows, and the device's peak over all of them."""

    def step() -> None:
        engine.backward(engine(*given))
        engine.step()

    for _ in range(WARM_STEPS):
        step()
    seconds: list[float] = []
    while len(seconds) < 3 and (not seconds or settings.left_s() > 2 * seconds[-1]):
        seconds.append(machine.seconds(step))
    step_s = statistics.median(seconds)
    tokens = given[0].numel()
    return {
        "step_s": step_s,
        "steps_s": seconds,
        "tokens_per_s": tokens / step_s,
        "peak_allocated_bytes": machine.peak_allocated_bytes(),
        "measured_after_s": time.monotonic() - settings.started_s,
    }


if __name__ == "__main__":
    main()

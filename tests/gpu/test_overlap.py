"""Copies hide under compute: read from the profile of a forward and backward whose parameters and gradients move.

Large enough that compute is the bound (32k tokens), small enough for a few seconds: 16 blocks of 50 M parameters.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.timeline import Timeline
from gpu.training import decoder_batch, sharded_decoder, step

import tiered
from tiered.cli.gpt import GPTShape

SHAPE = GPTShape(vocabulary=2048, hidden=2048, layers=16, heads=16, checkpoint_activations=True)
BLOCK_BYTES = 2 * (12 * 2048**2 + 13 * 2048)
SEQUENCES, CONTEXT = 16, 2048
LEAST_SHARE = 0.9


def settings(device_budget: int) -> tiered.Config:
    return tiered.Config(
        device="cuda",
        device_budget=device_budget,
        host_budget=16 * SHAPE.parameters + (2 << 30),
        param_tier="host",
        optimizer_tier="host",
        precision=tiered.MixedPrecision(param_dtype=torch.bfloat16),
    )


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    return decoder_batch(SHAPE, SEQUENCES, CONTEXT)


def test_copies_run_under_compute_where_compute_is_the_bound(
    batch: tuple[torch.Tensor, torch.Tensor],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with sharded_decoder(SHAPE, settings(20 << 30)) as (model, optimizer):
        step(model, optimizer, batch)
        activations = tiered.stats(model).activation_bytes
    with sharded_decoder(SHAPE, settings(activations + 8 * BLOCK_BYTES)) as (model, optimizer):
        for _ in range(2):
            step(model, optimizer, batch)
        before = tiered.stats(model)
        timeline = Timeline.of(lambda: model(*batch).backward(), tmp_path)
        moved = tiered.stats(model).written_bytes["device"] - before.written_bytes["device"]
    copies = timeline.copies_of_the_link()
    assert moved > SHAPE.layers * BLOCK_BYTES, "most of the parameters stayed: nothing is shown"
    pageable = [name for _, name, nbytes in copies if nbytes > 1 << 20 and "Pageable" in name]
    assert not pageable, f"copies from or to memory that is not page-locked: {set(pageable)}"
    copying = sum(end - start for (start, end), _, _ in copies)
    if copying > timeline.compute_us():
        pytest.skip("here the link is the bound, not compute")
    share = timeline.copy_share_under_kernels()
    record_property("copy_time_under_compute_share", f"{share:.3f}")
    assert share >= LEAST_SHARE

"""A step gives the GPU work without waiting for it.

torch's sync debug mode, set to error, raises at every wait that torch issues for a stream or a blocking copy. Waits for
single events are not its business: a step of moved groups waits for the gradients it reads, and for nothing else.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu.timeline import Timeline
from gpu.training import decoder_batch, sharded_decoder, step

import tiered
from tiered.cli.gpt import GPTShape

SHAPE = GPTShape(vocabulary=512, hidden=512, layers=12, heads=8, checkpoint_activations=True)
BLOCK_BYTES = 4 * (12 * 512**2 + 13 * 512)
RESIDENT = tiered.Config(device="cuda", param_tier="device", optimizer_tier="device")
MOVING = tiered.Config(
    device="cuda",
    device_budget=5 * BLOCK_BYTES + (48 << 20),  # of 12 blocks; beside activations
    host_budget="2GiB",
    param_tier="host",
    optimizer_tier="host",
)


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, a call of torch that would wait for the GPU raises RuntimeError."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_debug_mode_raises_at_a_wait() -> None:
    one = torch.ones(1, device="cuda")
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        one.item()


def test_a_whole_step_of_a_resident_model_waits_for_nothing() -> None:
    batch = decoder_batch(SHAPE, 2, 256)
    with sharded_decoder(SHAPE, RESIDENT) as (model, optimizer):
        for _ in range(2):
            step(model, optimizer, batch)
        with no_waits():
            losses = [step(model, optimizer, batch) for _ in range(3)]
        assert all(math.isfinite(loss.item()) for loss in losses)
        assert tiered.stats(model).steps == 5


def test_no_call_in_a_resident_step_waits_for_a_stream_or_the_device(tmp_path: Path) -> None:
    batch = decoder_batch(SHAPE, 2, 256)
    with sharded_decoder(SHAPE, RESIDENT) as (model, optimizer):
        for _ in range(2):
            step(model, optimizer, batch)
        calls = Timeline.of(lambda: step(model, optimizer, batch), tmp_path).calls
    assert "cudaLaunchKernel" in calls, "the profile shows no calls of the driver"
    assert not {"cudaStreamSynchronize", "cudaDeviceSynchronize"} & set(calls)


def test_forward_and_backward_of_moved_groups_wait_for_nothing() -> None:
    batch = decoder_batch(SHAPE, 2, 256)
    with sharded_decoder(SHAPE, MOVING) as (model, optimizer):
        for _ in range(2):
            step(model, optimizer, batch)
        before = tiered.stats(model)
        with no_waits():
            loss = model(*batch)
            loss.backward()
        after = tiered.stats(model)
        optimizer.step()
        assert math.isfinite(loss.item())
    for way in ("read_bytes", "written_bytes"):
        moved = getattr(after, way)["device"] - getattr(before, way)["device"]
        assert moved > SHAPE.layers * BLOCK_BYTES // 2, "hardly anything moved: nothing is shown"

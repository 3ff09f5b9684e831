"""Device memory against the formula, and what page-locking really locks.

peak allocated <= budget used at most + activations   and   peak allocated <= device_budget
"""

import contextlib
import gc
import math
from pathlib import Path

import pytest
import torch
from gpu.training import decoder_batch, sharded_decoder, step

import tiered
from tiered.cli.gpt import GPTShape
from tiered.device import cuda
from tiered.device.cuda import CudaDevice
from tiered.device.memory import Memory

MIB = 1 << 20
SHAPE = GPTShape(vocabulary=1024, hidden=1024, layers=12, heads=16, checkpoint_activations=True)
BLOCK_BYTES = 4 * (12 * 1024**2 + 13 * 1024)
BUDGET = 12 * BLOCK_BYTES * 3 // 4


@pytest.mark.parametrize("tier", ["auto", "host", "nvme"])
def test_the_peak_stays_under_the_device_budget_from_construction_on(tier: tiered.config.TierName, swap: Path) -> None:
    before = torch.cuda.memory_allocated()
    batch = decoder_batch(SHAPE, 2, 256)
    config = tiered.Config(
        device="cuda", device_budget=BUDGET, host_budget="6GiB", nvme=swap, param_tier=tier, optimizer_tier=tier
    )
    with sharded_decoder(SHAPE, config) as (model, optimizer):
        assert torch.cuda.max_memory_allocated() - before <= BUDGET, "construction took more than the budget"
        losses = [step(model, optimizer, batch) for _ in range(4)]
        assert all(math.isfinite(loss.item()) for loss in losses)
        stats = tiered.stats(model)
        peak = torch.cuda.max_memory_allocated()
    assert peak - before <= BUDGET
    assert peak <= stats.peak_bytes["device"] + stats.activation_bytes
    assert stats.peak_bytes["device"] > BLOCK_BYTES, "the budget was hardly used: nothing is shown"
    assert stats.device_peak_allocated_bytes == peak


def test_closing_gives_the_device_back(swap: Path) -> None:
    batch = decoder_batch(SHAPE, 1, 64)
    config = tiered.Config(device="cuda", device_budget=BUDGET, host_budget="6GiB", param_tier="host", nvme=swap)
    with sharded_decoder(SHAPE, config) as (model, optimizer):
        step(model, optimizer, batch)  # cuBLAS keeps its workspace from here on
    del model, optimizer
    gc.collect()
    before = torch.cuda.memory_allocated()
    with sharded_decoder(SHAPE, config) as (model, optimizer):
        step(model, optimizer, batch)
        assert torch.cuda.memory_allocated() > before
    del model, optimizer
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_host_memory_of_a_run_is_page_locked_within_the_host_budget(swap: Path) -> None:
    config = tiered.Config(
        device="cuda", device_budget=BUDGET, host_budget="6GiB", param_tier="host", optimizer_tier="host"
    )
    with sharded_decoder(SHAPE, config) as (model, optimizer):
        step(model, optimizer, decoder_batch(SHAPE, 1, 64))
        stats = tiered.stats(model)
    assert SHAPE.parameters * 4 <= stats.pinned_bytes <= 6 << 30


def test_registered_memory_is_page_locked_byte_for_byte_and_let_go_again() -> None:
    memory = Memory(5 * MIB, committed=True)
    with contextlib.closing(CudaDevice()) as device:
        device.pin(memory)
        assert all(page.is_pinned() for page in memory.bytes.split(4096))
        device.unpin(memory)
        assert not memory.bytes.is_pinned()


def test_a_refused_registration_leaves_the_gpu_usable() -> None:
    memory = Memory(MIB, committed=True)
    torch.zeros(1, device="cuda")
    assert cuda._register(memory.address, MIB)
    try:
        assert not cuda._register(memory.address, MIB), "the same range twice should be refused"
        assert torch.ones(8, device="cuda").sum().item() == 8
    finally:
        cuda._unregister(memory.address)


def test_copies_carry_the_bytes_both_ways_while_the_host_goes_on() -> None:
    source, target = Memory(8 * MIB, committed=True), Memory(8 * MIB, committed=True)
    source.bytes.random_(0, 256, generator=torch.Generator().manual_seed(0))
    with contextlib.closing(CudaDevice()) as device:
        for memory in (source, target):
            device.pin(memory)
        buffer = device.allocate(8 * MIB)
        device.commit(buffer)
        device.order(device.copy_in(buffer.bytes, source.bytes))
        buffer.bytes.add_(1)
        device.copy_out(target.bytes, buffer.bytes).wait(30)
        device.release(buffer)
    assert torch.equal(target.bytes, source.bytes + 1)

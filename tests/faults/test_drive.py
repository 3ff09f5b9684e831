"""A drive that fails in the middle of training: an error that names the file and the place, never other numbers.

The blocks' places in the swap file are taken from the store, since a test that flips a bit must know whose it flips.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.program import Chain, chain, config, steps

import tiered
from tiered.errors import CorruptDataError, StorageError, TieredError
from tiered.store.block import Block
from tiered.zero.model import MODEL_ATTRIBUTE


def block_of(model: Chain, group: int, kind: str) -> Block:
    store = model.__dict__[MODEL_ATTRIBUTE].runtime.store
    return next(b for b in store.blocks() if (b.key.group, b.key.kind) == (group, kind))


def flip(swap: Path, block: Block, byte: int) -> tuple[str, int]:
    """Inverts one byte of a block in the swap file; gives the file and where its block starts there."""
    assert block.extent is not None
    (file,) = swap.glob("tiered-*/swap")
    place = block.extent.starts[int(block.extent.slots[0])][0] + byte
    with file.open("r+b", buffering=0) as swap_file:
        swap_file.seek(place)
        (value,) = swap_file.read(1)
        swap_file.seek(place)
        swap_file.write(bytes([value ^ 0xFF]))
        os.fsync(swap_file.fileno())
    return str(file), block.extent.starts[int(block.extent.slots[0])][0]


def open_model(swap: Path, **settings: Any) -> tuple[Chain, tiered.AdamW]:
    """A model that has trained two steps with everything on the drive and none of it cached."""
    model = chain()
    tiered.shard(model, config(swap, **{"host_budget": "6MiB", **settings}))
    optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 2)
    optimizer.keep()  # all of the second, too
    return model, optimizer


@pytest.mark.parametrize("settings", [{}, {"device": "emulated", "device_budget": "1MiB"}], ids=["cpu", "emulated"])
@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("kind", ["param", "exp_avg", "exp_avg_sq"])
@pytest.mark.filterwarnings("ignore:portable I/O")
def test_a_flipped_byte_stops_training_with_file_and_offset_and_is_never_trained_on(
    swap: Path, kind: str, portable: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if portable:
        monkeypatch.setenv("TIERED_PORTABLE", "1")
    model, optimizer = open_model(swap, **settings)
    try:
        block = block_of(model, 4, kind)
        group = model.__dict__[MODEL_ATTRIBUTE].groups[4]
        if group.present:  # what is on the device was read before the fault
            with torch.no_grad():
                for layer in (0, 1, 2):
                    model.layers[layer](torch.ones(1, model.width))
        assert not group.present
        file, start = flip(swap, block, 12345)
        with pytest.raises(CorruptDataError, match=rf"at byte {start} .*{kind} of group 4.*differ") as caught:
            steps(model, optimizer, 2)  # what is lazy of the first is done by the second
        assert caught.value.filename == file
        assert tiered.stats(model).steps <= 3, "a step after it was decided"
        for _ in range(2):  # and it stays an error, whatever is tried
            with pytest.raises(TieredError, match=f"{kind} of group 4"):
                steps(model, optimizer, 1)
        with pytest.raises(StorageError, match=f"{kind} of group 4"):
            model.state_dict()
    finally:
        tiered.close(model, keep_weights=False)
    assert os.listdir(swap) == []


def test_a_flipped_byte_of_an_evicted_gradient_stops_the_step_and_stays_an_error(swap: Path) -> None:
    model, optimizer = open_model(swap, host_budget="4MiB")
    try:
        model(torch.ones(2, model.width)).backward()
        store = model.__dict__[MODEL_ATTRIBUTE].runtime.store
        store.unstage(store.staging(store.room(evicting=True), "a test that leaves no memory to cache gradients in"))
        block = block_of(model, 5, "grad")
        assert block.memory is None, "the gradient is not on the drive"
        flip(swap, block, 99)
        optimizer.step()  # the norm is known without reading it
        for call in (optimizer.keep, optimizer.step, model.state_dict):
            with pytest.raises(TieredError, match="grad of group 5"):
                call()
    finally:
        tiered.close(model, keep_weights=False)
    assert os.listdir(swap) == []


def test_a_close_that_finds_a_weight_lost_says_so_and_the_next_close_gives_everything_back(swap: Path) -> None:
    model, _ = open_model(swap)
    block = block_of(model, 4, "param")
    assert not model.__dict__[MODEL_ATTRIBUTE].groups[4].present
    flip(swap, block, 77)
    for _ in range(2):
        with pytest.raises(StorageError, match="param of group 4"):
            tiered.close(model)
    tiered.close(model, keep_weights=False)
    assert os.listdir(swap) == []
    assert all(p.is_meta for p in model.parameters())


def test_a_write_cut_short_by_the_system_is_a_named_error_and_the_model_still_closes(run: Callable, swap: Path) -> None:
    seen = run("short_write", swap)
    assert seen["seen"][0]["error"] == "StorageError"
    # afterwards the block that was lost, or the step that was torn, says so by the same cause
    assert {step["error"] for step in seen["seen"][1:]} <= {"StorageError", "CorruptDataError", "UsageError"}
    assert "File too large" in seen["seen"][0]["message"]
    assert re.search(r"at byte \d+", seen["seen"][0]["message"])
    assert all(step["path"].startswith(str(swap)) for step in seen["seen"])
    assert seen["left"] == []


def test_a_write_cut_short_while_sharding_gives_the_plain_model_back(run: Callable, swap: Path) -> None:
    seen = run("short_write_while_sharding", swap)
    assert (seen["error"], seen["kept"], seen["files"]) == ("StorageError", True, [])
    assert str(swap) in seen["message"]


def test_leaving_a_with_block_by_a_drive_error_shows_that_error_and_leaves_the_last_step(swap: Path) -> None:
    model = chain()

    def train_on_a_flipped_byte() -> None:
        with tiered.shard(model, config(swap, host_budget="6MiB")):
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            steps(model, optimizer, 1)
            optimizer.keep()
            flip(swap, block_of(model, 3, "exp_avg"), 0)
            steps(model, optimizer, 2)

    with pytest.raises(CorruptDataError, match="exp_avg of group 3"):
        train_on_a_flipped_byte()
    assert len(os.listdir(swap)) == 1
    tiered.close(tiered.shard(chain(), config(swap, host_budget="6MiB", durability="none")))
    (left,) = swap.iterdir()
    assert (left / "kept").exists(), "what is not wanted here is not for this run to remove"

"""A block changes state along the drawn lines only, and a failed one says why it failed, for ever."""

import errno
import itertools

import pytest

from tiered.errors import CorruptDataError, StorageError
from tiered.store.block import Block, BlockKey, BlockState
from tiered.store.tier import Tier

NVME, FETCHING, HOST, FLUSHING, FAILED = BlockState
DRAWN = {
    (NVME, FETCHING), (FETCHING, HOST), (HOST, FLUSHING), (FLUSHING, HOST), (HOST, NVME), (NVME, HOST),
    (NVME, FAILED), (FETCHING, FAILED), (HOST, FAILED), (FLUSHING, FAILED),
}  # fmt: skip
WAY_TO = {NVME: (), FETCHING: (FETCHING,), HOST: (HOST,), FLUSHING: (HOST, FLUSHING), FAILED: (FAILED,)}


def block_in(state: BlockState) -> Block:
    block = Block(BlockKey(3, "exp_avg"), 64, Tier.NVME, None)
    for step in WAY_TO[state]:
        block.move(step)
    return block


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(BlockState, BlockState)], ids=lambda state: state.name
)
def test_only_the_drawn_changes_of_state_are_allowed(before: BlockState, after: BlockState) -> None:
    block = block_in(before)
    if (before, after) in DRAWN:
        block.move(after)
        assert block.state is after
    else:
        with pytest.raises(RuntimeError, match=f"exp_avg of group 3: .*{before.name} -> {after.name}"):
            block.move(after)
        assert block.state is before


def test_a_state_cannot_be_set_past_its_one_method() -> None:
    with pytest.raises(AttributeError):
        block_in(NVME).state = HOST  # type: ignore[misc]


def test_a_failed_block_raises_its_first_cause_every_time() -> None:
    block = block_in(FAILED)
    block.cause = CorruptDataError(errno.EIO, "read of 8 bytes at byte 4096 failed", "/drive/swap")
    for _ in range(2):
        with pytest.raises(StorageError, match=r"exp_avg of group 3 was lost: .*at byte 4096") as caught:
            block.check()
        assert caught.value.__cause__ is block.cause
        assert "/drive/swap" in str(caught.value)
        assert isinstance(caught.value, CorruptDataError), "whoever catches CorruptDataError must see it later too"


@pytest.mark.parametrize("state", [NVME, FETCHING, HOST, FLUSHING])
def test_a_block_that_has_not_failed_raises_nothing(state: BlockState) -> None:
    block_in(state).check()

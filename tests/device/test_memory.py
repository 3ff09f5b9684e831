"""Memory whose pages come and go: aligned, returned to the system at once, and never under a tensor that views it.

Resident bytes are read for the range itself (/proc/self/smaps), so nothing else in the process can disturb them.
"""

import ctypes
import gc
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Completion

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def mappings() -> list[tuple[int, int, str, int]]:
    """(start, stop, rights, resident bytes) of every mapping of this process."""
    found: list[tuple[int, int, str, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            found.append((int(head[1], 16), int(head[2], 16), head[3], 0))
        elif rss := re.match(r"Rss:\s+(\d+) kB", line):
            found[-1] = (*found[-1][:3], int(rss[1]) * 1024)
    return found


def covering(address: int) -> tuple[str, int] | None:
    """Rights and resident bytes of the mapping at an address; None where nothing is mapped."""
    return next((m[2:] for m in mappings() if m[0] <= address < m[1]), None)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * MIB + 3])
def test_memory_is_aligned_to_pages_and_exactly_as_large_as_asked(nbytes: int) -> None:
    memory = Memory(nbytes, committed=True)
    assert memory.address % PAGE == 0
    assert (memory.nbytes, memory.bytes.shape, memory.bytes.dtype) == (nbytes, (nbytes,), torch.uint8)
    assert not nbytes or memory.bytes.data_ptr() == memory.address
    assert not memory.bytes.any()
    memory.bytes.fill_(7)


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_a_size_costs_whole_pages(nbytes: int, pages: int) -> None:
    assert page_ceil(nbytes) == pages * PAGE


def test_views_share_the_memory_in_any_dtype() -> None:
    memory = Memory(64, committed=True)
    memory.view(torch.float32, 4, 8).fill_(1.5)
    assert memory.view(torch.float32).tolist() == [0.0] * 4 + [1.5] * 4 + [0.0] * 8
    assert memory.view(torch.bfloat16, 8, 9).data_ptr() == memory.address + 16
    assert Memory(0).view(torch.float32).numel() == 0


def test_decommit_returns_the_pages_and_commit_brings_zeros_at_the_same_address() -> None:
    memory = Memory(24 * MIB, committed=True)
    address = memory.address
    memory.bytes.fill_(3)
    rights, resident = covering(address) or ("", 0)
    assert rights.startswith("rw")
    assert resident >= 24 * MIB
    memory.decommit()
    rights, resident = covering(address) or ("", 0)
    assert rights.startswith("---"), "memory that is away must not be readable"
    assert resident < MIB
    memory.commit()
    assert (memory.address, memory.committed) == (address, True)
    assert not memory.bytes.any()


def test_committing_and_decommitting_again_changes_nothing() -> None:
    memory = Memory(PAGE, committed=True)
    memory.bytes.fill_(9)
    memory.commit()
    assert memory.bytes.eq(9).all()
    memory.decommit()
    memory.decommit()
    assert not memory.committed


def test_reserved_memory_costs_nothing_until_it_is_committed_and_touched() -> None:
    memory = Memory(1 << 40)
    assert (covering(memory.address) or ("", -1))[1] == 0
    memory.commit()
    assert (covering(memory.address) or ("", -1))[1] == 0


def test_memory_that_is_viewed_is_exported_until_the_view_is_gone_and_refuses_to_decommit() -> None:
    memory = Memory(PAGE, committed=True)
    assert not memory.exported()
    view = memory.view(torch.float32, 0, 10)
    assert memory.exported()
    with pytest.raises(RuntimeError, match="still viewed"):
        memory.decommit()
    assert memory.committed
    view.fill_(2)
    alias = view.detach()[3:]
    del view
    assert memory.exported()
    del alias
    assert not memory.exported()
    memory.decommit()


def test_sealed_views_are_the_memorys_own_and_further_ones_are_not() -> None:
    memory = Memory(PAGE, committed=True)
    own = memory.view(torch.float32, 0, 4)
    memory.seal()
    assert not memory.exported()
    further = own[1:]
    assert memory.exported()
    del further
    assert not memory.exported()
    memory.decommit()


def test_the_range_is_unmapped_when_the_last_view_is_gone_and_not_before() -> None:
    memory = Memory(3 * MIB, committed=True)
    address = memory.address
    view = memory.view(torch.float32, 0, 100)
    view.fill_(4.5)
    del memory
    gc.collect()
    assert view.eq(4.5).all()
    last = view[50:]
    del view
    gc.collect()
    assert last.eq(4.5).all()
    del last
    gc.collect()
    at = covering(address)
    assert at is None or at[1] < 3 * MIB, "the range is still there"


def test_opening_and_dropping_many_leaves_no_mapping() -> None:
    gc.collect()
    before = len(mappings())
    for _ in range(200):
        Memory(PAGE, committed=True).bytes.fill_(1)
    gc.collect()
    assert len(mappings()) <= before + 10


def test_touching_memory_that_is_away_is_a_fault_and_not_a_wrong_number() -> None:
    code = """
from tiered.device.memory import Memory
memory = Memory(4096, committed=True)
memory.decommit()
print("number", memory.bytes[0].item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode < 0, "the process read something"
    assert "number" not in done.stdout


def test_address_space_that_the_system_refuses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot reserve"):
        Memory(1 << 60)


def test_memory_that_a_call_was_given_up_for_keeps_its_pages_and_its_address_for_good() -> None:
    memory, transfer = Memory(3 * PAGE, committed=True), Completion()
    memory.busy(transfer, lambda: True)
    assert not memory.stranded, "the call is not over"
    memory.bytes.fill_(7)
    transfer.finish(OSError("given up"))
    assert memory.stranded
    memory.decommit()
    memory.quiet()
    address = memory.address
    del memory
    gc.collect()
    assert covering(address) == ("rw-p", 3 * PAGE)
    assert set(ctypes.string_at(address, 3 * PAGE)) == {7}


def test_memory_is_not_stranded_by_a_transfer_that_has_come_back() -> None:
    memory, transfer = Memory(PAGE, committed=True), Completion()
    memory.busy(transfer, lambda: False)
    transfer.finish(OSError("failed"))
    assert not memory.stranded
    memory.decommit()
    assert not memory.committed

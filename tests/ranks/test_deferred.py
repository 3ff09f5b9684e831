"""Several ranks build a model of which none ever holds the whole, and what fails on one of them fails on all.

Each test starts one group of ranks that asserts a list of facts (deferred_worker.py).
"""

from pathlib import Path

import pytest
from ranks.launch import run_ranks

WORKER = Path(__file__).with_name("deferred_worker.py")
LIMIT_S = 150


def carry_out(facts: str, ranks: int, folder: Path) -> None:
    swap = folder / "swap"
    swap.mkdir()
    ends = run_ranks(WORKER, [facts, str(swap)], ranks, timeout=LIMIT_S, env={"PYTHONWARNINGS": "error"})
    told = "\n".join(f"--- rank {rank}, exit {end.returncode}\n{end.stdout[-4000:]}" for rank, end in enumerate(ends))
    assert not any(end.returncode for end in ends), told


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_build_what_rank_0_builds_alone_and_none_holds_the_whole(ranks: int, tmp_path: Path) -> None:
    carry_out("VALUES", ranks, tmp_path)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_construction_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(ranks: int, tmp_path: Path) -> None:
    carry_out("FAILURES", ranks, tmp_path)

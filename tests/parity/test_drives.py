"""Several swap directories are one drive: where a byte lies never changes a result."""

from pathlib import Path

import torch
from models import GPT
from parity.harness import NVME, same, tiered_session


def test_two_directories_train_bit_equal_to_one_and_both_are_used(swap: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    outcomes = []
    for nvme in (swap, folders):
        with tiered_session(GPT, NVME, swap, config={"nvme": nvme}) as session:
            outcomes.append((session.train_on(range(3)), session.weights(), session.moments()))
            if nvme is folders:
                files = [f for folder in folders for f in folder.rglob("*") if f.is_file()]
                used = {folders.index(next(p for p in f.parents if p in folders)) for f in files if f.stat().st_blocks}
                assert used == {0, 1}
    same(outcomes[1], outcomes[0], exact=True)
    assert not any(list(folder.iterdir()) for folder in folders)
    assert torch.isfinite(torch.tensor([loss for loss, _ in outcomes[0][0]])).all()

"""Two ranks over gloo, stage 3: what they train is what one rank trains on the joined batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).parent / "worker.py"


def start(scenario: str, out: Path, swap: Path, ranks: int) -> dict[str, Any]:
    """Run the worker as one process, or as two ranks; returns what each saved, by name."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(out), str(swap)],
            env=env if ranks == 1 else {**env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return {path.stem: torch.load(path) for path in out.iterdir()}


SCENARIOS = ["host", "nvme", "device", "accumulated", "frozen", "branch", "edited", "overflow"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_train_what_one_rank_trains_on_the_joined_batch(scenario: str, tmp_path: Path) -> None:
    swap, pair, single = tmp_path / "swap", tmp_path / "pair", tmp_path / "single"
    for folder in (swap, pair, single):
        folder.mkdir()
    got = start(scenario, pair, swap, 2)
    want = start(scenario, single, swap, 1)["one"]
    assert set(got) == {"0", "1"}
    for outcome in got.values():
        torch.testing.assert_close(outcome["norms"], want["norms"], rtol=1e-4, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(outcome["weights"], want["weights"], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(outcome["moments"], want["moments"], rtol=1e-3, atol=1e-5)
        assert outcome["skipped"] == want["skipped"] == (scenario == "overflow")
        torch.testing.assert_close(outcome["after close"], outcome["weights"], rtol=0, atol=0)
        assert (outcome["moved"]["nvme"] > 0) == (scenario not in ("host", "device"))
        assert (outcome["moved"]["device"] > 0) == (scenario == "device")
    torch.testing.assert_close(got["0"]["weights"], got["1"]["weights"], rtol=0, atol=0)
    assert not list(swap.iterdir()), "swap files were left behind"

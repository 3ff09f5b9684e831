"""A swap directory that cannot serve is refused by name, with the model as it was and nothing left on the drive."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faults.program import chain, config, refusal, train
from torch import nn

import tiered
from tiered.errors import SwapDirectoryError


@pytest.fixture(params=["missing", "file", "link", "missing below a link", "below a file"])
def useless(request: pytest.FixtureRequest, tmp_path: Path, swap: Path) -> Path:
    """A path that is no real directory."""
    path = tmp_path / "elsewhere"
    if request.param in ("file", "below a file"):
        path.write_text("something of the user's")
    elif request.param == "link":
        path.symlink_to(swap)
    elif request.param == "missing below a link":
        (tmp_path / "via").symlink_to(tmp_path)
        return tmp_path / "via" / "missing"
    return path / "inner" if request.param == "below a file" else path


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_path_that_is_no_directory_is_refused_and_the_model_stays_plain(
    useless: Path, swap: Path, tmp_path: Path, device: str
) -> None:
    model = chain(3, 32)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SwapDirectoryError, match=str(useless)):
        tiered.shard(model, config(useless, device=device))
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert train(model, config(swap, device=device))["losses"]
    assert os.listdir(swap) == []


def test_deferred_init_refuses_a_useless_path_before_anything_is_built(useless: Path) -> None:
    built = []
    with pytest.raises(SwapDirectoryError, match=str(useless)), tiered.deferred_init(config(useless)):
        built.append(chain(1, 8))
    assert built == []


def test_one_useless_directory_of_two_is_refused_and_the_other_stays_empty(useless: Path, swap: Path) -> None:
    seen = refusal(chain(3, 32), tiered.Config(device="cpu", host_budget="24MiB", nvme=[swap, useless]))
    assert (seen["error"], seen["kept"], seen["files"]) == ("SwapDirectoryError", True, [])
    assert str(useless) in seen["message"]


def test_a_read_only_drive_is_refused_by_name(run_mounted: Callable, swap: Path) -> None:
    seen = run_mounted("read_only", swap)
    assert (seen["error"], seen["kept"], seen["files"]) == ("SwapDirectoryError", True, [])
    assert str(swap) in seen["message"]
    assert "not writable" in seen["message"]


def test_a_full_drive_is_refused_with_the_bytes_needed_and_takes_a_smaller_model_afterwards(
    run_mounted: Callable, swap: Path
) -> None:
    seen = run_mounted("full", swap)
    refused = seen["refused"]
    assert (refused["error"], refused["kept"], refused["files"]) == ("SwapFullError", True, [])
    assert str(swap) in refused["message"]
    assert "bytes are free" in refused["message"]
    assert seen["small"]["losses"]
    assert seen["left"] == []


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in the memory file system."""
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        pytest.skip("/dev/shm is not there or not writable")
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tiered-test-"))
    yield path
    shutil.rmtree(path)


def test_a_directory_in_shared_memory_trains_to_the_same_bits(in_memory: Path, swap: Path) -> None:
    assert train(chain(), config(in_memory)) == train(chain(), config(swap))
    assert os.listdir(in_memory) == []

"""Tests that need a CUDA GPU: skipped as one where there is none.

Invariants: 1. without a GPU one skip says so and how many tests it stands for; a mere listing (`--collect-only`) shows
all of them. 2. a test that waits for ever ends, as in tests/parity. 3. no test changes torch's settings for the next.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity.conftest import no_hang, swap  # noqa: F401
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; deterministic products need it

HERE = Path(__file__).parent
RUN_ANYWHERE = ("test_timeline.py", "test_report.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or config.option.collectonly:
        return
    needing = [item for item in items if item.path.parent == HERE and item.path.name not in RUN_ANYWHERE]
    if needing:
        needing[0].add_marker(pytest.mark.skip(reason=f"no CUDA GPU: {len(needing)} tests of tests/gpu need one"))
        dropped = set(needing[1:])
        config.hook.pytest_deselected(items=needing[1:])
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def exact() -> Iterator[None]:
    """Arithmetic that repeats bit for bit: no TF32, deterministic kernels, attention as plain matrix products."""
    with warnings.catch_warnings():  # some versions of torch warn of these names, which all of them have
        warnings.simplefilter("ignore")
        before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def counted_from_here() -> None:
    """Peaks of the allocator are each test's own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

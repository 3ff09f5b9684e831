"""autocast over a sharded model, and each attention kernel a CPU offers, against plain torch.

Autocast casts float32 weights where they are used, and torch keeps those copies until the outermost region ends. Of a
sharded model they end with the forward of their module, so that nothing outlives its group. Where each weight is used
once in a region the arithmetic is torch's; after a step inside a region it is that of `cache_enabled=False`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ENCODER_DECODER, Case, Gpt, token_batch
from parity.harness import HOST, NVME, Placement, Session, agree, plain_session, tiered_session, variant
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = Case("small_gpt", partial(Gpt, 3), token_batch)


def region(session: Session | None = None, **options: Any) -> Any:
    """Autocast to bfloat16; without torch's cache in plain torch, where a session is given."""
    if session is not None and session.config is None:
        options["cache_enabled"] = False
    return torch.autocast("cpu", torch.bfloat16, **options)


def train(session: Session, steps: int = 3) -> Any:
    seen = []
    for seed in range(steps):
        with region():
            loss = session.model(*session.batch(seed))
        loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
        seen.append(loss.item())
    return [seen, session.weights(), session.moments()]


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_training_under_autocast_is_torchs_with_either_checkpointing(
    checkpointing: str, placement: Placement, swap: Path
) -> None:
    agree(train, variant(SMALL, checkpointing, partial(Gpt, 3, checkpointing=checkpointing)), placement, swap)


class Careful(nn.Module):
    """A block that computes its middle in full precision, by a region made when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.full = torch.autocast("cpu", enabled=False)
        self.low = torch.autocast("cpu", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with self.full:
            hidden = self.middle(hidden.float()).tanh()
            assert hidden.dtype == torch.float32
        with self.low:
            return x + self.last(hidden)


def careful_gpt() -> nn.Module:
    model = Gpt(3)
    model.blocks = nn.ModuleList(Careful() for _ in range(3))
    return model


def test_regions_nested_inside_a_forward_are_torchs(placement: Placement, swap: Path) -> None:
    agree(train, variant(SMALL, "careful", careful_gpt), placement, swap)


def test_torchs_transformer_layers_under_autocast_are_torchs(placement: Placement, swap: Path) -> None:
    agree(train, ENCODER_DECODER, placement, swap)


def test_steps_inside_one_region_use_the_weights_of_each_step(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        with region(session):
            seen = session.train_on(range(3))
        return [seen, session.weights(), session.moments()]

    agree(scenario, SMALL, placement, swap)


class Casts(TorchDispatchMode):
    """The 16-bit copies made inside: bytes of all, and of those whose memory something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self._made.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
        return result

    @property
    def made(self) -> int:
        return sum(nbytes for _, nbytes in self._made)

    @property
    def alive(self) -> int:
        return sum(nbytes for storage, nbytes in self._made if not storage.expired())


def prepared(model: nn.Module) -> None:
    """Regions of their own inside the blocks, made while the cache is on."""
    for block in model.blocks:
        block.forward = torch.autocast("cpu", torch.bfloat16)(block.forward)


def evaluated(session: Session) -> tuple[int, int]:
    """Bytes of 16-bit copies that an evaluation made, and that outlived it while its region went on."""
    with region(), Casts() as casts, torch.no_grad():
        session.model(*session.batch(0))
        return casts.made, casts.alive


@pytest.mark.parametrize("prepare", [None, prepared], ids=["one_region", "nested_regions"])
def test_no_copy_of_a_weight_outlives_its_modules_forward(prepare: Any, swap: Path) -> None:
    with plain_session(SMALL, prepare=prepare) as session:
        blocks = sum(p.nbytes // 2 for p in session.model.blocks.parameters() if p.ndim == 2)
        made, alive = evaluated(session)
        assert made >= alive >= blocks, "torch keeps none either, so this test shows nothing"
    with tiered_session(SMALL, NVME, swap, prepare=prepare) as session:
        made, alive = evaluated(session)
        assert made >= blocks
        assert alive == 0


def test_a_parameter_touched_outside_its_module_is_cast_anew_after_a_step(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        seen = []
        with region(session):
            for seed in range(3):
                seen.append(F.linear(torch.ones(32), session.model.position).detach())
                seen.append(session.train(seed))
        return seen

    agree(scenario, SMALL, placement, swap)


# --- attention ---


def attending(*kernels: SDPBackend) -> Callable[[Session], Any]:
    def scenario(session: Session) -> Any:
        with sdpa_kernel(list(kernels)):
            seen = session.train_on(range(3))
        return [seen, session.weights(), session.moments()]

    return scenario


@pytest.fixture(params=[SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
def kernel(request: pytest.FixtureRequest) -> Iterator[SDPBackend]:
    return request.param


def test_each_attention_kernel_trains_as_in_torch(kernel: SDPBackend, placement: Placement, swap: Path) -> None:
    agree(attending(kernel), SMALL, placement, swap)


def test_the_attention_kernel_chosen_is_the_one_that_runs(kernel: SDPBackend, swap: Path) -> None:
    ran: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with tiered_session(SMALL, HOST, swap) as session, sdpa_kernel([kernel]), Watch():
        session.backward(0)
    assert any("flash_attention" in name for name in ran) == (kernel is SDPBackend.FLASH_ATTENTION)

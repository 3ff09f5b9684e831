"""What stands for a gradient of several ranks is there, can be set to zero, and never computes as something else."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiered
from tiered.zero.parted import PartedGrad


class Cleared:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def cleared() -> Cleared:
    return Cleared()


@pytest.fixture
def grad(cleared: Cleared) -> PartedGrad:
    return PartedGrad("blocks.3", (2, 3), torch.bfloat16, torch.device("cpu"), cleared)


def test_it_has_the_shape_dtype_and_device_of_the_gradient(grad: PartedGrad) -> None:
    assert (grad.shape, grad.dtype, grad.device) == ((2, 3), torch.bfloat16, torch.device("cpu"))
    assert grad.numel() == 6
    assert grad.grad_fn is None
    assert not grad.requires_grad
    assert repr(grad) == f"{grad}" == "PartedGrad(of group 'blocks.3', shape=(2, 3), dtype=torch.bfloat16)"


def test_it_can_be_set_to_zero_alone_and_among_others(grad: PartedGrad, cleared: Cleared) -> None:
    assert grad.zero_() is grad
    other = torch.ones(2)
    torch._foreach_zero_([grad, other])
    assert cleared.times == 2
    assert other.eq(0).all()


USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda grad: grad.sum(),
    "plus": lambda grad: grad + 1,
    "reflected": lambda grad: torch.ones(2, 3) * grad,
    "in place": lambda grad: grad.mul_(2),
    "several at once": lambda grad: torch._foreach_mul_([torch.ones(2), grad], 2.0),
    "norm": lambda grad: torch.nn.utils.get_total_norm([grad]),
    "element": lambda grad: grad[0, 0],
    "detach": lambda grad: grad.detach(),
    "clone": lambda grad: grad.clone(),
    "copy": lambda grad: torch.ones(2, 3).copy_(grad),
    "stack": lambda grad: torch.stack([grad, grad]),
    "into": lambda grad: torch.add(torch.ones(2, 3), 1, out=grad),
    "finite": lambda grad: grad.isfinite(),
    "deepcopy": copy.deepcopy,
    "save": lambda grad: torch.save(grad, io.BytesIO()),
}


@pytest.mark.parametrize("use", USES)
def test_any_other_use_is_refused_and_names_the_group(grad: PartedGrad, cleared: Cleared, use: str) -> None:
    with pytest.raises(tiered.UsageError, match=r"'blocks\.3'.*max_grad_norm"):
        USES[use](grad)
    assert cleared.times == 0


@pytest.mark.parametrize("use", ["tolist", "numpy", "item"])
def test_what_torch_itself_refuses_is_refused(grad: PartedGrad, use: str) -> None:
    with pytest.raises(RuntimeError):
        getattr(grad, use)()

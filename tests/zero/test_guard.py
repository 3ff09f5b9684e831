"""The guard of a parameter that is away: metadata costs nothing, values are fetched, the rest is refused by name."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tiered.errors import UsageError
from tiered.zero.guard import ATTRIBUTE, GuardedParameter, guard, home_of, is_sharded, unguard


class CountingHome:
    """A Home whose values are always there, and which counts what it is asked for."""

    name = "layers.0.weight"

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.opens = self.writes = self.warnings = self.copies = self.switched = 0
        self.gradient: Tensor | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.opens += 1
        yield

    def before_write(self) -> None:
        self.warnings += 1

    def note_write(self) -> None:
        self.writes += 1

    def exported(self) -> Tensor:
        self.copies += 1
        with torch._C.DisableTorchFunctionSubclass():
            return self.param.detach().clone().as_subclass(Tensor)

    shown = exported

    def grad(self) -> Tensor | None:
        return self.gradient

    def set_grad(self, grad: Tensor | None) -> None:
        self.gradient = grad

    def trainable(self) -> None:
        self.switched += 1

    @property
    def fetches(self) -> int:
        return self.opens + self.copies


@pytest.fixture
def param() -> nn.Parameter:
    """A guarded parameter of shape (3, 4)."""
    value = nn.Parameter(torch.arange(12.0).reshape(3, 4))
    value.__dict__[ATTRIBUTE] = CountingHome(value)
    guard(value)
    return value


def counted(param: nn.Parameter) -> CountingHome:
    home = home_of(param)
    assert isinstance(home, CountingHome)
    return home


METADATA: dict[str, Callable[[nn.Parameter], object]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0)),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "ndim": lambda p: (p.ndim, p.dim()),
    "numel": lambda p: (p.numel(), torch.numel(p), p.nelement()),
    "len": lambda p: len(p),
    "stride": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset()),
    "sizes in bytes": lambda p: (p.nbytes, p.itemsize, p.element_size()),
    "requires_grad": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn),
    "kinds": lambda p: (p.is_cuda, p.is_sparse, p.is_meta, p.is_quantized, p.is_floating_point(), p.is_complex()),
    "torch kinds": lambda p: (torch.is_floating_point(p), torch.is_tensor(p), isinstance(p, nn.Parameter)),
    "version": lambda p: p._version,
    "hash and identity": lambda p: (hash(p), p is p, {p: 1}),
    "hook": lambda p: p.register_hook(lambda grad: grad).remove(),
    "in a module": lambda p: setattr(nn.Linear(4, 3), "weight", p),
}


@pytest.mark.parametrize("ask", METADATA.values(), ids=METADATA)
def test_metadata_is_real_and_fetches_nothing(param: nn.Parameter, ask: Callable[[nn.Parameter], object]) -> None:
    got = ask(param)
    assert counted(param).fetches == 0
    if ask not in (METADATA["hash and identity"], METADATA["hook"], METADATA["version"]):
        assert got == ask(nn.Parameter(torch.arange(12.0).reshape(3, 4)))


VALUES: dict[str, Callable[[nn.Parameter], object]] = {
    "item": lambda p: p[0, 1].item(),
    "sum": lambda p: p.sum().item(),
    "matmul": lambda p: (p @ torch.ones(4)).tolist(),
    "function": lambda p: nn.functional.linear(torch.ones(2, 4), p).tolist(),
    "list of": lambda p: torch.cat([p, p]).tolist(),
    "keyword": lambda p: torch.mul(input=p, other=2).tolist(),
    "numpy": lambda p: p.detach().numpy().tolist(),
    "equal": lambda p: torch.equal(p, torch.arange(12.0).reshape(3, 4)),
    "tolist": lambda p: p.tolist(),
    "clone": lambda p: p.clone().tolist(),
}


@pytest.mark.parametrize("ask", VALUES.values(), ids=VALUES)
def test_values_are_fetched_and_are_those_of_a_plain_parameter(
    param: nn.Parameter, ask: Callable[[nn.Parameter], object]
) -> None:
    assert ask(param) == ask(nn.Parameter(torch.arange(12.0).reshape(3, 4)))
    assert counted(param).fetches > 0
    assert counted(param).writes == 0


def test_printing_shows_the_values_and_fetches_them(param: nn.Parameter) -> None:
    assert repr(param) == repr(nn.Parameter(torch.arange(12.0).reshape(3, 4)))
    assert counted(param).fetches > 0


@pytest.mark.parametrize("edit", [lambda p: p.add_(1), lambda p: p[1].zero_(), lambda p: nn.init.ones_(p)])
def test_an_edit_in_place_is_noticed_and_keeps_the_parameter_guarded(
    param: nn.Parameter, edit: Callable[[nn.Parameter], object]
) -> None:
    with torch.no_grad():
        edit(param)
    home = counted(param)
    assert home.opens > 0
    assert type(param) is GuardedParameter
    plain = nn.Parameter(torch.arange(12.0).reshape(3, 4))
    with torch.no_grad():
        edit(plain)
    assert torch.equal(home.exported(), plain)


def test_a_write_is_noted_once_and_a_read_never(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(2)
        param.sum()
        torch.add(param, 1)
    assert counted(param).writes == 1


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "a method in place": lambda p: p.mul_(2),
    "an operator in place": lambda p: p.__iadd__(1),
    "an assignment of elements": lambda p: p.__setitem__(0, 1.0),
    "out=": lambda p: torch.add(p, 1, out=p),
    "init": lambda p: nn.init.normal_(p),
    "a list": lambda p: torch._foreach_mul_([p], 2.0),
    "data, which no version counter watches": lambda p: p.data,
}
READS: list[Callable[[nn.Parameter], object]] = [lambda p: p.sum(), lambda p: p + 1, lambda p: p[0], lambda p: p.T]


def test_what_may_write_is_told_of_before_and_what_reads_is_not(param: nn.Parameter) -> None:
    with torch.no_grad():
        for read in READS:
            read(param)
        assert counted(param).warnings == 0
        for number, write in enumerate(WRITES.values(), 1):
            write(param)
            assert counted(param).warnings == number


REFUSED: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda p: setattr(p, "data", torch.zeros(3, 4)),
    "set_": lambda p: p.set_(torch.zeros(3, 4)),
    "storage": lambda p: p.untyped_storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "resize_": lambda p: p.resize_(2, 2),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_would_part_a_parameter_from_its_group_is_refused_by_name(
    param: nn.Parameter, call: Callable[[nn.Parameter], object]
) -> None:
    with torch.no_grad(), pytest.raises(UsageError, match=r"'layers\.0\.weight'.*tiered\.(gather|close)"):
        call(param)
    assert counted(param).fetches == 0


def test_the_gradient_is_the_homes(param: nn.Parameter) -> None:
    assert param.grad is None
    gradient = torch.ones(3, 4)
    param.grad = gradient
    assert param.grad is gradient
    assert counted(param).gradient is gradient
    del param.grad
    assert counted(param).gradient is None
    assert counted(param).fetches == 0


def test_switching_requires_grad_tells_the_home_and_fetches_nothing(param: nn.Parameter) -> None:
    param.requires_grad_(False)
    assert not param.requires_grad
    param.requires_grad = True
    assert param.requires_grad
    assert (counted(param).switched, counted(param).fetches) == (2, 0)


def test_guarding_keeps_the_object_and_unguarding_makes_it_plain(param: nn.Parameter) -> None:
    assert is_sharded(param)
    same = param
    unguard(param)
    assert type(param) is nn.Parameter
    assert same is param
    assert is_sharded(param)
    param.sum()
    assert counted(param).fetches == 0, "the guard costs nothing while it is off"


def test_a_parameter_that_is_not_sharded_is_named_so() -> None:
    plain = nn.Parameter(torch.ones(1))
    assert not is_sharded(plain)
    assert not is_sharded(torch.ones(1))
    with pytest.raises(UsageError, match="not sharded"):
        home_of(plain)

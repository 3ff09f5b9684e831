"""The guard: what an nn.Parameter is while its values are away.

The user's Parameter objects stay in the module for life. While one is away its class is `GuardedParameter`, whose
`__torch_function__` brings the values in for the operation that touches them; while its module computes it is a
`PresentParameter`, which every operation takes for a plain Parameter, at no cost, and which only answers `.grad` and
notices `.data`. Shapes, dtypes, ties and `requires_grad` are the real ones at all times.

Invariants:
1. Metadata never fetches. Anything else fetches, or raises a named error: nothing that is away computes, prints or
   saves as something else.
2. An operation that writes to a parameter (in place, under no_grad) is noticed and reaches every copy.
3. `p.grad` shows the accumulated gradient wherever it lives, accepts one, and drops it on None.
Leaves to whom: where values and gradients are is the `Home`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from tiered.errors import UsageError
from tiered.zero.compiled import compiling, uncompiled

ATTRIBUTE = "_tiered"  # the one name put on a user's parameter: its Home
_DATA: Any = Tensor.data


class Home(Protocol):
    """Where one parameter's values and gradient are kept."""

    name: str

    def opened(self) -> Any:
        """A context manager: inside, the values are present."""

    def before_write(self) -> None:
        """An operation may be going to change the values in place."""

    def note_write(self) -> None:
        """An operation has changed the values in place."""

    def overwrite(self, value: Tensor) -> bool:
        """Take `value` (of the parameter's shape) for its values without bringing them in; False where it cannot."""

    def exported(self) -> Tensor:
        """A full copy of the values in memory of its own, in full precision; with several ranks they all ask for it."""

    def shown(self) -> Tensor:
        """A copy of the values as they compute, on the host; one rank alone may ask for it."""

    def grad(self) -> Tensor | None:
        """The accumulated gradient, or None."""

    def set_grad(self, grad: Tensor | None) -> None:
        """Replace the accumulated gradient, or drop it."""

    def trainable(self) -> None:
        """`requires_grad` may have been switched on."""


def _named(names: str) -> set[Any]:
    """The getters, or methods, of Tensor by these names, as `__torch_function__` sees them."""
    found = (getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name))
    return {f if callable(f) else f.__get__ for f in found}


_METADATA: set[Any] = {torch.is_floating_point, torch.is_complex, torch.numel} | _named(
    "shape dtype device layout ndim requires_grad is_leaf grad_fn itemsize nbytes output_nr retains_grad name _version "
    "_base _backward_hooks is_cuda is_cpu is_sparse is_quantized is_meta is_mps is_xpu is_nested is_mkldnn "
    "is_sparse_csr is_xla is_ipu is_vulkan is_maia is_mtia size dim numel nelement stride storage_offset is_contiguous "
    "element_size is_floating_point is_complex ndimension is_signed is_inference get_device register_hook is_shared "
    "__len__ is_conj register_post_accumulate_grad_hook is_neg retain_grad data_ptr dim_order"
)
_REQUIRES_GRAD: set[Any] = {Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
_REFUSED: dict[Any, str] = {
    Tensor.data.__set__: "assigning .data",  # type: ignore[attr-defined]
    Tensor.resize_: "resize_()",
    Tensor.untyped_storage: "taking the storage (torch.export does, and torch.compile outside its module's forward)",
    Tensor.storage: "taking the storage",
    Tensor.share_memory_: "share_memory_()",
}


class PresentParameter(nn.Parameter):
    """A Parameter whose values are present for its module's forward, or inside `gather`."""

    @property
    @uncompiled
    def grad(self) -> Tensor | None:
        if compiling():
            return None  # a compiler describes the tensor; it takes no gradient, and this one may be on another device
        return home_of(self).grad()

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        home_of(self).set_grad(grad)

    @grad.deleter
    def grad(self) -> None:
        home_of(self).set_grad(None)

    @property
    def data(self) -> Tensor:
        home_of(self).before_write()
        home_of(self).note_write()  # an edit through it would not raise the version
        data: Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        _refuse(self, "assigning .data")


class GuardedParameter(nn.Parameter):
    """A Parameter whose values are away; see the file's contract."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        guarded = list(_guarded(args)) + list(_guarded(tuple(kwargs.values())))
        if func in _REQUIRES_GRAD:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            home_of(args[0]).trainable()
            return result
        if func in _REFUSED:
            _refuse(guarded[0], _REFUSED[func])
        if func is torch.autograd.grad:  # takes parameters by identity: their values need not be here
            return func(*_as_edges(args), **dict(zip(kwargs, _as_edges(tuple(kwargs.values())), strict=True)))
        if func is Tensor.copy_ and _overwritten(args):
            return args[0]
        return _fault(func, args, kwargs, guarded)

    def set_(self, *_: Any, **__: Any) -> NoReturn:  # torch asks no __torch_function__ for this one
        _refuse(self, "set_()")

    def as_subclass(self, *_: Any, **__: Any) -> NoReturn:  # nor for this one
        _refuse(self, "as_subclass()")

    grad = PresentParameter.grad

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes a keyword of its own printing code
        return repr(nn.Parameter(home_of(self).shown(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = nn.Parameter(home_of(self).exported(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole: Any = nn.Parameter(home_of(self).exported(), self.requires_grad)
        return whole.__reduce_ex__(protocol)


def home_of(param: Tensor) -> Home:
    """The Home of a sharded parameter. Raises UsageError for any other tensor."""
    home: Home | None = param.__dict__.get(ATTRIBUTE)
    if home is None:
        raise UsageError("this parameter is not sharded: call tiered.shard(model, config) on its model first")
    return home


def is_sharded(param: object) -> bool:
    """True for a parameter that a sharded model owns."""
    return isinstance(param, nn.Parameter) and ATTRIBUTE in param.__dict__


def guard(param: nn.Parameter) -> None:
    """The values are away, or may go."""
    param.__class__ = GuardedParameter


def present(param: nn.Parameter) -> None:
    """The values are present and stay until the next `guard`."""
    param.__class__ = PresentParameter


def unguard(param: nn.Parameter) -> None:
    """The parameter is an ordinary one again."""
    param.__class__ = nn.Parameter


def _refuse(param: nn.Parameter, what: str) -> NoReturn:
    raise UsageError(
        f"{what} of the sharded parameter '{home_of(param).name}' is not supported: use or edit its values inside "
        f"`with tiered.gather(parameter, modify=True)`, or call tiered.close(model) first"
    )


def _as_edges(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values` with each guarded parameter replaced by its place in the graph; looks into lists and tuples."""

    def edge(value: Any) -> Any:
        if isinstance(value, GuardedParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return torch.autograd.graph.get_gradient_edge(value)
        return type(value)(map(edge, value)) if type(value) in (list, tuple) else value

    return tuple(map(edge, values))


def _guarded(values: Any) -> Iterator[nn.Parameter]:
    """The parameters among `values` that are away, or could go while the others come: those under construction."""
    for value in values:
        if isinstance(value, GuardedParameter) or (type(value) is nn.Parameter and ATTRIBUTE in value.__dict__):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(value)
        elif isinstance(value, dict):
            yield from _guarded(value.values())


def _overwritten(args: tuple[Any, ...]) -> bool:
    """`param.copy_(tensor)`, as loading does for every parameter, has been done without the old values."""
    if torch.is_grad_enabled() or len(args) < 2 or not isinstance(args[0], GuardedParameter):
        return False
    param, value = args[0], args[1]
    if type(value) not in (Tensor, nn.Parameter) or value.shape != param.shape:
        return False
    if not home_of(param).overwrite(value):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(param)
    return True


def _fault(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], guarded: list[Any]) -> Any:
    """Bring in what `func` touches, run it, and note what it wrote."""
    homes = {id(p): (p, home_of(p)) for p in guarded}
    with ExitStack() as opened, torch._C.DisableTorchFunctionSubclass():
        for _, home in homes.values():
            opened.enter_context(home.opened())
            if _writes(func, kwargs):
                home.before_write()
        versions = [p._version for p, _ in homes.values()]
        result = func(*args, **kwargs)
        for (param, home), version in zip(homes.values(), versions, strict=True):
            if param._version != version:
                home.note_write()
    return result


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """By its name in torch, `func` changes what it is given, or gives out what no version counter watches."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE or "out" in kwargs or func == _DATA.__get__

"""How a call of one of torch's operations can be made late: seen from its schema, and from a rehearsal on zeros.

Invariants:
1. A rehearsal reads no value of the call's own tensors and draws no random numbers.
2. A plan holds for every call of the same operation with the same geometry (dtypes, sizes, strides), the same arguments
   that are no tensors, and the same grad mode; `Plans` makes it once.
Leaves to `deferred` what is done with a plan.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

aten = torch.ops.aten


Form = tuple[int, tuple[str, ...], tuple[int, ...]]
"""How arguments are flattened: how many are positional, the names of the others, each one's length if it is a list."""


def flattened(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Form]:
    """The arguments of a call, lists opened, one level of them: no operation takes more."""
    leaves: list[Any] = []
    lengths = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            leaves.extend(value)
            lengths.append(len(value))
        else:
            leaves.append(value)
            lengths.append(-1)
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def rebuilt(leaves: list[Any], form: Form) -> tuple[list[Any], dict[str, Any]]:
    """Undo `flattened`."""
    positional, names, lengths = form
    values = []
    at = 0
    for length in lengths:
        values.append(leaves[at] if length < 0 else leaves[at : at + length])
        at += 1 if length < 0 else length
    return values[:positional], dict(zip(names, values[positional:], strict=True))


class Way(enum.Enum):
    """How an operation on device memory is done."""

    VIEW = "now, without waiting: it touches no values"
    AT_ONCE = "now, when the queue is empty"
    LATER = "queued"


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """One output that is new memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How to do one kind of call; `outputs` are its results in order, of the structure `structure`.

    An output is `Made`, the position of the argument that is returned, or None.
    """

    way: Way
    outputs: tuple[Made | int | None, ...] = ()
    structure: TreeSpec | None = None


NOW = Plan(Way.AT_ONCE)
VIEW = Plan(Way.VIEW)


class Plans:
    """The plan of each call, made when it first comes; below autograd, where a rehearsal leaves no graph."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def of(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], form: Form) -> Plan:
        """`leaves` and `form`: (args, kwargs), flattened."""
        schema = func._schema
        if torch.Tag.inplace_view in func.tags and func.overloadpacket is not aten.resize_:
            return VIEW
        if schema.returns and not schema.is_mutable and all(r.alias_info is not None for r in schema.returns):
            return VIEW
        if func.namespace != "aten" or not all(plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            return NOW
        if _draws(func, args, kwargs) or _reads(func, args):
            return NOW
        # what backward needs is an output of some, so the grad mode counts
        key = (func, torch.is_grad_enabled(), form, *map(_geometry, leaves))
        try:
            plan = self._plans.get(key)
        except TypeError:  # an argument that has no hash: what it does cannot be known again
            return NOW
        if plan is None:
            plan = self._plans[key] = _rehearsed(func, leaves, form)
        return plan


def _overlapping(tensor: Tensor) -> bool:
    """Has gaps or repeats elements, so a copy does not make the same memory."""
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor) if tensor.dim() else False


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Uses the random generator; attention without dropout says it may and does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(kwargs.get("dropout_p", args[place] if place < len(args) else 0.0))


def _reads(func: Any, args: Any) -> bool:
    """Returns what depends on values in shape or is no tensor, so that the host must wait."""
    tags = func.tags
    if func is aten.index.Tensor:  # only a mask is counted
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return True
    return not all("Tensor" in str(returned.type) for returned in func._schema.returns)


def _rehearsed(func: Any, leaves: list[Any], form: Form) -> Plan:
    """Run `func` on zeros of the geometry of its tensors, and see what it returns."""
    dummies = [_zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [dummy for dummy in dummies if isinstance(dummy, Tensor)]
    before = [(t.size(), t.stride(), t.untyped_storage().nbytes()) for t in tensors]
    args, kwargs = rebuilt(dummies, form)
    try:
        result = func(*args, **kwargs)
    except Exception:  # the real call will say the same, or can do what zeros cannot
        return NOW
    if before != [(t.size(), t.stride(), t.untyped_storage().nbytes()) for t in tensors]:
        return NOW
    results, shape = tree_flatten(result)
    memory = {t.untyped_storage()._cdata for t in tensors}
    outputs: list[Made | int | None] = []
    for value in results:
        same = [position for position, dummy in enumerate(dummies) if dummy is value]
        if value is None or same:
            outputs.append(same[0] if same and value is not None else None)
            continue
        if not plain(value) or _overlapping(value):
            return NOW
        if value.untyped_storage()._cdata in memory:
            return VIEW if not func._schema.is_mutable else NOW
        outputs.append(Made(value.size(), value.stride(), value.dtype))
    made = [value.untyped_storage()._cdata for value, out in zip(results, outputs, strict=True) if type(out) is Made]
    return Plan(Way.LATER, tuple(outputs), shape) if len(set(made)) == len(made) else NOW


def _zeros(tensor: Tensor) -> Tensor:
    dummy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    dummy.untyped_storage().fill_(0)
    return dummy


def plain(value: Any) -> bool:
    """A strided tensor in memory of the CPU, none of torch's wrappers."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_conj()
        and not value.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _geometry(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.size(), leaf.stride()
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # 0.0 and -0.0 are equal, and NaN is not

"""PartedGrad: what `p.grad` is with several ranks, where no rank has all of it.

It is there, or None, as torch means it; it has shape, dtype and device; it can be set to zero, as `zero_grad` does.
Invariant: anything else raises UsageError: nothing computes with values that are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from tiered.errors import UsageError


class PartedGrad(torch.Tensor):
    """See the file's contract."""

    _name: str
    _clear: Callable[[], None]

    @staticmethod
    def __new__(
        cls: type[PartedGrad],
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        clear: Callable[[], None],
    ) -> PartedGrad:
        """`name`: of its group; `clear`: sets the gradient to zero."""
        make: Any = torch.Tensor._make_wrapper_subclass  # torch's stubs lack it
        made: PartedGrad = make(cls, torch.Size(shape), dtype=dtype, device=device)
        made._name, made._clear = name, clear
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the function
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default:
            args[0]._clear()
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        _refuse(next(_parted((*args, *(kwargs or {}).values())), None))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes a keyword of its own printing code
        return f"PartedGrad(of group '{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def _read(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self)

    # what torch does without asking __torch_dispatch__
    __deepcopy__ = __dlpack__ = __array__ = numpy = tolist = item = data_ptr = untyped_storage = storage = _read

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self)


def _parted(values: Any) -> Iterator[PartedGrad]:
    for value in values:
        if isinstance(value, PartedGrad):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parted(value)


def _refuse(grad: PartedGrad | None) -> NoReturn:
    whose = f"group '{grad._name}'" if grad is not None else "a sharded model"
    raise UsageError(
        f"reading the gradient of a parameter of {whose}, or changing it, is not supported with several "
        f"ranks, since none has all of it: use AdamW(max_grad_norm=...) to clip and optimizer.grad_norm to look"
    )

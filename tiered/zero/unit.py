"""Units: a module whose forward gathers its groups, computes, and lets them go.

Instead of hooks that find tensors in inputs and outputs (and miss them in unusual objects), a unit replaces the
instance's `forward` by a callable that opens a scope: groups present, parameters plain, saved tensors noted. Leaving
the scope, by return or by exception, undoes all of it. Backward needs no hook: what it touches faults in.

Invariants:
1. `restore` leaves the module exactly as it was found.
2. What autocast casts of weights ends with the scope. Its cache would keep a 16-bit copy of every weight until the
   outermost autocast region ends, past any eviction, and hand out old values after a step inside the region.
3. Scopes are never part of a compiled graph; the module's own forward may be (`zero.compiled`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.schedule.trace import Phase
from tiered.zero import compiled, graph
from tiered.zero.group import ParamGroup
from tiered.zero.reducer import Reducer


def refuse_copy(self: object, *memo: object) -> NoReturn:
    """The `__deepcopy__` and `__reduce__` of what drives one module: a copy would drive the original's groups."""
    raise UsageError(
        "a sharded module cannot be copied or pickled: load its state_dict() into a freshly built module instead, or "
        "call tiered.close(model) first"
    )


def current_phase() -> Phase:
    """What a forward that starts now is for. A forward inside backward recomputes a checkpoint."""
    if torch._C._current_graph_task_id() != -1:
        return Phase.BACKWARD
    return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION


class Unit:
    """One module's scope around its forward."""

    def __init__(self, name: str, module: nn.Module, groups: Sequence[ParamGroup]) -> None:
        self.name = name
        self.groups = tuple(groups)
        self.input_dtype: torch.dtype | None = None
        self.input_device: torch.device | None = None  # where tensors given to the module are moved to
        self.reducer: Reducer | None = None  # of several ranks
        self._module = module
        self._had_forward = "forward" in module.__dict__
        self.forward: Callable[..., Any] = module.forward  # the module's own

    @property
    def label(self) -> str:
        """The module's name, for people."""
        return self.name or "the model"

    def install(self) -> None:
        """Replace the module's forward. Raises UsageError for a module that cannot be replaced."""
        if isinstance(self._module, torch.jit.ScriptModule):
            raise UsageError(f"'{self.name}' is a ScriptModule: sharding TorchScript modules is not supported")
        self._module.forward = _ScopedForward(self)

    def restore(self) -> None:
        """Give the module its own forward back."""
        if self._had_forward:
            self._module.forward = self.forward
        else:
            self._module.__dict__.pop("forward", None)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any) -> Any:
        """The module's own forward, inside the scope, and seen by `compiler`.

        Raises UsageError while a CUDA graph is captured, or a tracer records.
        """
        self._check_usable()
        if self.input_dtype is not None or self.input_device is not None:
            args, kwargs = (_mapped(given, self._taken_in) for given in (args, kwargs))
        phase = current_phase()
        with contextlib.ExitStack() as scope:
            if self.reducer is not None:
                indices = [group.index for group in self.groups]
                scope.enter_context(self.reducer.forward(self.label, indices, inside=phase is Phase.BACKWARD))
            for group in self.groups:
                scope.enter_context(group.computing(phase))
            scope.enter_context(graph.saving_notes())
            torch.clear_autocast_cache()
            scope.callback(torch.clear_autocast_cache)
            compiled.resume(compiler)
            try:
                return self.forward(*args, **kwargs)
            finally:
                compiled.pause()

    def _taken_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor given to the module, where and as its forward takes it."""
        if self.input_device is not None and tensor.device.type == "cpu":
            tensor = tensor.to(self.input_device, non_blocking=True)
        if self.input_dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.input_dtype)
        return tensor

    def _check_usable(self) -> None:
        compiled.refuse_tracing(self.label)
        if self.groups:
            self.groups[0].runtime.device.check_usable()  # of one model: one device


class _ScopedForward:
    """The `forward` of a unit's module; refuses to be copied, since a copy would drive the original's groups."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        functools.update_wrapper(self, unit.forward)  # the signature is the module's own

    @compiled.boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = compiled.pause()
        try:
            return self._unit.run(args, kwargs, compiler)
        finally:
            compiled.resume(compiler)

    @property
    def __code__(self) -> Any:
        return inspect.unwrap(self._unit.forward).__code__  # read for the names of arguments

    @property
    def __globals__(self) -> NoReturn:  # read for what its source names
        raise compiled.not_traceable(self._unit.label)

    __deepcopy__ = refuse_copy
    __reduce__ = refuse_copy


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors changed; looks into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    return value

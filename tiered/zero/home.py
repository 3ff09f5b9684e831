"""ParamHome: one sharded parameter as its guard sees it, a slot of its group.

Owns the way from a parameter to its values and gradient. Leaves gathering to the group, accumulation to its gradients.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.zero import graph, truth
from tiered.zero.agreement import Call
from tiered.zero.compiled import refuse_tracing, uncompiled
from tiered.zero.grads import GroupGrads
from tiered.zero.group import ParamGroup
from tiered.zero.partition import Slot
from tiered.zero.unit import current_phase

if TYPE_CHECKING:
    from tiered.zero.model import ShardedModel

_GRAD: Any = torch.Tensor.grad  # the slot autograd writes to, under the guard's property


class ParamHome:
    """See `guard.Home`."""

    def __init__(self, name: str, group: ParamGroup, position: int, dtype: torch.dtype, model: ShardedModel) -> None:
        self.name = name
        self.group = group
        self.position = position
        self.dtype = dtype  # the parameter's own, before any precision policy: what state_dict() gives
        self.grads: GroupGrads = model.grads[group.index]
        self.model = model
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._last_export: tuple[weakref.ref[torch.Tensor], str] | None = None  # under which key

    @property
    def param(self) -> nn.Parameter:
        """The user's own Parameter object."""
        return self.group.params[self.position]

    @property
    def slot(self) -> Slot:
        """Its place in the group's flat tensor."""
        return self.group.spec.slots[self.position]

    # --- what the guard asks ---

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        refuse_tracing(self.name)
        with self.group.opened(current_phase()), graph.saving_notes(beside_others=False):
            torch.clear_autocast_cache()  # a cast made before a step would be handed out after it
            yield

    def before_write(self) -> None:
        self.group.before_write()

    def note_write(self) -> None:
        self.group.note_write()

    def overwrite(self, value: torch.Tensor) -> bool:
        group = self.group
        if group.present:
            return False
        group.runtime.store.before_change()
        doing = f"an edit of parameters of group '{group.name}' in place"
        write = functools.partial(truth.overwrite, group, self.slot, value)
        group.runtime.together(Call.EDIT, doing, write, detail=group.index)
        return True

    def exported(self) -> torch.Tensor:
        self.group.absorb()
        kind = "master" if "master" in self.group.blocks and self.dtype == torch.float32 else "param"
        return truth.values(self.group, self.slot, kind, self.name).to(self.dtype)

    def shown(self) -> torch.Tensor:
        with self.opened(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self.group.runtime.device.to_host(self.param.detach()).clone()

    def grad(self) -> torch.Tensor | None:
        self.grads.drain()
        return self.grads.view(self.position)

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None and (not isinstance(grad, torch.Tensor) or grad.layout is not torch.strided):
            got = f"a {grad.layout} tensor" if isinstance(grad, torch.Tensor) else f"{grad!r}"
            raise UsageError(f"gradient for '{self.name}' is {got}, expected a strided tensor, or None")
        if grad is not None and grad.shape != self.slot.shape:
            raise UsageError(
                f"gradient for '{self.name}' has shape {tuple(grad.shape)}, expected {tuple(self.slot.shape)}"
            )
        if grad is not None and grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"gradient for '{self.name}' is {grad.dtype}, expected {self.grads.dtype}")
        if grad is not None:
            self.model.start_training(self.group)
        self._clear_slot()
        self.grads.replace(self.position, grad)

    def clear_grad(self, set_to_none: bool) -> None:
        """Drop the gradient, or set it to zero if there is one."""
        self._clear_slot()
        if set_to_none:
            self.grads.replace(self.position, None)
        else:
            self.grads.zero(self.position)

    def trainable(self) -> None:
        """Watch for gradients from now on, where the parameter requires them."""
        if self._hook is None and self.param.requires_grad:
            self.model.start_training(self.group)
            with torch._C.DisableTorchFunctionSubclass():
                register: Any = self.param.register_post_accumulate_grad_hook
                self._hook = register(_arrival(weakref.ref(self)))

    # --- the state dict ---

    def state(self, destination: Mapping[str, Any], key: str) -> torch.Tensor:
        """The full value for `destination[key]`; a tied parameter under two names is one tensor there, as in torch."""
        if self._last_export is not None:
            earlier, there = self._last_export[0](), destination.get(self._last_export[1])
            if earlier is not None and there is not None and there is earlier:
                return earlier
        tensor = self.exported()
        self._last_export = (weakref.ref(tensor), key)
        return tensor

    def load_master(self, value: torch.Tensor) -> None:
        """Give the fp32 master the loaded value in full precision; the parameter has its rounded form already."""
        self.group.absorb()
        if "master" in self.group.blocks:
            truth.set_values(self.group, self.slot, "master", value)

    def release(self) -> None:
        """Stop watching for gradients."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # --- inside ---

    def _clear_slot(self) -> None:
        """Empty autograd's own slot: a backward that did not finish may have left a gradient there."""
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.param, None)

    def arrive(self, param: torch.Tensor) -> None:
        """Take the gradient that backward has finished out of autograd's slot."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = _GRAD.__get__(param)
            _GRAD.__set__(param, None)
        if grad is not None:
            if self.model.reducer is not None:
                self.model.reducer.inside_backward()
            self.grads.arrive(self.position, grad)


def _arrival(home: weakref.ref[ParamHome]) -> Callable[[torch.Tensor], None]:
    """The hook on a parameter; weak, since autograd holds it where the garbage collector cannot see."""

    @uncompiled
    def arrived(param: torch.Tensor) -> None:
        if (owner := home()) is not None:
            owner.arrive(param)

    return arrived


class GoneHome:
    """Home of a parameter whose values went with `tiered.close(model, keep_weights=False)`: it says so."""

    def __init__(self, name: str) -> None:
        self.name = name

    def opened(self) -> NoReturn:
        self._raise()

    def before_write(self) -> None:
        return None

    def note_write(self) -> None:
        return None

    def overwrite(self, value: torch.Tensor) -> bool:
        return False

    def exported(self) -> NoReturn:
        self._raise()

    def shown(self) -> NoReturn:
        self._raise()

    def grad(self) -> None:
        return None

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._raise()

    def trainable(self) -> None:
        return None

    def _raise(self) -> NoReturn:
        raise UsageError(
            f"the values of '{self.name}' are gone: the model was closed with keep_weights=False, and its module now "
            f"holds a parameter on the meta device"
        )

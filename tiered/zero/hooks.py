"""Which saved-tensor hooks are on top: from torch 2.8 on it says so; before that they are followed as they come and go.

Following puts this file's functions in the place of the two that torch's context manager calls. They call torch's own,
whatever else happens, so that what hooks do is never changed.

Invariant: a thread's list is that of the hooks entered in it since this file was imported. Those that a thread of
autograd's takes over from the thread that called backward are not in it: they are passed over, not called twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiered.zero.compiled import uncompiled

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs, and what unpacks."""


def follow(autograd: Any) -> Callable[[bool], Hooks | None]:
    """What answers as torch's `_top_saved_tensors_default_hooks`; `autograd` has the functions it follows."""
    push, pop = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
    entered = _Entered()

    @uncompiled
    def pushed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        push(pack, unpack)  # raises where hooks are disabled
        entered.hooks.append((pack, unpack))

    @uncompiled
    def popped() -> None:
        if entered.hooks:  # else they came before this file
            entered.hooks.pop()
        pop()

    autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks = pushed, popped
    return lambda ignore_is_tracing: entered.hooks[-1] if entered.hooks else None


class _Entered(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_autograd: Any = torch._C._autograd
_top: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None) or follow(_autograd)


def top() -> Hooks | None:
    """The hooks that the next saved tensor goes to, or would if nothing were traced; None without any."""
    found: Hooks | None = _top(True)
    return found

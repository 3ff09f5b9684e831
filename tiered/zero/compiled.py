"""Sharded modules and torch's compilers: they see what a module computes, never what brings its parameters in.

torch.compile evaluates Python frames through dynamo, which traces every function it meets. The functions of this
package that torch or a compiled function calls are marked, so that dynamo neither traces them nor what they call; only
a module's own forward, inside its scope, is given back to it. So a graph ends where a scope begins, and each unit's
forward is compiled with its parameters present, in whatever order `torch.compile` and `shard` came.

Invariants:
1. Importing this file does not import dynamo (70 MiB and a second): the marks are set in torch's own C part.
2. A tracer that would record the memory of parameters, rather than guard what it assumes of them, is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext

from tiered.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

resume: Callable[[Any], Any] = eval_frame.set_eval_frame
"""Let a compiler (what `pause` returned) see what is called from now on. Called from a `boundary`, as is `pause`; both
are torch's own C function, since a compiler would trace one of Python's."""
pause: Callable[[], Any] = functools.partial(resume, None)
"""Compile nothing that is called from now on, in this thread; returns the compiler that was active, or None."""

_REASON = (
    "the parameters of a sharded module come and go around its forward, so no graph reaches across it: compile its "
    "blocks one by one (block.compile()), or without fullgraph=True"
)
_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def uncompiled(function: F) -> F:
    """Marks a function: neither it nor what it calls is compiled, and a graph that meets it ends."""
    return _marked(function, eval_frame._FrameAction.SKIP)


def boundary(function: F) -> F:
    """As `uncompiled`, but what it calls may be compiled: see `pause`."""
    return _marked(function, eval_frame._FrameAction.DEFAULT)


def compiling() -> bool:
    """A compiler asks, not a computation: it describes tensors, and takes none of their values."""
    return TracingContext.try_get() is not None


def refuse_tracing(name: str) -> None:
    """Raise UsageError where a tracer records what `name` computes: it would keep memory that moves, or none."""
    tracing = torch._C._get_tracing_state() is not None
    if not tracing and torch._C._len_torch_dispatch_stack():
        tracing = any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)
    if tracing:
        raise not_traceable(name)


def not_traceable(name: str) -> UsageError:
    """The refusal of what would keep the memory of `name`'s parameters."""
    return UsageError(
        f"'{name}' is sharded and cannot be traced (torch.export, torch.jit, make_fx, fake tensors): load its "
        f"state_dict() into a plain module and trace that, or call tiered.close(model) first. torch.compile works"
    )


def _marked(function: F, callees: Any) -> F:
    """Dynamo asks the code object when it evaluates a frame, and the attributes (as torch.compiler.disable sets them)
    when it meets the function while it traces another."""
    marked: Any = function
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, callees)
    eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return function

"""The hooks on top as they are followed where torch does not tell them: what torch tells, where it does."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from tiered.zero import hooks

Top = Callable[[bool], "hooks.Hooks | None"]


@pytest.fixture
def top() -> Iterator[Top]:
    """Followed from here on, whatever torch tells; checked against what it tells."""
    with pytest.MonkeyPatch.context() as patched:
        autograd: Any = torch._C._autograd
        for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
            patched.setattr(autograd, name, getattr(autograd, name))  # put back at the end
        followed = hooks.follow(autograd)

        def checked(ignore_is_tracing: bool) -> hooks.Hooks | None:
            found = followed(ignore_is_tracing)
            assert found == hooks.top()
            return found

        yield checked


def pair(name: str) -> hooks.Hooks:
    return lambda tensor: (name, tensor), lambda packed: packed[1]


def test_the_innermost_hooks_are_on_top_and_go_when_their_scope_ends(top: Top) -> None:
    outer, inner = pair("outer"), pair("inner")
    assert top(True) is None
    with saved_tensors_hooks(*outer):
        assert top(True) == outer
        with pytest.raises(ValueError, match="half way"), saved_tensors_hooks(*inner):
            assert top(True) == inner
            raise ValueError("half way")
        assert top(True) == outer
    assert top(True) is None


def test_hooks_that_torch_refuses_are_not_on_top(top: Top) -> None:
    with disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(*pair("refused")):
            pass
        assert top(True) is None


def test_hooks_are_those_of_their_thread(top: Top) -> None:
    seen: list[Any] = []
    with saved_tensors_hooks(*pair("mine")):
        other = threading.Thread(target=lambda: seen.append(top(True)))
        other.start()
        other.join()
    assert seen == [None]


def test_hooks_entered_before_they_are_followed_leave_no_trace() -> None:
    autograd: Any = torch._C._autograd
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
            patched.setattr(autograd, name, getattr(autograd, name))
        inner = pair("inner")
        with saved_tensors_hooks(*pair("before")):
            followed = hooks.follow(autograd)
            with saved_tensors_hooks(*inner):
                assert followed(True) == inner
            assert followed(True) is None
        assert followed(True) is None
        assert hooks.top() is None

"""ShardedModule: what the class of a sharded model's root module gains, and the way from the module to its model.

The module keeps its class's name, methods and attributes; `with`, `zero_grad` and refusals by name come on top.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiered.errors import TieredError, UsageError
from tiered.zero.compiled import uncompiled
from tiered.zero.guard import ATTRIBUTE
from tiered.zero.model import MODEL_ATTRIBUTE, ShardedModel
from tiered.zero.unit import refuse_copy


def sharded_model(module: object) -> ShardedModel:
    """The ShardedModel of a module. Raises UsageError for a model that is not sharded."""
    sharded = module.__dict__.get(MODEL_ATTRIBUTE) if isinstance(module, nn.Module) else None
    if not isinstance(sharded, ShardedModel):
        raise UsageError("this model is not sharded: call tiered.shard(model, config) first")
    return sharded


class ShardedModule(nn.Module):
    """What the root module's class gains while it is sharded: `with`, and refusals by name."""

    def __enter__(self) -> ShardedModule:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        model: ShardedModel | None = self.__dict__.get(MODEL_ATTRIBUTE)
        if model is None:
            return
        if kind is not None and (generations := model.runtime.store.generations) is not None:
            generations.left = True  # what ends it may be gone on from
        if kind is not None and model.runtime.traffic is not None:  # the other ranks cannot be waited for
            model.runtime.traffic.exchange.idle(f"close(), after {kind.__name__}: {error}")
            model.close(keep_weights=False)
            return
        try:
            model.close(keep_weights=True)
        except TieredError:
            if kind is None:
                raise
            model.close(keep_weights=False)  # the error on its way out matters more

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.nn.Module.zero_grad, without bringing in the gradients only to drop them."""
        model: ShardedModel | None = self.__dict__.get(MODEL_ATTRIBUTE)
        for home in model.homes if model is not None else ():
            home.clear_grad(set_to_none)
        for param in self.parameters():
            if ATTRIBUTE not in param.__dict__ and param.grad is not None:  # added after the model was sharded
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        raise UsageError(
            "to(), half(), float(), cuda() and the like would replace sharded parameters: choose device and dtype in "
            "tiered.Config, or call tiered.close(model) first"
        )

    __deepcopy__ = refuse_copy
    __reduce_ex__ = refuse_copy


def as_sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` with ShardedModule mixed in; same name, so that it prints as before."""
    return type(cls.__name__, (ShardedModule, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})

"""AdamW over sharded parameters: a torch.optim.Optimizer whose step is the one commit of a training step.

Decoupled weight decay (Loshchilov and Hutter, 2019), exact global-norm clipping, dynamic loss scaling. A step runs in
phases: gradients are complete -> norm -> skip or clip factor -> every chunk is updated -> step counts advance.

Invariants:
1. A non-finite gradient on any rank changes nothing: no weight, moment or step count; it is counted as skipped.
2. Hyperparameters are read from `param_groups` once per step, so schedulers and edits mean what torch's mean.
3. A parameter without a gradient (None) is not touched: no decay, no state, no step.
Leaves to whom: where states live is the store's, overlap of reading and writing is the pipeline's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tiered.device.interrupt import uninterrupted
from tiered.errors import ConfigError, UsageError
from tiered.optim import kernels, pipeline
from tiered.optim.kernels import Segment
from tiered.optim.scaler import LossScaler
from tiered.optim.state import export_state, import_state
from tiered.zero.group import ParamGroup
from tiered.zero.guard import home_of, is_sharded
from tiered.zero.home import ParamHome
from tiered.zero.model import STATE_KINDS, ShardedModel
from tiered.zero.unit import refuse_copy


class AdamW(torch.optim.Optimizer):
    """AdamW for the parameters of one sharded model.

    Args:
        params: parameters or parameter groups, as torch.optim.AdamW takes them; all of one sharded model.
        lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW, with its defaults.
        max_grad_norm: clip the global L2 norm of all gradients to this before the update, as
            torch.nn.utils.clip_grad_norm_ does; None: no clipping.

    Raises ConfigError for a setting out of range, UsageError for parameters that are not sharded.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        if max_grad_norm is not None and not (max_grad_norm > 0 and math.isfinite(max_grad_norm)):
            raise ConfigError(f"max_grad_norm={max_grad_norm!r}: use a positive number, or None for no clipping")
        self.max_grad_norm = max_grad_norm
        self.grad_norm = 0.0
        self.skipped_steps = 0
        self._model: ShardedModel | None = None
        self._homes: dict[int, ParamHome] = {}  # by id of the Parameter
        self._steps: dict[int, int] = {}  # likewise: updates taken
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        policy = self.model.config.precision.param_dtype
        fp16 = policy is torch.float16 or any(g.dtype is torch.float16 for g in self.model.groups)
        self._scaler = LossScaler() if fp16 else None

    # --- what torch's optimizers have ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as torch.optim.Optimizer.add_param_group.

        Raises UsageError for a parameter that is not sharded, or of another model; ConfigError for a setting out of
        range or a parameter given twice. Nothing is added then. (torch's own method would import its compiler: 70 MiB.)
        """
        group = {**self.defaults, **param_group}
        params = group["params"]
        if isinstance(params, set):
            raise UsageError("parameters must be in order: give a list, not a set")
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        if group["params"] and all(isinstance(p, tuple) for p in group["params"]):  # named_parameters()
            group["param_names"] = [name for name, _ in group["params"]]
            group["params"] = [param for _, param in group["params"]]
        _check_hyperparameters(group)
        homes: dict[int, ParamHome] = {}
        for param in group["params"]:
            if not is_sharded(param) or not isinstance(home := home_of(param), ParamHome):
                raise UsageError(
                    "a parameter given to tiered.AdamW is not sharded: call tiered.shard(model, config) first"
                )
            if id(param) in self._homes or id(param) in homes:
                raise ConfigError(f"parameter '{home.name}' appears in more than one parameter group: give it once")
            if self._model not in (None, home.model) or any(h.model is not home.model for h in homes.values()):
                raise UsageError("tiered.AdamW takes the parameters of one sharded model: make one optimizer for each")
            homes[id(param)] = home
        self._homes |= homes
        self._model = next((h.model for h in homes.values()), self._model)
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step, or skip it where a gradient is not finite. Returns what `closure` returned.

        Sets `grad_norm`, the global L2 norm before clipping, over the optimizer's parameters that have a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self._open_model("step()")
        model.drain()
        scale = self._scaler.scale if self._scaler is not None else 1.0
        self.grad_norm = self._norm() / scale
        finite = math.isfinite(self.grad_norm)
        if self._scaler is not None:
            self._scaler.update(finite)
        if not finite:
            self.skipped_steps += 1
            model.runtime.meter.skipped_steps += 1
            return loss
        factor = 1.0
        if self.max_grad_norm is not None:  # torch.nn.utils.clip_grad_norm_'s formula
            factor = min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
        self._update(factor / scale)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or set those there are to zero; as torch.optim.Optimizer.zero_grad."""
        if self.model.closed:
            super().zero_grad(set_to_none)
            return
        for home in self._homes.values():
            home.clear_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's state dict: full fp32 moments and the step of every parameter that has been updated."""
        self._open_model("state_dict()")
        packed = super().state_dict()
        packed["state"] = export_state(self.param_groups, self._homes, self._steps)
        if self._scaler is not None:
            packed["loss_scaler"] = dataclasses.asdict(self._scaler)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take torch.optim.AdamW's state dict. Raises UsageError, before anything changes, where a shape differs."""
        self._open_model("load_state_dict()")
        for given in state_dict["param_groups"]:
            _check_hyperparameters({**self.defaults, **given})
        steps = import_state(self.param_groups, self._homes, state_dict)
        groups = [{**self.defaults, **given} for given in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self._steps = steps
        if self._scaler is not None and "loss_scaler" in state_dict:
            self._scaler = LossScaler(**state_dict["loss_scaler"])

    __deepcopy__ = refuse_copy
    __reduce_ex__ = refuse_copy

    # --- loss scaling ---

    @property
    def loss_scale(self) -> float:
        """The factor `scale_loss` applies now: 1.0 unless parameters compute in fp16."""
        return self._scaler.scale if self._scaler is not None else 1.0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale: call backward on this when parameters compute in fp16."""
        return loss if self._scaler is None else loss.float() * self._scaler.scale

    @property
    def model(self) -> ShardedModel:
        """The sharded model whose parameters this optimizer has."""
        if self._model is None:
            raise UsageError("this optimizer has no sharded parameters")
        return self._model

    # --- inside ---

    def _open_model(self, call: str) -> ShardedModel:
        if self.model.closed:
            raise UsageError(f"{call} after tiered.close(model): gradients and optimizer states are gone")
        if self.model.failure is not None:
            raise UsageError(
                f"{call} after a step that failed half way ({self.model.failure}): build the model again and load "
                f"the last checkpoint"
            ) from self.model.failure
        return self.model

    def _norm(self) -> float:
        """Global L2 norm of the gradients as they are; inf or nan if any is."""
        total = 0.0
        for home in self._homes.values():
            if home.grads.present[home.position]:
                total += home.grads.sum_of_squares(home.position, kernels.sum_of_squares)
        return math.sqrt(total) if (total := self.model.runtime.ranks.sum(total)) >= 0 else math.nan

    def _update(self, grad_scale: float) -> None:
        model = self.model
        steps = dict(self._steps)
        segments: dict[int, list[Segment]] = {}
        touched: list[ParamHome] = []
        for options in self.param_groups:
            for param in options["params"]:
                home = self._homes[id(param)]
                if home.grads.present[home.position]:
                    steps[id(param)] = steps.get(id(param), 0) + 1
                    touched.append(home)
                    segments.setdefault(home.group.index, []).extend(_segment(home, options, steps[id(param)]))
        for found in segments.values():
            found.sort(key=lambda s: s.start)
        work = [(g, _arrays(g, model.grads[g.index].dtype)) for g in model.groups if segments.get(g.index)]

        begun = False

        def update(chunk: pipeline.Chunk, tensors: dict[str, torch.Tensor]) -> None:
            nonlocal begun
            begun = True
            mine = _within(segments[chunk.group.index], chunk.start, chunk.stop)
            for segment in mine:
                if segment.step == 1:  # the moments may be of another optimizer, or of before a load
                    for kind in STATE_KINDS:
                        tensors[kind][segment.start : segment.stop].zero_()
            kernels.adamw(
                mine,
                master=tensors["master"] if "master" in tensors else tensors["param"],
                exp_avg=tensors["exp_avg"],
                exp_avg_sq=tensors["exp_avg_sq"],
                grad=tensors["grad"],
                grad_scale=grad_scale,
                param_out=tensors["param"] if "master" in tensors else None,
            )

        with uninterrupted():  # Ctrl-C waits: a step happens as a whole
            try:
                pipeline.run(model.runtime.store, model.runtime.meter, work, update)
            except BaseException as error:
                model.failure = error if begun else None
                raise
            self._steps = steps
            model.runtime.meter.steps += 1
            model.changed()
            with torch._C.DisableTorchFunctionSubclass():
                for home in touched:
                    torch.autograd.graph.increment_version(home.param)


def _arrays(group: ParamGroup, grad_dtype: torch.dtype) -> list[pipeline.Array]:
    has_master = "master" in group.blocks
    arrays = [pipeline.Array("param", group.dtype, write=True)]
    if has_master:
        arrays.append(pipeline.Array("master", torch.float32, write=True))
    arrays += [pipeline.Array(kind, torch.float32, write=True) for kind in STATE_KINDS]
    return [*arrays, pipeline.Array("grad", grad_dtype, write=False)]


def _segment(home: ParamHome, options: dict[str, Any], step: int) -> list[Segment]:
    """The part of a parameter that this rank owns, in elements of the shard; empty where it owns none."""
    spec, rank = home.group.spec, home.group.runtime.ranks.rank
    start, stop = spec.owned(home.slot, rank)
    base = rank * spec.shard_numel
    if start == stop:
        return []
    return [
        Segment(
            start=start - base,
            stop=stop - base,
            lr=float(options["lr"]),
            beta1=float(options["betas"][0]),
            beta2=float(options["betas"][1]),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            step=step,
            maximize=bool(options["maximize"]),
        )
    ]


def _within(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """`segments` cut to [start, stop), counted from `start`."""
    cut = []
    for s in segments:
        low, high = max(s.start, start), min(s.stop, stop)
        if low < high:
            cut.append(dataclasses.replace(s, start=low - start, stop=high - start))
    return cut


def _check_hyperparameters(group: dict[str, Any]) -> None:
    betas = group["betas"]
    checks = {
        "lr": float(group["lr"]) >= 0,
        "betas": len(betas) == 2 and all(0 <= float(b) < 1 for b in betas),
        "eps": float(group["eps"]) >= 0,
        "weight_decay": float(group["weight_decay"]) >= 0,
    }
    for name, fine in checks.items():
        if not fine:
            wanted = "two numbers in [0, 1)" if name == "betas" else "a number >= 0"
            raise ConfigError(f"{name}={group[name]!r}: use {wanted}")
    for name, fine in (("amsgrad", False), ("decoupled_weight_decay", True)):
        if bool(group.get(name, fine)) is not fine:
            raise ConfigError(f"{name}={group[name]!r}: tiered.AdamW supports {name}={fine}")

"""AdamW over sharded parameters: a torch.optim.Optimizer whose step is the one commit of a training step.

Decoupled weight decay (Loshchilov and Hutter, 2019), exact global-norm clipping, dynamic loss scaling. A step runs in
phases: gradients are complete -> norm -> skip or clip factor -> the update is applied -> step counts advance. What of
an update waits until a group is needed (`lazy`) is decided by then, and becomes what it would have become at once.

    outcome of a step   SETTLED --step, all gradients on the device--> PENDING --settle--> SETTLED

Where every gradient of one rank is resident, the device decides itself whether to clip or skip, and the step returns
without waiting for it. What the host must know of it (norm, skipped or not, step counts, loss scale) is settled when
anything asks, at the latest by the next step. Otherwise the host waits for the device's share of the norm, for nothing
else, and decides for all.

Invariants:
1. A non-finite gradient on any rank changes nothing: no weight, moment or step count; it is counted as skipped.
2. Hyperparameters are read from `param_groups` once per step, so schedulers and edits mean what torch's mean.
3. A parameter without a gradient (None) is not touched: no decay, no state, no step.
4. Step counts, loss scale and counters are read only when the outcome is settled.
Leaves to whom: where states live is the store's, overlap of reading and writing is the pipeline's, arithmetic on the
device is `resident`'s.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tiered.device.interrupt import uninterrupted
from tiered.errors import ConfigError, UsageError
from tiered.optim import hyperparameters, resident, update
from tiered.optim.apply import apply
from tiered.optim.early import EarlyUpdate, expects
from tiered.optim.generation import Progress, payload
from tiered.optim.outcome import Outcome
from tiered.optim.plan import StepPlan, plan_step
from tiered.optim.scaler import LossScaler
from tiered.optim.state import export_state, import_state
from tiered.zero.agreement import Call
from tiered.zero.compiled import uncompiled
from tiered.zero.guard import home_of, is_sharded
from tiered.zero.home import ParamHome
from tiered.zero.model import ShardedModel
from tiered.zero.unit import refuse_copy


class AdamW(torch.optim.Optimizer):
    """AdamW for the parameters of one sharded model.

    Args:
        params: parameters or parameter groups, as torch.optim.AdamW takes them; all of one sharded model.
        lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW, with its defaults.
        max_grad_norm: clip the global L2 norm of all gradients to this before the update, as
            torch.nn.utils.clip_grad_norm_ does; None: no clipping.

    Groups that live on a GPU with all their states are updated there by torch's fused kernel, within rounding of the
    update on the host and not bit-equal to it. Where all do, `step` does not wait for the GPU; reading `grad_norm`,
    `skipped_steps` or `loss_scale` does.
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
        self._calls = 0
        self._grad_norm = 0.0
        self._skipped_steps = 0
        self._model: ShardedModel | None = None
        self._homes: dict[int, ParamHome] = {}  # by id of the Parameter
        self._steps: dict[int, int] = {}  # likewise: updates taken
        self._outcome: Outcome | None = None
        self._factor = 1.0  # by which the last step clipped
        self._pending: StepPlan | None = None  # of the step whose outcome is on its way
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        policy = self.model.config.precision.param_dtype
        fp16 = policy is torch.float16 or any(g.dtype is torch.float16 for g in self.model.groups)
        self._scaler = LossScaler() if fp16 else None
        self.model.on_settle(self._settle)
        self._early = EarlyUpdate(self.model, self, self._homes) if expects(self.model) else None

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
        hyperparameters.check(group)
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
    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step, or skip it where a gradient is not finite. Returns what `closure` returned.

        Sets `grad_norm`, the global L2 norm before clipping, over the optimizer's parameters that have a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self._open_model("step()")
        model.check_left("step()")
        model.begins_step()
        self._settle()
        model.begin_step()
        scale = self._scaler.scale if self._scaler is not None else 1.0
        having = [h for h in self._homes.values() if h.grads.present[h.position]]
        there = [h for h in having if h.group.resident]
        if there and len(there) == len(having) and not model.runtime.several:
            self._step_there(there, scale)
            return loss
        norm = self._norm(having, there) / scale  # from here on, with several ranks, this one's shards are its own
        with model.stepping():
            self._step_here(norm, there, scale)
            if model.lazy is None:
                self.keep()
        return loss

    def _step_here(self, norm: float, there: Sequence[ParamHome], scale: float) -> None:
        """Take or skip a step whose norm the host knows; a part of it may be lazy from then on."""
        model = self.model
        with uninterrupted():  # Ctrl-C waits: a step is counted and happens as a whole, or not at all
            if not self._taken(norm):
                self._stepped(None)
                return
            self._factor = 1.0
            if self.max_grad_norm is not None:  # torch.nn.utils.clip_grad_norm_'s formula
                self._factor = min(1.0, self.max_grad_norm / (self._grad_norm + 1e-6))
            by = self._factor / scale
            plan = plan_step(self.param_groups, self._homes, self._steps)
            known = resident.known_factor(by, model.runtime.device.torch_device) if there else None
            fresh, lazy = apply(model, plan, by, resident.Verdict(known, None), self._early)
            self._commit(plan)
            if lazy is not None:
                lazy.begin(self._keeping())
            self._announce(plan, fresh)
            self._stepped(by)

    def _stepped(self, by: float | None) -> None:
        if self._early is not None:
            self._early.stepped(by)

    def expected_scale(self) -> float | None:
        """What the next step is likely to multiply gradients by; None: nobody knows."""
        scale = self._scaler.scale if self._scaler is not None else 1.0
        return 1.0 / scale if self.max_grad_norm is None or self._factor == 1.0 else None

    @uncompiled
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
        self._settle()
        packed = super().state_dict()
        packed["state"] = export_state(self.param_groups, self._homes, self._steps)
        if self._scaler is not None:
            packed["loss_scaler"] = dataclasses.asdict(self._scaler)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take torch.optim.AdamW's state dict. Raises UsageError, before anything changes, where a shape differs."""
        self._open_model("load_state_dict()")
        self._settle()
        for given in state_dict["param_groups"]:
            hyperparameters.check({**self.defaults, **given})
        self.model.runtime.together(Call.EDIT, "optimizer.load_state_dict()", lambda: None)
        steps = import_state(self.param_groups, self._homes, state_dict)
        groups = [{**self.defaults, **given} for given in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self._steps = steps
        if self._scaler is not None and "loss_scaler" in state_dict:
            self._scaler = LossScaler(**state_dict["loss_scaler"])

    __deepcopy__ = refuse_copy
    __reduce_ex__ = refuse_copy

    # --- what a checkpoint holds besides moments ---

    @property
    def updates(self) -> int:
        """Updates taken of the parameter that has had the most."""
        self._settle()
        return max(self._steps.values(), default=0)

    @property
    def calls(self) -> int:
        """Steps taken or skipped so far, of the run that was gone on from too."""
        self._settle()
        return self._calls

    def keep(self) -> None:
        """Complete the last step, and make what there is now the generation that a killed run is gone on from, where
        all states are on drives. Raises StorageError, and then the generation before is that still."""
        if self.model.lazy is not None:
            self.model.finish_update()  # which ends with that
            return
        with uninterrupted():  # a generation is made as a whole, on the drive and here
            self._keeping()()

    def _keeping(self) -> Callable[[], object]:
        """Makes what the blocks hold, and what there is now beside them, the generation."""
        if self.model.ephemeral is not None:
            return bool
        groups, scaler = self.progress()
        updates = {home.name: count for key, home in self._homes.items() if (count := self._steps.get(key, 0))}
        progress = Progress(self._calls, self._skipped_steps, updates, groups, scaler, self.model.optimizers)
        runtime, told = self.model.runtime, payload(self.model.module, progress, self.model.about)

        def commit() -> None:
            with runtime.meter.span("commit", "commit"):
                runtime.store.commit(told)

        return commit

    def updates_of(self, home: ParamHome) -> int:
        """Updates taken of one parameter; 0 too where it is not this optimizer's."""
        self._settle()
        return self._steps.get(id(home.param), 0)

    def arranged(
        self, groups: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None = None
    ) -> list[Mapping[str, Any] | None]:
        """What of `progress` each group here has: that of the group that its parameters were in, and None where they
        were in several. names: {name there: name here}, where they differ."""
        mine = [[self._homes[id(param)].name for param in group["params"]] for group in self.param_groups]
        return hyperparameters.arranged(mine, groups, names or {})

    def progress(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Hyperparameters of each parameter group, with the names of its "params"; and the loss scaler's, if any."""
        self._settle()
        groups = []
        for group in self.param_groups:
            names = [self._homes[id(param)].name for param in group["params"]]
            groups.append({**hyperparameters.plain(group), "params": names})
        return groups, None if self._scaler is None else dataclasses.asdict(self._scaler)

    def take_up(
        self,
        updates: Mapping[int, int],
        groups: Sequence[Mapping[str, Any] | None] | None,
        scaler: Mapping[str, Any] | None,
        calls: tuple[int, int] | None = None,
    ) -> None:
        """Go on from `updates` (by id of the parameter; the moments are in place), from `progress` where given, the
        hyperparameters of each group here, and from so many `calls` of `step`, beside them those that were skipped."""
        self._settle()
        if calls is not None:
            self._calls, self._skipped_steps = calls
        self._steps = {key: count for key, count in updates.items() if key in self._homes and count}
        for mine, given in zip(self.param_groups, groups or (), strict=False):
            mine.update(hyperparameters.like(mine, given or {}))
        if self._scaler is not None and scaler is not None:
            self._scaler = LossScaler(**scaler)

    # --- loss scaling ---

    @property
    def loss_scale(self) -> float:
        """The factor `scale_loss` applies now: 1.0 unless parameters compute in fp16."""
        self._settle()
        return self._scaler.scale if self._scaler is not None else 1.0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale: call backward on this when parameters compute in fp16."""
        return loss if self._scaler is None else loss.float() * self.loss_scale

    # --- what the last step did; asking waits for the device where it decided by itself ---

    @property
    def grad_norm(self) -> float:
        """Global L2 norm, before clipping, of the gradients of the last step; inf or nan where it was skipped."""
        self._settle()
        return self._grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far for a gradient that was not finite."""
        self._settle()
        return self._skipped_steps

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

    def _norm(self, having: Sequence[ParamHome], there: Sequence[ParamHome]) -> float:
        """Global L2 norm of the gradients as they are, those of `there` on the device; inf or nan if any is."""
        outcome = self._on_its_way(resident.norm_partials(update.gradients_on_device(there))) if there else None
        total = 0.0
        for home in having:
            if not home.group.resident:
                total += home.grads.sum_of_squares(home.position)
        if outcome is not None:  # the device has measured its own meanwhile
            with self.model.runtime.meter.stalled("norm"):
                total += outcome.receive()
        if self.model.reducer is not None:
            total = self.model.reducer.agree(total, self._settings())
        return math.sqrt(total) if total >= 0 else math.nan

    def _settings(self) -> list[str]:
        """What must be the same on every rank for an update to be one, in words."""
        settings = [f"max_grad_norm={self.max_grad_norm}", f"loss scale {self.loss_scale:g}"]
        for group in self.param_groups:
            homes = [self._homes[id(param)] for param in group["params"]]
            whose = [(home.group.index, home.position, self._steps.get(id(home.param), 0)) for home in homes]
            number = zlib.crc32(str(whose).encode())
            settings.append(f"{hyperparameters.described(group)} for {len(homes)} parameters (number {number:08x})")
        return settings

    def _step_there(self, there: Sequence[ParamHome], scale: float) -> None:
        """A step that the device decides on; its outcome is pending then."""
        norm = resident.norm_partials(update.gradients_on_device(there)).sqrt() / scale
        verdict = resident.judge(norm, max_norm=self.max_grad_norm, scale=scale)
        plan = plan_step(self.param_groups, self._homes, self._steps)
        with uninterrupted():
            self._on_its_way(norm)  # before the updates, so that whoever asks does not wait for them
            fresh, _ = apply(self.model, plan, 1.0, verdict, None)
            self._pending = plan
            self._announce(plan, fresh)

    def _on_its_way(self, number: torch.Tensor) -> Outcome:
        if self._outcome is None:
            self._outcome = Outcome(self.model.runtime.device)
        self._outcome.send(number)
        return self._outcome

    def _settle(self) -> None:
        """Wait for the outcome of the last step, if it is pending, and account for it."""
        if self._pending is None or self._outcome is None:
            return
        with self.model.runtime.meter.stalled("norm"):
            self._outcome.settle()  # Ctrl-C may end the wait, and nothing has changed then
        with uninterrupted():
            norm = self._outcome.receive()
            plan, self._pending = self._pending, None
            if self._taken(norm):
                self._commit(plan)

    def _taken(self, norm: float) -> bool:
        """Account for a step's gradient norm; False if the step is skipped."""
        self._calls += 1
        self._grad_norm = norm
        finite = math.isfinite(norm)
        if self._scaler is not None:
            self._scaler.update(finite)
        if not finite:
            self._skipped_steps += 1
            self.model.runtime.meter.skipped_steps += 1
        return finite

    def _commit(self, plan: StepPlan) -> None:
        self._steps = plan.steps
        self.model.runtime.meter.steps += 1

    def _announce(self, plan: StepPlan, fresh: set[int]) -> None:
        """Tell autograd and the model what has changed; `fresh`: groups that have been told of."""
        with torch._C.DisableTorchFunctionSubclass():
            for home in plan.touched:
                torch.autograd.graph.increment_version(home.param)
        self.model.changed(fresh)

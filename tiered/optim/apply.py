"""Apply: what a step that is decided does to every group.

    on the device     groups that live there with all their states (resident)
    on the host, now  groups of which nothing has to be moved; and all, with several ranks
    kept              groups whose update was computed in backward, as it is decided now: see `optim.early`
    lazy              the others, each when it is first needed: see `optim.lazy`

Invariant: what cannot be had, staging and buffers, is asked for before anything is changed.
"""

from __future__ import annotations

import torch

from tiered.optim import pipeline, resident, update
from tiered.optim.crossing import Crossing
from tiered.optim.early import EarlyUpdate, work
from tiered.optim.lazy import LazyUpdate, on_a_drive, waits
from tiered.optim.plan import StepPlan, within
from tiered.optim.slots import Chunk
from tiered.zero.model import ShardedModel


def apply(
    model: ShardedModel, plan: StepPlan, grad_scale: float, verdict: resident.Verdict, early: EarlyUpdate | None
) -> tuple[set[int], LazyUpdate | None]:
    """Update the groups of the plan: on the host with `grad_scale`, on the device as `verdict` says. Returns the index
    of each whose copy on the device has been brought up to date already, and what of it is lazy, not begun yet.

    Raises what reading or writing states raised; then the model has failed, unless nothing had changed.
    """
    groups = [g for g in model.groups if g.index in plan.segments]
    states = {g.index: update.flat_state(g, model.grads[g.index].dtype) for g in groups if g.resident}
    here = [g for g in groups if not g.resident]
    step = model.new_step()
    scratch = resident.scratch_for(list(states.values()), verdict)
    apart = [g for g in here if g.states_apart]
    crossing = Crossing(model.runtime, apart, grad_scale) if apart else None
    begun = False

    def begin() -> None:
        nonlocal begun
        if not begun:  # given to the device first, so that it works beside the CPU
            begun = True
            for index, state in states.items():
                resident.update(plan.segments[index], state, verdict, scratch)

    def change(chunk: Chunk, tensors: dict[str, torch.Tensor]) -> None:
        begin()
        step.alive()
        segments = within(plan.segments[chunk.group.index], chunk.start, chunk.stop)
        with model.runtime.meter.span(f"update {chunk.group.name}", "update"):
            if crossing is not None and chunk.group.states_apart:
                crossing.update(segments, chunk.group, chunk.start, tensors)
            else:
                update.on_host(segments, tensors, grad_scale)

    model.before_step()
    kept, slots = early.keep(plan, grad_scale) if early is not None else ([], None)
    done = {g.index for g in kept}
    here = [g for g in here if g.index not in done]
    lazily = not apart and model.config.overlap not in ("none", "prefetch")
    later = [g for g in here if lazily and waits(g) and not model.grads[g.index].viewed()]
    waiting = {g.index for g in later}
    now = [g for g in here if g.index not in waiting]
    lazy = None
    try:
        if later or slots is not None:  # what has to be moved now goes through the same slots
            shared = [g for g in now if on_a_drive(g)]
            coming = work(model, [*shared, *later])
            if slots is not None and not slots.serves(coming):  # groups have begun to train since
                slots.__exit__()
                slots = None
            lazy = LazyUpdate(model, coming, change, step.updated, kept=kept, slots=slots)
            for group in shared:
                lazy.compute(group)
            now = [g for g in now if not on_a_drive(g)]
        for part in step.parts(now):
            run = pipeline.Run(model.runtime.store, model.runtime.meter, work(model, part), change, step.updated)
            run.finish()
        begin()
        step.finish()
    except BaseException as error:
        if lazy is not None:
            lazy.abandon()
        model.failure = error if begun or kept else None
        raise
    return step.fresh, lazy

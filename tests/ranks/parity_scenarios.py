"""What several ranks do, each a function of `Where` that trains and gives back what it observed.

Owns: the scenarios whose outcome on N ranks must be that of one rank on the joined batch. Invariants:
1. A scenario asks nothing of the process group: the same function, in one process, is the reference.
2. What only some ranks do is chosen by part, so that one process does it for every part.
Leaves to `parity_facts` what has no one-rank counterpart.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from parity.harness import copied
from ranks.parity_models import (
    ADAPTED,
    EVERYTHING,
    EXPERTS,
    LARGE,
    NET,
    ODD,
    WIDTH,
    Case,
    branching,
    gpt,
)
from ranks.parity_run import Session, Where, sharded

import tiered

Observed = dict[str, Any]
STEPS = range(3)


def trained(where: Where, case: Case | Callable[[int], Case], **how: Any) -> Observed:
    """Three whole steps."""
    with sharded(where, case if isinstance(case, Case) else case(where.parts), **how) as session:
        return {**session.train(STEPS), **session.outcome()}


def everything(where: Where) -> Observed:
    """The awkward model, clipped, with one backward in some steps and two in others."""
    with sharded(where, EVERYTHING, max_grad_norm=0.3) as session:
        losses, norms = [], []
        for step in STEPS:
            for micro in range(1 + step % 2):
                losses.append(session.backward(10 * step + micro))
            norms.append(session.step())
        return {"losses": losses, "norms": norms, **session.outcome()}


def skipped(where: Where) -> Observed:
    """An inf that one part's rows alone make: every rank skips that step, and goes on."""
    with sharded(where, NET, max_grad_norm=0.5) as session:
        rows = session.case.rows

        def overflowing(seed: int) -> tuple[torch.Tensor, ...]:
            (x,) = rows(seed)
            x[-1, 0] = torch.inf if seed == 1 else 0  # in the last rank's part
            return (x,)

        session.case = Case(NET.build, overflowing)
        seen = session.train(STEPS)
        assert session.optimizer.skipped_steps == 1
        return {**seen, **session.outcome()}


def part_frozen(where: Where) -> Observed:
    """Whole blocks, and single parameters among trained ones, are frozen; one is thawed after two steps."""
    with sharded(where, gpt(), build=lambda _: _frozen(gpt().build())) as session:
        seen = session.train(range(2))
        session.model.blocks[0].requires_grad_(True)
        later = session.train([2])
        return {**{key: seen[key] + later[key] for key in seen}, **session.outcome()}


def _frozen(model: torch.nn.Module) -> torch.nn.Module:
    model.blocks[0].requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    return model


COUNTS = (2, 1, 3)  # backwards in each step


def accumulated(where: Where, counts: tuple[int, ...], syncs: Callable[[int, int], bool]) -> Observed:
    """`counts` backwards a step; `syncs(micro, count)`: whether one of them may reduce."""
    with sharded(where, NET, max_grad_norm=0.5) as session:
        losses, norms = [], []
        for step, count in enumerate(counts):
            for micro in range(count):
                quiet = contextlib.nullcontext() if syncs(micro, count) else tiered.no_sync(session.model)
                with quiet:
                    losses.append(session.backward(10 * step + micro, share=1 / count))
            norms.append(session.step())
        return {"losses": losses, "norms": norms, **session.outcome()}


def zeroed(where: Where) -> Observed:
    """Gradients are set to zero rather than dropped, those of a part in a way of its own: what is unused from then on
    decays, and has moments."""
    with sharded(where, branching(where.parts)) as session:
        losses, norms = [], []
        for step in STEPS:
            losses.append(session.backward(step))
            norms.append(session.step(set_to_none=False))
            losses.append(session.backward(10 + step))
            session.model.blocks.zero_grad(set_to_none=False)
            for p in session.model.head.parameters():
                p.grad.zero_()
            session.optimizer.zero_grad(set_to_none=False)
        return {"losses": losses, "norms": norms, **session.outcome()}


def dropped(where: Where) -> Observed:
    """Gradients are dropped before a step, reduced or not, in part or all of them; a step has none at all."""
    with sharded(where, NET) as session:
        losses, norms = [], []
        for step, quiet in enumerate((False, True, False, True)):
            with tiered.no_sync(session.model) if quiet else contextlib.nullcontext():
                losses.append(session.backward(10 + step))
            if step % 2:
                session.model.zero_grad()
            for p in session.model.blocks[:1].parameters():
                p.grad = None
            session.model.blocks[1:].zero_grad()
            if step < 2:
                losses.append(session.backward(step))
            norms.append(session.step())
        return {"losses": losses, "norms": norms, **session.outcome()}


def twice(where: Where) -> Observed:
    """Two backwards through one graph."""
    with sharded(where, NET, max_grad_norm=0.5) as session:
        losses, norms = [], []
        for step in STEPS:
            ((rows, _),) = session.parts(step)
            loss = session.model(*rows)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            losses.append(loss.item())
            norms.append(session.step())
        return {"losses": losses, "norms": norms, **session.outcome()}


def in_groups(where: Where) -> Observed:
    """Groups of parameters with settings of their own, which cut across those that are gathered, and a schedule."""
    with sharded(where, NET, groups=_by_decay, max_grad_norm=0.5) as session:
        seen = {"losses": [], "norms": []}
        schedule = torch.optim.lr_scheduler.LambdaLR(session.optimizer, lambda step: 1 / (1 + step))
        for step in STEPS:
            for key, values in session.train([step]).items():
                seen[key] += values
            schedule.step()
        return {**seen, **session.outcome()}


def _by_decay(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2 and p is not model.shift]  # which nobody trains
    return [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]


def gathered_to_modify(where: Where) -> Observed:
    """The edits of rank 0 inside gather(modify=True) are everybody's, those of others nobody's."""
    with sharded(where, NET) as session:
        seen = session.train([0])
        with tiered.gather(session.model.head, modify=True), torch.no_grad():
            session.model.head.weight.fill_(where.rank + 0.25)
        edited = session.model.state_dict()["head.weight"].clone()
        assert (edited == 0.25).all(), f"rank {where.rank} has {edited}"
        later = session.train([1, 2])
        return {**{key: seen[key] + later[key] for key in seen}, **session.outcome()}


def edited_in_place(where: Where) -> Observed:
    """Every rank makes the same edits under no_grad, of parts and of wholes, between steps and before a forward."""
    with sharded(where, NET) as session:
        losses, norms = [], []
        for step in STEPS:
            with torch.no_grad():
                for p in session.model.parameters():
                    p.mul_(0.95)
                session.model.head.weight[1].fill_(0.5)
                session.model.blocks[1].weight.data.clamp_(-0.3, 0.3)
            losses.append(session.backward(step))
            norms.append(session.step())
        return {"losses": losses, "norms": norms, **session.outcome()}


def read_alone(where: Where) -> Observed:
    """Between steps one rank reads parameters, prints one, gathers a block; the others do nothing."""
    with sharded(where, NET) as session:
        seen = {"losses": [], "norms": []}
        own: dict[int, list[Any]] = {part: [] for part in where.mine}
        for step in STEPS:
            for part in where.mine:
                if part == step % where.parts:
                    own[part] += _read(session)
            for key, values in session.train([step]).items():
                seen[key] += values
        return {**seen, "own": own, **session.outcome()}


def _read(session: Session) -> list[Any]:
    model = session.model
    values = [model.blocks[2].weight.sum().item(), model.scale.item(), repr(model.shift)[:14]]
    with tiered.gather(model.blocks[1]):
        values.append(model.blocks[1].weight.detach().clone())
    return values


def evaluated(where: Where) -> Observed:
    """Each rank evaluates as many batches as its number, with and without `no_grad`; training goes on right."""
    with sharded(where, EXPERTS) as session:
        seen = {"losses": [], "norms": []}
        own: dict[int, list[float]] = {part: [] for part in where.mine}
        for step in STEPS:
            for key, values in session.train([step]).items():
                seen[key] += values
            for part in where.mine:
                own[part] += _evaluate(session, part, 2 * part + step)
        return {**seen, "own": own, **session.outcome()}


def _evaluate(session: Session, part: int, count: int) -> list[float]:
    session.model.eval()
    losses = []
    for number in range(count):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * part + number))
        with torch.no_grad() if number % 2 else contextlib.nullcontext():
            losses.append(session.model(x, part=part + number).item())
    session.model.train()
    return losses


def from_rank_0(where: Where) -> Observed:
    """Ranks that start from different values train from those of rank 0."""
    with sharded(where, NET, seed=100 + where.rank) as session:
        return {"start": session.weights(), **session.train(STEPS), **session.outcome()}


def deferred(where: Where, case: Case, **budget: str) -> Observed:
    """Built under deferred_init, with another random state on each rank: everybody draws from rank 0's, and rank 0's
    goes on as after plain construction."""

    def build(config: tiered.Config) -> torch.nn.Module:
        with tiered.deferred_init(config):
            model = case.build()
            assert not budget or any(where.swap.iterdir()), "nothing was parked"
            return model

    with sharded(where, case, seed=100 + where.rank, build=build, config=budget, lr=1e-3) as session:
        own = {part: torch.rand(3) if part == 0 else None for part in where.mine}
        return {"start": session.weights(), "own": own, **session.train(STEPS), **session.outcome()}


def low_precision(where: Where, dtype: torch.dtype) -> Observed:
    """Parameters compute in 16 bits, gradients are reduced in fp32."""
    precision = tiered.MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    with sharded(where, NET, config={"precision": precision}, apart=True, max_grad_norm=0.5) as session:
        return {**session.train(STEPS), "scale": session.optimizer.loss_scale, **session.outcome()}


def two_models(where: Where) -> Observed:
    """Two models in one process, in turns; the second closes later than the first."""
    second_case = branching(where.parts)
    with sharded(where, second_case, seed=7, lr=3e-3) as second:
        with sharded(where, NET) as first:
            seen: dict[str, Any] = {"losses": [], "norms": []}
            for step in STEPS:
                losses = [session.backward(step) for session in (first, second)]
                norms = [session.step() for session in (second, first)]
                seen["losses"] += losses
                seen["norms"] += norms
            outcomes = [first.outcome()]
        seen["after"] = second.train([3])["norms"]
        return {**seen, "models": [*outcomes, second.outcome()]}


def again(where: Where) -> Observed:
    """Closed, trained on in plain torch by one step of its own making, and sharded again in the same process."""
    with sharded(where, NET) as session:
        seen = session.train(range(2))
        model = session.model
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    with sharded(where, NET, build=lambda _: model, max_grad_norm=0.5) as session:
        later = session.train([2, 3])
        return {**{key: seen[key] + later[key] for key in seen}, **session.outcome()}


def carried(where: Where) -> Observed:
    """Goes on from the checkpoint of another number of ranks, beside the swap directory, for two steps."""
    checkpoint = torch.load(where.swap.parent / CHECKPOINT)
    with sharded(where, EXPERTS, seed=100, max_grad_norm=0.5) as session:
        session.train([9])  # what is loaded replaces states there are
        session.model.load_state_dict(checkpoint["model"])
        session.optimizer.load_state_dict(checkpoint["optimizer"])
        seen = session.train([2, 3])
        states = {"model": session.weights(), "optimizer": copied(session.optimizer.state_dict())}
        return {**seen, **session.outcome(), "checkpoint": states}


CHECKPOINT = "checkpoint.pt"

SCENARIOS: dict[str, Callable[[Where], Observed]] = {
    "plain": partial(trained, case=NET),
    "clipped": partial(trained, case=NET, max_grad_norm=0.2),
    "everything": everything,
    "skipped": skipped,
    "branching": partial(trained, case=branching),
    "experts": partial(trained, case=EXPERTS),
    "odd": partial(trained, case=ODD),
    "tied": partial(trained, case=gpt()),
    "frozen": part_frozen,
    "adapters": partial(trained, case=ADAPTED),
    "reentrant": partial(trained, case=gpt(checkpointing="reentrant")),
    "checkpointed": partial(trained, case=gpt(checkpointing="non-reentrant")),
    "accumulated": partial(accumulated, counts=(2, 2, 2), syncs=lambda micro, count: True),
    "no_sync": partial(accumulated, counts=(2, 2, 2), syncs=lambda micro, count: micro == count - 1),
    "varying": partial(accumulated, counts=COUNTS, syncs=lambda micro, count: True),
    "varying no_sync": partial(accumulated, counts=COUNTS, syncs=lambda micro, count: micro == count - 1),
    "never synced": partial(accumulated, counts=COUNTS, syncs=lambda micro, count: False),
    "zeroed": zeroed,
    "dropped": dropped,
    "twice": twice,
    "in groups": in_groups,
    "modified": gathered_to_modify,
    "edited": edited_in_place,
    "read alone": read_alone,
    "evaluated": evaluated,
    "from rank 0": from_rank_0,
    "deferred": partial(deferred, case=NET),
    "deferred to drive": partial(deferred, case=LARGE, host_budget="9MiB"),
    "bf16": partial(low_precision, dtype=torch.bfloat16),
    "fp16": partial(low_precision, dtype=torch.float16),
    "two models": two_models,
    "again": again,
    "carried": carried,
}

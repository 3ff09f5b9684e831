"""What holds on several ranks and has no one-rank counterpart: each a function of `Where` that asserts it.

Owns: initial values that must be equal, buffers beside DistributedDataParallel, what is communicated, what is refused
by name, and that nothing is left behind. Runs inside a process group that exists before the first of them.
"""

import contextlib
import gc
import os
import threading
import time
import unittest.mock
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity.harness import ADAM, SEED, same
from ranks.parity_models import CONV, NET, WIDTH, Case, float_rows
from ranks.parity_run import ENOUGH, Session, Where, shard, sharded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tiered
import tiered.zero.build

SQUARE = 96  # its square is a multiple of 32 times 2, 3 and 4: no shard has padding
LAYERS = 6


def unequal_is_refused(where: Where) -> None:
    """initial_values="equal": the parameter that differs is named, on every rank, and the model stays plain."""
    torch.manual_seed(SEED)
    model = NET.build()
    with torch.no_grad():
        model.head.bias.add_(where.rank)
    with pytest.raises(tiered.UsageError, match=r"head\.bias"):
        shard(where, model, initial_values="equal")
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.head.bias.isfinite().all()
    with sharded(where, NET, config={"initial_values": "equal"}) as session:
        session.train([0])


def values_are_given_out_only_once_they_are_there(where: Where) -> None:
    """A rank that is late to fill its shards: the others' first forward waits for it."""
    torch.manual_seed(SEED)
    model = NET.build()
    want = model(*NET.rows(0)).item()
    fill = tiered.zero.build._fill_and_take

    def late(*arguments: Any) -> None:
        time.sleep(0.3 * (where.rank == where.ranks - 1))
        fill(*arguments)

    with unittest.mock.patch("tiered.zero.build._fill_and_take", late):
        shard(where, model)
    with torch.no_grad():
        got = model(*NET.rows(0)).item()
    tiered.close(model)
    assert got == want, f"rank {where.rank} computed {got}, not {want}"


def gradients_are_refused_by_name(where: Where) -> None:
    """Reading, changing and setting p.grad names the group; asking for it, zeroing and dropping it works."""
    with sharded(where, NET) as session:
        session.backward(0)
        head = session.model.head
        assert head.weight.grad is not None
        assert head.weight.grad.shape == head.weight.shape
        for use in (torch.sum, torch.relu_):
            with pytest.raises(tiered.UsageError, match=r"grad.*head"):
                use(head.weight.grad)
        with pytest.raises(tiered.UsageError, match=r"grad.*head"):
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        with pytest.raises(tiered.UsageError, match=r"grad.*head"):
            session.model.head.weight.grad = torch.zeros(3, WIDTH)
        session.model.zero_grad()
        session.backward(1)
        session.optimizer.zero_grad()
        session.train([2])


def pauses_change_no_bit(where: Where) -> None:
    """Whether what is reduced early arrives before more of it comes than was learnt, or after, shows in no bit."""
    seen = []
    for pause_s in (0, 0.1, 0):  # seconds; without one it may be either
        with sharded(where, NET) as session:
            session.train([0])
            session.backward(1)
            time.sleep(pause_s)
            session.backward(2)
            norm = session.step()
            seen.append({"norm": norm, **session.outcome()})
    same(seen, seen[:1] * len(seen), exact=True)


def average_is_the_mean_over_ranks(where: Where) -> None:
    with sharded(where, NET) as session:
        assert tiered.average(session.model, float(where.rank)) == (where.ranks - 1) / 2
        stats = tiered.stats(session.model)
        assert (stats.rank, stats.ranks) == (where.rank, where.ranks)


def budgets_of_a_node_are_divided(where: Where) -> None:
    """budgets="node": each rank keeps to its share; and what ranks are given never adds up beyond the machine."""
    torch.manual_seed(SEED)
    model = NET.build()
    least = _named(where, model, host_budget=1)
    _named(where, model, host_budget=where.ranks * least - where.ranks, budgets="node")
    with tiered.shard(model, tiered.Config(**where.settings(host_budget=where.ranks * least, budgets="node"))):
        model(*NET.rows(0)).backward()
        assert 0 < tiered.stats(model).peak_bytes["host"] <= least
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(tiered.ConfigError, match="host_budget"):  # each alone has room for it
        tiered.shard(model, tiered.Config(**where.settings(host_budget=memory - 1)))


def _named(where: Where, model: nn.Module, **settings: Any) -> int:
    """The host budget that a refusal names as enough for one rank."""
    with pytest.raises(tiered.ConfigError) as refusal:
        tiered.shard(model, tiered.Config(**where.settings(**settings)))
    return int(ENOUGH.match(str(refusal.value))[2])


def buffers_are_those_of_distributed_data_parallel(where: Where) -> None:
    """BatchNorm in training: losses, weights and buffers of each rank, beside DistributedDataParallel's."""
    want = _plainly(where)
    with sharded(where, CONV) as session:
        losses = session.train(range(3))["losses"]
        session.model.eval()
        with torch.no_grad():
            losses.append(session.model(*session.parts(3)[0][0]).item())
        got = {"losses": losses, "values": session.weights()}
    same(got, want, exact=False, rtol=1e-4, atol=2e-5)


def _plainly(where: Where) -> dict[str, Any]:
    torch.manual_seed(SEED)
    model = CONV.build()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(3):
        rows = [r.chunk(where.ranks)[where.rank] for r in CONV.rows(step)]
        loss = replica(*rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(replica(*(r.chunk(where.ranks)[where.rank] for r in CONV.rows(3))).item())
    return {"losses": losses, "values": {name: v.detach().clone() for name, v in model.state_dict().items()}}


class Squares(nn.Module):
    """Equal layers in a row, without any padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SQUARE, SQUARE, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


SQUARES = Case(Squares, partial(float_rows, widths=(SQUARE,)))
ALL = LAYERS * SQUARE**2  # the model's elements


def communication_is_what_the_theory_says(where: Where) -> None:
    """Elements gathered and reduced by a step, with one backward and with several, in and out of no_sync.

    Stages 1 and 2 gather every parameter once a step; stage 3, where the device holds one window of groups, once in
    forward and once in backward, apart from what is still there at the turn.
    """
    window = {"device_budget": 4 * SQUARE**2 * (2 if where.stage == 3 else 2 * LAYERS)}
    with sharded(where, SQUARES, config=window) as session:
        session.train([0])
        for backwards, quiet in ((1, False), (3, False), (3, True)):
            _accumulate(session, backwards, quiet=quiet)  # how many backwards a step has is learnt
            before = tiered.stats(session.model).collective_elements
            _accumulate(session, backwards, quiet=quiet)
            after = tiered.stats(session.model).collective_elements
            moved = {kind: after[kind] - before[kind] for kind in ("all_gather", "reduce_scatter")}
            reductions = backwards if where.stage > 1 and not quiet else 1
            what = f"stage {where.stage}, {backwards} backwards, no_sync {quiet}: {moved}, of {ALL}"
            assert moved["reduce_scatter"] == reductions * ALL, what
            if where.stage < 3:
                assert moved["all_gather"] == ALL, what
            else:
                turn = 2 * SQUARE**2  # what of a window may be kept from forward to backward and to the next forward
                assert 2 * backwards * (ALL - turn) <= moved["all_gather"] <= 2 * backwards * ALL, what


def _accumulate(session: Session, backwards: int, *, quiet: bool) -> None:
    for micro in range(backwards):
        silent = quiet and micro < backwards - 1
        with tiered.no_sync(session.model) if silent else contextlib.nullcontext():
            session.backward(micro)
    session.step()


def held() -> dict[str, Any]:
    """What this process holds now."""
    gc.collect()
    return {
        "python threads": sorted(t.name for t in threading.enumerate()),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
    }


def nothing_is_left_after_close(where: Where) -> None:
    """Threads, descriptors and swap files are back as before the first shard."""
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    NET.build()(torch.ones(2, WIDTH)).backward()  # autograd's own threads
    before = held()
    for place in ("host", "drive", "device and drive"):
        here = Where(**{**vars(where), "place": place})
        with sharded(here, NET) as session:
            session.train(range(2))
        del session
        with contextlib.suppress(ZeroDivisionError), sharded(here, NET) as session:
            session.backward(0)
            dist.barrier()  # who leaves ends the others' calls
            raise ZeroDivisionError
        del session
        dist.barrier()
        deadline = time.monotonic() + 20  # the threads of a group of ranks end by themselves, a moment later
        while held() != before and time.monotonic() < deadline:
            time.sleep(0.05)
        same(held(), before, exact=True, where=f"{place}: after close")
        assert not list(where.swap.iterdir()), place
        dist.barrier()


FACTS: dict[str, Callable[[Where], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        unequal_is_refused,
        values_are_given_out_only_once_they_are_there,
        gradients_are_refused_by_name,
        pauses_change_no_bit,
        average_is_the_mean_over_ranks,
        budgets_of_a_node_are_divided,
        buffers_are_those_of_distributed_data_parallel,
        communication_is_what_the_theory_says,
        nothing_is_left_after_close,
    )
}

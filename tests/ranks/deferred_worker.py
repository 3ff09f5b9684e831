"""One rank that builds models under deferred_init, started by test_deferred.py: asserts the facts of one list.

Usage: deferred_worker.py VALUES|FAILURES SWAP. All facts of a list run in one process group, one after the other, and
each leaves no file, no process group and no memory behind. One that hangs prints where it waits before it is killed.
"""

import contextlib
import copy
import faulthandler
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import tiered
from tiered.cli.memory import ResidentGrowth
from tiered.zero import parts

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEED, WIDTH, LAYERS = 11, 64, 12
WEIGHT = 4 * WIDTH * WIDTH
LEAST = 16 * WEIGHT  # a host budget of which a quarter, four weights, may be whole
LIMIT_S = 4.0  # rank_timeout_s of what fails
PATIENCE_S = 60  # for one fact
MIB = 1 << 20
AMPLE = {"device": "cpu", "host_budget": 16 * MIB}


def config(swap: Path | None, **more: Any) -> tiered.Config:
    """Of a construction that parks most of what it builds."""
    return tiered.Config(device="cpu", host_budget=LEAST, nvme=swap, **more)


class Watch:
    """The most bytes of parameters that were in memory at once, looked at whenever there could be more."""

    def __init__(self) -> None:
        self.most = 0
        self._seen: list[weakref.ref[nn.Parameter]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        def look(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None:
                self._seen.append(weakref.ref(param))
                self.look()

        handle = register_module_parameter_registration_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def look(self) -> None:
        alive = {id(param): param for seen in self._seen if (param := seen()) is not None}
        with torch._C.DisableTorchFunctionSubclass():
            self.most = max(self.most, sum(p.untyped_storage().nbytes() for p in alive.values()))


def program(look: Callable[[], None] = lambda: None) -> nn.Sequential:
    """A model that is initialised twice, tied, copied into, and cast; it draws random numbers all along."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            look()
            nn.init.uniform_(module.bias)
            look()

    model.apply(initialise)
    model[3].weight = model[2].weight  # the first weight of layer 3 is nobody's any more: it was parked, and
    model[11].weight = model[10].weight  # that of layer 11 was not
    with torch.no_grad():
        model[0].weight.copy_(model[9].weight)
        look()
    model[5].bias.data.fill_(1)
    model[7].to(torch.bfloat16)
    model.append(copy.deepcopy(model[1]))
    look()
    return model


def plain() -> tuple[dict[str, Tensor], Tensor]:
    """What rank 0 builds alone, and its random stream afterwards."""
    before = torch.get_rng_state()
    torch.manual_seed(SEED)
    values = {name: value.clone() for name, value in program().state_dict().items()}
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    return values, after


def groups() -> int:
    """How many process groups this process is in."""
    gc.collect()
    return len(dist.distributed_c10d._world.pg_map)


def same(model: nn.Module, want: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(model.state_dict()), want, rtol=0, atol=0)


def nothing_left(swap: Path, before: int) -> None:
    """All ranks have given everything back."""
    assert groups() == before
    dist.barrier()
    assert os.listdir(swap) == []
    dist.barrier()


def sharded_values(model: nn.Module, settings: dict[str, Any], want: dict[str, Tensor], left: int) -> None:
    """The model, sharded, has the values wanted; `left`: process groups that are not the model's."""
    with tiered.shard(model, tiered.Config(**settings)):
        assert groups() == left + 1, "the group of the construction is still held"
        same(model, want)
    same(model, want)


# --- what is built ---


def values_are_rank_0s(swap: Path) -> None:
    before, (want, drawn) = groups(), plain()
    for place, stage, seed in ((None, 3, SEED), (None, 1, SEED + RANK), (swap, 2, SEED), (swap, 3, SEED + RANK)):
        torch.manual_seed(seed)
        mine, watch = torch.get_rng_state(), Watch()
        with tiered.deferred_init(config(place)), watch.watching():
            model = program(watch.look)
            assert torch.equal(torch.get_rng_state(), drawn)
        assert torch.equal(torch.get_rng_state(), drawn if seed == SEED else mine)
        assert sum(type(param) is not nn.Parameter for param in model.parameters()) > LAYERS
        assert watch.most <= LEAST // 4 + 2 * WEIGHT, watch.most  # beside them, what a copy takes
        model[4].weight.sum()  # a touch between the two is a call of all ranks, as one inside is
        sharded_values(model, {**AMPLE, "nvme": place, "stage": stage, "initial_values": "equal"}, want, before)
        nothing_left(swap, before)


def places_and_budgets_may_differ(swap: Path) -> None:
    before, (want, _) = groups(), plain()
    torch.manual_seed(SEED)
    mine = config(swap) if RANK == 0 else tiered.Config(device="cpu", host_budget=LEAST + RANK * MIB)
    with mock.patch.object(parts, "_WINDOW_BYTES", 3000):  # of which a part takes several
        with tiered.deferred_init(mine):
            model = program()
        sharded_values(model, {**AMPLE, "stage": 2}, want, before)
    nothing_left(swap, before)


def a_view_on_one_rank_changes_nothing(swap: Path) -> None:
    """As a view in a reference cycle, which is collected at another moment on every rank."""
    before, (want, _) = groups(), plain()
    torch.manual_seed(SEED)
    views: list[Tensor] = []

    def look(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if RANK == 0 and type(param) is nn.Parameter:
            views.append(param.detach())
        if RANK == 1 and param is not None:
            param.__dict__["cycle"] = [param]  # it goes whenever it is collected, not when it is replaced

    with tiered.deferred_init(config(None)):
        handle = register_module_parameter_registration_hook(look)
        model = program()
        handle.remove()
    assert RANK or views
    assert sum(view.untyped_storage().nbytes() > 0 for view in views) == len(views)
    for param in model.parameters():
        param.__dict__.pop("cycle", None)
    views.clear()
    sharded_values(model, AMPLE, want, before)
    nothing_left(swap, before)


def what_is_not_of_torchs_stream_is_rank_0s(swap: Path) -> None:
    before = groups()
    for place in (None, swap):
        with tiered.deferred_init(config(place)):
            few, many = nn.Linear(8, 8), program()
            for model in (few, many):
                model.apply(lambda module: isinstance(module, nn.Linear) and nn.init.constant_(module.weight, RANK))
        assert type(few.weight) is type(many[4].weight) is not nn.Parameter
        few.weight.sum()
        assert type(few.weight) is nn.Parameter
        with tiered.shard(nn.ModuleList([few, many]), tiered.Config(**AMPLE, nvme=place)):
            assert not any(layer.weight.any() for layer in (few, *many))
        del few, many, model
        nothing_left(swap, before)


def what_is_whole_is_rank_0s_too(swap: Path) -> None:
    before = groups()
    with tiered.deferred_init(config(swap)):
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, RANK)
    assert groups() == before, "nothing was parked, so there is nothing to wait for"
    with tiered.shard(model, tiered.Config(**AMPLE)):
        assert not model.weight.any()
    nothing_left(swap, before)


def warm_up(swap: Path) -> None:
    """Have code that is used for the first time, and threads, not count as a model's memory."""
    with tiered.deferred_init(config(swap)):
        model = program()
    tiered.close(tiered.shard(model, tiered.Config(**AMPLE, nvme=swap)))


def memory_is_bounded_by_the_own_part(swap: Path) -> None:
    """64 MiB in weights of 4 MiB: a rank holds its part, or in a drive nothing, and 12 MiB that are whole."""

    def large() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    whole, weight, slack = 12 * MIB, 4 * MIB, 6 * MIB  # a thread of a drive, of which there is one, has a buffer of 1
    warm_up(swap)
    for place, kept in ((swap, 4 * MIB), (None, 64 * MIB // RANKS)):  # a window to and from the drive is 4 MiB
        settings: dict[str, Any] = {"device": "cpu", "nvme": place, "io_threads": 1}
        gc.collect()
        growth, watch = ResidentGrowth(), Watch()
        torch.manual_seed(SEED)
        with tiered.deferred_init(tiered.Config(**settings, host_budget=4 * whole)), watch.watching():
            model = large()
        for layer in model:
            nn.init.normal_(layer.weight)
            watch.look()
        assert watch.most <= whole + weight
        grown = growth.peak_bytes()
        assert grown <= whole + weight + kept + slack, f"{grown / MIB:.1f} MiB in construction, {place}"
        home = "nvme" if place else "host"
        budget = {"host_budget": 4 * whole, "param_tier": home, "optimizer_tier": home} if place else {}
        tiered.shard(model, tiered.Config(**settings, **budget))
        grown = growth.peak_bytes()
        assert grown <= whole + weight + kept + 4 * weight + slack, f"{grown / MIB:.1f} MiB in shard, {place}"
        tiered.close(model, keep_weights=False)
        del model


# --- what fails ---


def failing(swap: Path | None = None) -> tiered.Config:
    return config(swap, rank_timeout_s=LIMIT_S)


def a_touch_that_others_do_not_make(swap: Path) -> None:
    before = groups()
    with tiered.deferred_init(failing(swap)):
        model = program()
    for _ in range(2):
        if RANK == 0:
            with pytest.raises(tiered.RankError, match=r"bringing in parameter 9 'weight': ranks \[1"):
                model[4].weight.sum()
    assert model[4].weight.shape == (WIDTH, WIDTH)
    dist.barrier()
    del model
    nothing_left(swap, before)


def touches_of_different_parameters(swap: Path) -> None:
    before = groups()
    with tiered.deferred_init(config(swap)):
        model = program()
    begun = time.monotonic()
    with pytest.raises(tiered.RankError, match=r"rank 0: bringing in parameter 9 .*rank 1: bringing in parameter 11 "):
        model[4 + RANK].weight.sum()
    assert time.monotonic() - begun < 20, "it is known at once that they differ"
    del model
    nothing_left(swap, before)


def an_exception_on_one_rank(swap: Path) -> None:
    before = groups()
    mine = torch.get_rng_state()
    error = ZeroDivisionError if RANK == RANKS - 1 else tiered.RankError
    with pytest.raises(error, match=r"ZeroDivisionError: on purpose|^on purpose"), tiered.deferred_init(failing(swap)):
        model = program()
        if RANK == RANKS - 1:
            raise ZeroDivisionError("on purpose")
        model.apply(lambda module: isinstance(module, nn.Linear) and nn.init.zeros_(module.weight))
    assert torch.equal(torch.get_rng_state(), mine) == (RANK > 0)
    with pytest.raises(tiered.TieredError):
        model[4].weight.sum()
    nothing_left(swap, before)


def an_exception_on_every_rank(swap: Path) -> None:
    before = groups()
    torch.manual_seed(RANK)
    mine = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), tiered.deferred_init(config(swap)):
        program()
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), mine) == (RANK > 0)
    nothing_left(swap, before)


def a_change_through_a_view_on_one_rank(swap: Path) -> None:
    before = groups()
    with tiered.deferred_init(failing(swap)):
        first = nn.Linear(WIDTH, WIDTH)
        view = first.weight.detach() if RANK == 0 else None
        model = nn.Sequential(first, program())
        if view is not None:
            view.fill_(3)
    with pytest.raises(tiered.UsageError, match="changed through a tensor that views it"):
        tiered.shard(model, tiered.Config(**AMPLE, rank_timeout_s=LIMIT_S))
    del first, model, view
    nothing_left(swap, before)


def parts_that_do_not_fit(swap: Path) -> None:
    before = groups()
    small = tiered.Config(device="cpu", host_budget=3 * WEIGHT, rank_timeout_s=LIMIT_S)
    # the rank that comes to its limit first raises BudgetError, and the others that, or RankError with its words
    with pytest.raises(tiered.TieredError, match=r"host_budget=48\.0 KiB|BudgetError"), tiered.deferred_init(small):
        program()
    nothing_left(swap, before)


def a_directory_that_one_rank_lacks(swap: Path) -> None:
    before = groups()
    lacks = RANK == RANKS - 1
    error = tiered.SwapDirectoryError if lacks else tiered.RankError
    with pytest.raises(error, match="missing"), tiered.deferred_init(failing(swap / "missing" if lacks else swap)):
        raise AssertionError("it was entered")
    nothing_left(swap, before)


def a_model_that_is_dropped(swap: Path) -> None:
    before = groups()
    for place in (None, swap):
        with tiered.deferred_init(config(place)):
            model = program()
        assert groups() == before + 1
        del model
        nothing_left(swap, before)


def a_rank_that_is_gone(swap: Path) -> None:
    """The last fact: afterwards there is one rank less."""
    if RANK == RANKS - 1:
        with tiered.deferred_init(failing(swap)):
            program()
            sys.stdout.flush()
            os._exit(0)
    with pytest.raises(tiered.RankError, match=rf"ranks \[{RANKS - 1}\] are gone"), tiered.deferred_init(failing(swap)):
        for module in program():
            nn.init.zeros_(module.weight)
    os._exit(0)  # what torch does at its end would wait for the rank that is gone


VALUES = [
    memory_is_bounded_by_the_own_part,  # first: the memory of others stands in no bound
    values_are_rank_0s,
    places_and_budgets_may_differ,
    a_view_on_one_rank_changes_nothing,
    what_is_not_of_torchs_stream_is_rank_0s,
    what_is_whole_is_rank_0s_too,
]
FAILURES = [
    a_touch_that_others_do_not_make,
    touches_of_different_parameters,
    an_exception_on_one_rank,
    an_exception_on_every_rank,
    a_change_through_a_view_on_one_rank,
    parts_that_do_not_fit,
    a_directory_that_one_rank_lacks,
    a_model_that_is_dropped,
    a_rank_that_is_gone,
]


def main(facts: list[Callable[[Path], None]], swap: Path) -> None:
    for fact in facts:
        print(fact.__name__, flush=True)
        faulthandler.dump_traceback_later(PATIENCE_S)
        fact(swap)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main({"VALUES": VALUES, "FAILURES": FAILURES}[sys.argv[1]], Path(sys.argv[2]))
    dist.destroy_process_group()

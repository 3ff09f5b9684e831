"""Placement never changes arithmetic: the combinations of tier, accumulation, frozen weights and checkpointing.

Most faults of offloaded training are combinations, so the rows cover every *triple* of settings (a covering array, not
a hand-picked list), each row trained over several steps and compared at each of them. Invariants: 1. each row is
bit-equal to the all-host CPU run of tiered with the same model and data. 2. each is close to plain torch at every step.
3. a row whose budgets are smaller than its bytes shows the bytes moving, else it would prove nothing.
"""

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import CASES, GPT, Case, Gpt
from parity.harness import (
    EMULATED,
    HOST,
    LATE,
    NVME,
    Placement,
    Prepare,
    Session,
    budgets,
    frozen,
    plain_session,
    same,
    tiered_session,
    units,
    variant,
)

import tiered


class Row(NamedTuple):
    """One combination; `accumulate` is the number of backwards before each of the steps."""

    device: str
    param: str
    optimizer: str
    accumulate: tuple[int, ...]
    frozen: bool
    checkpointing: str


AXES: Row = Row(
    device=("cpu", "emulated"),
    param=("auto", "device", "host", "nvme"),
    optimizer=("auto", "device", "host", "nvme"),
    accumulate=((1, 1, 1, 1), (3, 3, 3), (1, 3, 2, 1)),
    frozen=(False, True),
    checkpointing=("none", "reentrant", "non-reentrant"),
)


def triples(row: Row) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(row), 3))


@functools.cache
def covering_rows() -> tuple[Row, ...]:
    """Rows that hold every triple of settings at least once: greedily the row with the most new ones."""
    everything = [Row(*values) for values in itertools.product(*AXES)]
    covered_by = {row: triples(row) for row in everything}
    missing = set().union(*covered_by.values())
    rows: list[Row] = []
    while missing:
        best = max(everything, key=lambda row: len(covered_by[row] & missing))
        missing -= covered_by[best]
        rows.append(best)
    return tuple(rows)


def label(row: Row) -> str:
    counts = "".join(map(str, row.accumulate))
    return f"{row.device}-{row.param}-{row.optimizer}-{counts}-{'frozen' if row.frozen else 'full'}-{row.checkpointing}"


def train(session: Session, accumulate: tuple[int, ...]) -> dict[str, Any]:
    """Several steps; weights are read after the second step and at the end only, as reading them waits for updates."""
    seen: dict[str, Any] = {"losses": [], "norms": []}
    seed = 0
    for step, count in enumerate(accumulate):
        for _ in range(count):
            seen["losses"].append(session.backward(seed, 1 / count))
            seed += 1
        session.optimizer.step()
        session.optimizer.zero_grad()
        seen["norms"].append(session.optimizer.grad_norm)
        if step == 1:
            seen["weights after step 2"] = session.weights()
    seen["weights"] = session.weights()
    seen["moments"] = session.moments()
    return seen


def assert_moved(session: Session, place: Placement) -> None:
    """Bytes went to the drive and came back, as the budgets cannot hold what the drive tier holds."""
    tiers = (place.param, place.optimizer)
    held = sum(budget or 0 for budget in budgets(session.case.build, place))
    if "nvme" not in tiers and not ("auto" in tiers and held < 4 * sum(units(session.case.build))):
        return
    stats = tiered.stats(session.model)
    assert stats.written_bytes["nvme"] > 0, "nothing was written to the drive"
    if place.optimizer == "nvme":
        assert stats.read_bytes["nvme"] > 0, "nothing was read from the drive"


def gpt_with(checkpointing: str) -> Gpt:
    return Gpt(checkpointing=checkpointing)


@functools.cache
def case_with(checkpointing: str) -> Case:
    return variant(GPT, f"gpt-{checkpointing}", functools.partial(gpt_with, checkpointing))


def preparation(row: Row) -> Prepare | None:
    return frozen("blocks.1.", "blocks.2.", "blocks.0.qkv", "position") if row.frozen else None


reference_runs: dict[tuple[Any, ...], Any] = {}


def references(row: Row, swap: Path) -> tuple[Any, Any]:
    """(plain torch, tiered all on the host) observations of a row's model and data; made once in a process."""
    key = row[3:]
    if key not in reference_runs:
        how = {"prepare": preparation(row), "max_grad_norm": 0.5}
        case = case_with(row.checkpointing)
        with plain_session(case, **how) as session:
            plain = train(session, row.accumulate)
        with tiered_session(case, HOST, swap, **how) as session:
            reference_runs[key] = (plain, train(session, row.accumulate))
    return reference_runs[key]


@pytest.mark.parametrize("row", covering_rows(), ids=label)
def test_every_combination_trains_bit_equal_to_the_host_run_and_close_to_plain_torch(row: Row, swap: Path) -> None:
    plain, host = references(row, swap)
    place = Placement(
        name=label(row),
        device=row.device,
        param=row.param,
        optimizer=row.optimizer,
        deferred=row.frozen,
        delay_s=1e-3,
    )
    case = case_with(row.checkpointing)
    with tiered_session(case, place, swap, prepare=preparation(row), max_grad_norm=0.5) as session:
        got = train(session, row.accumulate)
        assert_moved(session, place)
    same(host, plain, exact=False, where="host run against plain torch")
    exact = not (row.device == "emulated" and row.optimizer == "device")  # updated there, by torch's own kernel
    same(got, host, exact=exact, where="this placement against the host run")


@pytest.mark.parametrize("place", [NVME, EMULATED, LATE], ids=lambda place: place.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_architecture_trains_bit_equal_on_every_tier(case: Case, place: Placement, swap: Path) -> None:
    counts = (1, 2, 1, 1, 1)
    with plain_session(case, max_grad_norm=0.5) as session:
        plain = train(session, counts)
    with tiered_session(case, HOST, swap, max_grad_norm=0.5) as session:
        host = train(session, counts)
    with tiered_session(case, place, swap, max_grad_norm=0.5) as session:
        got = train(session, counts)
        assert_moved(session, place)
    same(host, plain, exact=False, where="host run against plain torch")
    same(got, host, exact=True, where="this placement against the host run")


@pytest.mark.parametrize("seed", range(4))
def test_random_copy_delays_never_change_a_bit(seed: int, swap: Path) -> None:
    with tiered_session(GPT, HOST, swap, max_grad_norm=0.5) as session:
        host = train(session, (1, 2, 1))
    emulation = tiered.Emulation(
        h2d_bytes_per_s=2e8, d2h_bytes_per_s=1e8, max_delay_s=4e-3 if seed else 0.0, seed=seed, poison=True
    )
    how = {"config": {"emulation": emulation}, "max_grad_norm": 0.5}
    with tiered_session(GPT, EMULATED, swap, **how) as session:
        got = train(session, (1, 2, 1))
    same(got, host, exact=True, where=f"delays of seed {seed}")


@pytest.mark.parametrize("room", [1.0, 1.5, 3.0, 20.0])
def test_the_size_of_the_budget_never_changes_a_bit_and_is_never_exceeded(room: float, swap: Path) -> None:
    device, host = budgets(GPT.build, EMULATED)
    with tiered_session(GPT, HOST, swap) as session:
        want = train(session, (2, 1, 1))
    sized = {"host_budget": int(host * room)}
    with tiered_session(GPT, NVME, swap, config=sized) as session:
        got = train(session, (2, 1, 1))
        assert tiered.stats(session.model).peak_bytes["host"] <= sized["host_budget"]
    same(got, want, exact=True, where=f"cpu with {room} times the room")
    sized["device_budget"] = int((device or 0) * room)
    with tiered_session(GPT, EMULATED, swap, config=sized) as session:
        got = train(session, (2, 1, 1))
        peak = tiered.stats(session.model).peak_bytes
    assert peak["host"] <= sized["host_budget"]
    assert peak["device"] <= sized["device_budget"]
    same(got, want, exact=True, where=f"emulated with {room} times the room")


def test_two_runs_of_the_same_training_are_bit_equal(swap: Path) -> None:
    seen = []
    for _ in range(2):
        with tiered_session(GPT, EMULATED, swap, max_grad_norm=0.5) as session:
            seen.append(train(session, (1, 2, 1)))
    same(seen[1], seen[0], exact=True)


def test_steps_without_any_read_between_them_are_bit_equal_to_steps_read_one_by_one(swap: Path) -> None:
    """Only a run that reads nothing leaves updates open under the next forward; the results must not differ."""
    results = []
    for watch in (True, False):
        with tiered_session(GPT, EMULATED, swap, max_grad_norm=0.5) as session:
            for step in range(5):
                session.model(*session.batch(step)).backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
                if watch:
                    session.weights()
                    session.moments()
            results.append((session.weights(), session.moments()))
    same(results[1], results[0], exact=True)


def test_the_rows_cover_every_triple_of_settings() -> None:
    wanted = set().union(*(triples(Row(*values)) for values in itertools.product(*AXES)))
    assert set().union(*map(triples, covering_rows())) == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deferred_construction_draws_the_same_initial_weights(case: Case, swap: Path) -> None:
    drawn = []
    for deferred in (False, True):
        place = Placement(name="deferred", param="nvme", optimizer="nvme", deferred=deferred)
        with tiered_session(case, place, swap) as session:
            drawn.append((session.weights(), torch.rand(1)))
    same(drawn[1], drawn[0], exact=True)

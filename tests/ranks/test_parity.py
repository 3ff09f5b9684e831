"""Several ranks over gloo train what one rank trains on the joined batch, wherever the bytes of each rank live.

Each test starts one group of ranks that carries out many jobs, and plays the one-rank reference in this process
meanwhile. Compared are losses, gradient norms, weights, moments and skipped steps:
1. N ranks with one rank, within the rounding of another order of sums;
2. the ranks of one run with each other, bit for bit;
3. the placements of one stage and number of ranks with each other, bit for bit.
"""

import itertools
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from parity.harness import copied, same
from ranks.launch import run_ranks
from ranks.parity_facts import FACTS
from ranks.parity_models import EXPERTS
from ranks.parity_run import PLACES, STAGES, Where, sharded
from ranks.parity_scenarios import CHECKPOINT, SCENARIOS

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 300
COARSE = {"rtol": 1e-4, "atol": 2e-5}  # fp32 sums in another order, through three steps of AdamW
Job = tuple[str, int, str]


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("the reference was still training")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S + 30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def carry_out(jobs: list[Job], ranks: int, folder: Path) -> list[list[Any]]:
    """What each rank saw of each job; fails with the output of the ranks where one did not end well."""
    out, swap, plan = folder / "out", folder / "swap", folder / "jobs.json"
    out.mkdir()
    swap.mkdir()
    plan.write_text(json.dumps(jobs))
    ends = run_ranks(WORKER, [str(plan), str(out), str(swap)], ranks, timeout=LIMIT_S, env={"PYTHONWARNINGS": "error"})
    told = "\n".join(f"--- rank {rank}, exit {end.returncode}\n{end.stdout[-4000:]}" for rank, end in enumerate(ends))
    assert not any(end.returncode for end in ends), told
    assert not list(swap.iterdir()), "swap files were left behind"
    return [torch.load(out / f"{rank}.pt")["seen"] for rank in range(ranks)]


def reference(name: str, parts: int, folder: Path) -> Any:
    """The same scenario on one rank, with all parts of the joined batch, everything on the host."""
    swap = folder / "alone"
    swap.mkdir(exist_ok=True)
    return SCENARIOS[name](Where(rank=0, ranks=1, parts=parts, stage=3, place="host", swap=swap))


def judge(job: Job, seen: list[Any], want: Any, first: Any) -> None:
    """`seen`: by rank; `want`: of one rank; `first`: of rank 0 in the first placement of this stage."""
    what = " / ".join(map(str, job))
    losses = [one["losses"] for one in seen]
    mean = [sum(step) / len(step) for step in zip(*losses, strict=True)]
    same(mean, want["losses"], exact=False, where=f"{what}: losses", **COARSE)
    for part, one in enumerate(seen):
        if "own" in want:
            same(one["own"], {part: want["own"][part]}, exact=False, where=f"{what}: part {part}'s own", **COARSE)
        same(shared(one), shared(seen[0]), exact=True, where=f"{what}: rank {part} and rank 0")
    same(shared(seen[0]), shared(want), exact=False, where=f"{what}: ranks and one rank", **COARSE)
    bitwise = PLACES[job[2]].get("optimizer_tier") != "device"  # there torch's own kernel updates
    same(seen[0], first, exact=bitwise, where=f"{what}: this placement and the first", **COARSE)


def shared(observed: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in observed.items() if key not in ("losses", "own")}


def check(jobs: list[Job], ranks: int, folder: Path) -> list[list[Any]]:
    """Carries out scenarios and compares; returns what each rank saw of each."""
    save_checkpoint(folder, started(folder))
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(carry_out, jobs, ranks, folder)
        wants = {name: reference(name, ranks, folder) for name in dict.fromkeys(job[0] for job in jobs)}
        seen = running.result()
    firsts: dict[tuple[str, int], Any] = {}
    wrong = []
    for index, job in enumerate(jobs):
        name, stage, _ = job
        at = [rank[index] for rank in seen]
        try:
            judge(job, at, wants[name], firsts.setdefault((name, stage), at[0]))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    return seen


def started(folder: Path) -> Any:
    """The checkpoint of one rank that `carried` goes on from."""
    swap = folder / "alone"
    swap.mkdir(exist_ok=True)
    with sharded(Where(rank=0, ranks=1, parts=2, stage=3, place="host", swap=swap), EXPERTS) as session:
        session.train([0, 1])
        return {"model": session.weights(), "optimizer": copied(session.optimizer.state_dict())}


def save_checkpoint(folder: Path, checkpoint: Any) -> None:
    torch.save(checkpoint, folder / CHECKPOINT)


NAMES = [name for name in SCENARIOS if name != "everything"]
ROOMY = [place for place in PLACES if not place.startswith("tight")]
# Where a scenario sets budgets of its own, or needs more than the least: what is thawed gets states that it did not
# have.
ONLY = {"frozen": ROOMY, "deferred to drive": ["drive", "device and drive"]}


def places(name: str) -> list[str]:
    return ONLY.get(name, list(PLACES))


def spread(names: list[str]) -> list[Job]:
    """Every scenario at every stage in its first placement, and at one stage in one of the others; both go round."""
    jobs: list[Job] = []
    for name, stage in itertools.product(names, STAGES):
        first, *others = places(name)
        jobs.append((name, stage, first))
        turn, at = divmod(NAMES.index(name), len(STAGES))
        if stage == STAGES[at]:
            jobs.append((name, stage, others[turn % len(others)]))
    return jobs


def sample(ranks: int) -> list[Job]:
    """Every scenario once; stages and placements go round, and meet differently for each number of ranks."""
    jobs: list[Job] = []
    for turn, name in enumerate(NAMES):
        jobs.append((name, STAGES[(turn + ranks) % len(STAGES)], places(name)[(turn + 2 * ranks) % len(places(name))]))
    return jobs


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_stage_in_every_placement_trains_what_one_rank_trains(ranks: int, tmp_path: Path) -> None:
    """The awkward model everywhere; with more ranks than two every other scenario too, once."""
    jobs: list[Job] = [("everything", stage, place) for stage in STAGES for place in PLACES]
    check(jobs + (sample(ranks) if ranks > 2 else []), ranks, tmp_path)


@pytest.mark.parametrize("half", [0, 1])
def test_two_ranks_train_what_one_rank_trains_on_the_joined_batch(half: int, tmp_path: Path) -> None:
    check(spread(NAMES[half::2]), 2, tmp_path)


def test_a_checkpoint_of_any_number_of_ranks_goes_on_with_any_other(tmp_path: Path) -> None:
    """One rank, then three, then one again; the two ranks of `carried` go on from one rank's too."""
    jobs = [("carried", stage, place) for stage in STAGES for place in ("host", "device and drive")]
    seen = check(jobs, 3, tmp_path)
    outcomes = []
    for checkpoint in (reference("carried", 3, tmp_path)["checkpoint"], *(one["checkpoint"] for one in seen[0])):
        save_checkpoint(tmp_path, checkpoint)
        outcomes.append(shared(reference("carried", 3, tmp_path)))
    for job, outcome in zip(jobs, outcomes[1:], strict=True):
        same(outcome, outcomes[0], exact=False, where=f"one rank after {job}", **COARSE)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_has_no_counterpart_on_one_rank_holds_at_every_stage(ranks: int, tmp_path: Path) -> None:
    carry_out([(name, stage, "host") for name in FACTS for stage in STAGES], ranks, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_scenario_at_every_stage_in_every_placement(ranks: int, name: str, tmp_path: Path) -> None:
    check([(name, stage, place) for stage in STAGES for place in places(name)], ranks, tmp_path)

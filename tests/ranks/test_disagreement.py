"""Ranks that do different things, or nothing, or are gone: every rank that is left ends with a RankError, soon.

A case gives each rank a program (see disagree_worker.py) and says how each must end. The limit on the wall clock is far
below ten times the patience of an impatient case, and below the patience of a patient one: a case that is patient shows
that the ranks need not wait to see that they disagree.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ranks.disagree_worker import REFUSED, SLOW_S
from ranks.forked import Ended, Forks

PATIENT, IMPATIENT = 90.0, 3.0  # rank_timeout_s
LIMIT_S = 20.0
SLEEP = "sleep:5"
SAVING = "state.?dict"
KILLED, INTERRUPTED, SURPRISED, DONE = -9, -2, 1, 0


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap"


@dataclasses.dataclass(frozen=True)
class Case:
    """A program for each rank, how each ends, and what a RankError says: of each rank, or as a whole."""

    programs: Sequence[str]
    says: Sequence[str] | str  # regular expressions
    ends: Sequence[int] = (REFUSED, REFUSED)
    patience: float = PATIENT


def run(
    forks: Forks, swap: Path, programs: Sequence[str], patience: float = PATIENT, stage: int = 3, device: str = "cpu"
) -> list[Ended]:
    words = [program.split(", ") for program in programs]
    return forks.run(words, swap.parent, LIMIT_S, stage=stage, rank_timeout_s=patience, device=device)


def told(message: str, rank: int) -> str:
    """What a message says of one rank."""
    return " ".join(re.findall(rf"rank {rank}\b(.*?)(?=rank \d|$)", message, flags=re.DOTALL))


def check(ended: Sequence[Ended], ends: Sequence[int], says: Sequence[str] | str) -> None:
    for rank, (end, expected) in enumerate(zip(ended, ends, strict=True)):
        assert end.code is not None, f"rank {rank} hangs:\n{end.output}"
        assert end.code == expected, f"rank {rank}:\n{end.output}"
        if expected == SURPRISED:
            assert "Surprise: a fault of this test" in end.output.splitlines()[-1], end.output
        if expected != REFUSED:
            continue
        error = end.report["errors"][-1]
        assert error["type"] == "RankError", end.output
        if isinstance(says, str):
            assert re.search(says, error["message"]), error["message"]
            continue
        for other, pattern in enumerate(says):
            assert re.search(pattern, told(error["message"], other)), (other, pattern, error["message"])


# --- calls that differ: seen at once ---

DIFFERENT = {
    "one more step": Case(
        ("shard, train, train, train, saved", "shard, train, train, saved"), ("backward|step", SAVING)
    ),
    "one more backward": Case(
        ("shard, train, backward, step, state_dict", "shard, train, backward, backward, step, state_dict"),
        ("step", "backward|step"),
    ),
    "one backward kept back": Case(
        ("shard, train, unsynced, backward, step, saved", "shard, train, backward, backward, step, saved"),
        ("backward", "backward"),
    ),
    "a step and a state_dict": Case(
        ("shard, train, backward, step, saved", "shard, train, backward, saved, step"), ("step", SAVING)
    ),
    "a state_dict and training": Case(
        ("shard, train, state_dict", "shard, train, train, train"), (SAVING, "backward|step")
    ),
    "an optimizer's state_dict and training": Case(
        ("shard, train, saved", "shard, train, train, train"), (SAVING, "backward|step")
    ),
    "a load_state_dict and training": Case(
        ("shard, state_dict, load_state_dict, train", "shard, state_dict, train, train"),
        ("load|edit", "backward|step"),
    ),
    "a close and training": Case(("shard, train, close", "shard, train, train, train"), ("close", "backward|step")),
    "a gather that modifies and training": Case(
        ("shard, train, gather, train, state_dict", "shard, train, train, train, state_dict"),
        ("gather|modif|edit", "backward|step"),
    ),
    "an edit and training": Case(
        ("shard, train, edit, train, state_dict", "shard, train, train, state_dict"),
        ("edit|modif|in.place", "backward|step"),
    ),
    "an average and a step": Case(
        ("shard, train, average", "shard, train, train, train"), ("average", "backward|step")
    ),
    "one of three in a step of its own": Case(
        ("shard, train, state_dict", "shard, train, train, train", "shard, train, state_dict"),
        (SAVING, "backward|step", SAVING),
        (REFUSED,) * 3,
    ),
}
AT_OTHER_STAGES = [
    "one more step", "one more backward", "a step and a state_dict", "an optimizer's state_dict and training",
    "a state_dict and training"
]  # fmt: skip
STAGED = [(name, 3) for name in DIFFERENT] + [(name, stage) for name in AT_OTHER_STAGES for stage in (1, 2)]


@pytest.mark.parametrize(("name", "stage"), STAGED, ids=lambda value: str(value))
def test_ranks_that_make_different_calls_all_say_so_without_waiting(
    name: str, stage: int, forks: Forks, swap: Path
) -> None:
    case = DIFFERENT[name]
    check(run(forks, swap, case.programs, case.patience, stage), case.ends, case.says)
    assert list(swap.iterdir()) == []


# --- a rank that makes no more calls ---

SILENT = {
    "exits in the middle": Case(("shard, train, train", "shard, train, exit"), ("", ""), (REFUSED, DONE), IMPATIENT),
    "exits while another saves": Case(
        ("shard, train, state_dict", "shard, train, exit"), (rf"{SAVING}|step", ""), (REFUSED, DONE), IMPATIENT
    ),
    "closes while another trains": Case(
        ("shard, train, train", "shard, train, drop"), ("", ""), (REFUSED, DONE), IMPATIENT
    ),
    "drops what another keeps": Case(
        ("shard, train, close", "shard, train, drop"), ("close|step", ""), (REFUSED, DONE), IMPATIENT
    ),
    "sleeps while another saves": Case(
        ("shard, train, state_dict", f"shard, train, {SLEEP}, train"), (SAVING, ""), patience=IMPATIENT
    ),
    "sleeps while another trains": Case(
        ("shard, train, train", f"shard, train, {SLEEP}, train"), ("", ""), patience=IMPATIENT
    ),
    "sleeps among three": Case(
        ("shard, train, train", f"shard, train, {SLEEP}, train", "shard, train, train"),
        ("", "", ""),
        (REFUSED,) * 3,
        IMPATIENT,
    ),
    "raises between steps": Case(
        ("shard, train, train", "shard, train, fault:raise"), ("", ""), (REFUSED, SURPRISED), IMPATIENT
    ),
    "raises in forward": Case(
        ("shard, train, train", "shard, train, forward:raise"), ("", ""), (REFUSED, SURPRISED), IMPATIENT
    ),
    "raises in backward": Case(
        ("shard, train, train", "shard, train, backward:raise"), ("", ""), (REFUSED, SURPRISED), IMPATIENT
    ),
    "raises inside with": Case(
        ("shard, scope, train, train", "shard, scope, train, forward:raise"), ("", ""), (REFUSED, SURPRISED), IMPATIENT
    ),
    "raises inside with, between steps": Case(
        ("shard, scope, train, train, state_dict", "shard, scope, train, fault:raise"),
        ("", ""),
        (REFUSED, SURPRISED),
        IMPATIENT,
    ),
    "is interrupted in forward": Case(
        ("shard, train, train", "shard, train, forward:interrupt"), ("", ""), (REFUSED, INTERRUPTED), IMPATIENT
    ),
    "is interrupted in step": Case(
        ("shard, train, train, train", "shard, train, backward, step:interrupt"),
        ("", ""),
        (REFUSED, INTERRUPTED),
        IMPATIENT,
    ),
    "is interrupted between steps": Case(
        ("shard, scope, train, train", "shard, scope, train, fault:interrupt"),
        ("", ""),
        (REFUSED, INTERRUPTED),
        IMPATIENT,
    ),
    "never joins": Case(("shard", SLEEP), "1/2 clients joined|did not come", (REFUSED, DONE), IMPATIENT),
    "never shards": Case(("shard", f"join, {SLEEP}"), r"shard\(\).*\b1\b.*did not come", (REFUSED, DONE), IMPATIENT),
    "exits instead of sharding": Case(
        ("shard", "join, exit"), r"shard\(\).*\b1\b.*did not come", (REFUSED, DONE), IMPATIENT
    ),
}
SILENT_AT_OTHER_STAGES = ["exits in the middle", "raises in forward", "sleeps while another trains"]
SILENT_STAGED = [(name, 3) for name in SILENT] + [(name, stage) for name in SILENT_AT_OTHER_STAGES for stage in (1, 2)]


def only_unforeseen_ends_leave_steps(
    forks: Forks, swap: Path, programs: Sequence[str], ends: Sequence[int], stage: int = 3, **more: str
) -> None:
    """Who closed its model has removed its directory; who was killed, or ended by an error that nobody caught, or that
    left `with model`, may have left what it committed, and the same program, started again, takes that over."""
    closed = [end == DONE or (end == REFUSED and "scope" not in programs[rank]) for rank, end in enumerate(ends)]
    unforeseen = [rank for rank in range(len(ends)) if not closed[rank]]
    left = [path.name for path in swap.iterdir()]
    assert [name for name in left if not name.endswith(tuple(f"-r{rank}" for rank in unforeseen))] == []
    if left:
        check(run(forks, swap, ["shard, train, close"] * len(ends), stage=stage, **more), [DONE] * len(ends), ())
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize(("name", "stage"), SILENT_STAGED, ids=lambda value: str(value))
def test_who_waits_for_a_rank_that_makes_no_more_calls_says_so_in_time(
    name: str, stage: int, forks: Forks, swap: Path
) -> None:
    case = SILENT[name]
    check(run(forks, swap, case.programs, case.patience, stage), case.ends, case.says)
    only_unforeseen_ends_leave_steps(forks, swap, case.programs, case.ends, stage)


@pytest.mark.parametrize("name", ["raises in forward", "raises in backward", "is interrupted in step"])
def test_a_device_with_memory_of_its_own_makes_no_difference_to_who_waits(name: str, forks: Forks, swap: Path) -> None:
    case = SILENT[name]
    check(run(forks, swap, case.programs, case.patience, device="emulated"), case.ends, case.says)
    only_unforeseen_ends_leave_steps(forks, swap, case.programs, case.ends, device="emulated")


def test_who_stopped_is_named_by_the_others_and_says_so_itself_when_it_goes_on(forks: Forks, swap: Path) -> None:
    programs = ("shard, train, try train, wake:1, try drop", "shard, train, fault:stop, train")
    first, second = run(forks, swap, programs, IMPATIENT)
    check([first, second], (DONE, REFUSED), ("", ""))
    (error,) = first.report["errors"]
    assert error["type"] == "RankError"
    assert "rank 1" in error["message"]
    assert list(swap.iterdir()) == []


# --- a rank that is killed ---

PLACES = {
    "idle": "shard, train, fault:kill",
    "forward": "shard, train, forward:kill",
    "backward": "shard, train, backward:kill",
    "step": "shard, train, backward, step:kill",
    "shard": "shard:kill",
}
KILLS = [(place, victim, 2, 3) for place in PLACES for victim in (0, 1)]
KILLS += [("backward", 1, 3, 3), ("step", 1, 2, 1), ("backward", 0, 2, 1), ("step", 0, 2, 2)]


@pytest.mark.parametrize(("place", "victim", "ranks", "stage"), KILLS)
def test_others_end_soon_when_a_rank_is_killed_and_the_next_run_reclaims_what_it_left(
    place: str, victim: int, ranks: int, stage: int, forks: Forks, swap: Path
) -> None:
    programs = ["shard, train, train, state_dict, close"] * ranks
    programs[victim] = PLACES[place]
    ends = [REFUSED] * ranks
    ends[victim] = KILLED
    check(run(forks, swap, programs, IMPATIENT, stage), ends, [""] * ranks)
    assert any(swap.iterdir()) or place == "shard", "nothing was left to reclaim"
    only_unforeseen_ends_leave_steps(forks, swap, programs, ends, stage)


# --- construction ---

DISAGREEMENTS = {  # variant: what the error says
    "wide": r"entry.*16.*24",
    "deep": r"blocks\.4",
    "frozen": "requires_grad|frozen|trained",
    "swapped": "entry.*number 0.*number 1",
    "stage": "stage",
    "precision": "precision|bfloat16",
    "tiers": "tier",
    "patient": "rank_timeout_s",
}
FAILURES = {  # variant: the error of the rank that fails, and what the others quote of it
    "no folder": ("SwapDirectoryError", "does not exist"),
    "small budget": ("ConfigError", "host_budget"),
    "unsupported": ("UsageError", "complex64"),
}


def test_models_or_configs_that_differ_are_refused_on_every_rank_and_leave_nothing_behind(
    forks: Forks, swap: Path
) -> None:
    odd = [f"try shard:{variant}" for variant in DISAGREEMENTS]
    end = "shard, train, digest, close"
    ended = run(forks, swap, (", ".join(["try shard"] * len(odd) + [end]), ", ".join([*odd, end])))
    check(ended, (DONE, DONE), ())
    for rank, end_of in enumerate(ended):
        assert len(end_of.report["errors"]) == len(odd), end_of.output
        for error, (variant, says) in zip(end_of.report["errors"], DISAGREEMENTS.items(), strict=True):
            assert error["type"] == "RankError", (rank, variant, error)
            assert re.search(says, error["message"]), (rank, variant, error)
    assert ended[0].report["digests"] == ended[1].report["digests"]
    assert list(swap.iterdir()) == []


def test_a_rank_that_cannot_shard_raises_its_own_error_and_the_others_quote_it(forks: Forks, swap: Path) -> None:
    odd = [f"try shard:{variant}" for variant in FAILURES]
    end = "shard, train, digest, close"
    ended = run(forks, swap, (", ".join(["try shard"] * len(odd) + [end]), ", ".join([*odd, end])))
    check(ended, (DONE, DONE), ())
    for other, own, (kind, says) in zip(
        ended[0].report["errors"], ended[1].report["errors"], FAILURES.values(), strict=True
    ):
        assert (other["type"], own["type"]) == ("RankError", kind)
        assert re.search(says, own["message"]), own
        assert kind in other["message"], other
        assert re.search(says, told(other["message"], 1)), other
    assert ended[0].report["digests"] == ended[1].report["digests"]
    assert list(swap.iterdir()) == []


# --- what is no disagreement ---


def undisturbed(forks: Forks, swap: Path, stage: int, quiet: str, odd: str, patience: float = PATIENT) -> None:
    """Both ranks run `quiet`, then rank 1 alone runs `odd` in its place: all four weights are the same."""
    programs = [f"shard, {quiet}, digest, close, shard, {second}, digest, close" for second in (quiet, odd)]
    ended = run(forks, swap, programs, patience, stage)
    check(ended, (DONE, DONE), ())
    digests = [digest for end in ended for digest in end.report["digests"]]
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize(("place", "stage"), [("forward", 1), ("forward", 2), ("forward", 3), ("backward", 1)])
def test_a_rank_that_catches_an_error_and_tries_its_batch_again_disturbs_nobody(
    place: str, stage: int, forks: Forks, swap: Path
) -> None:
    undisturbed(forks, swap, stage, "train, train", f"try {place}:raise, again, train, train")


@pytest.mark.parametrize("stage", [2, 3])
def test_half_a_backward_whose_gradients_have_gone_to_other_ranks_cannot_be_tried_again_by_one(
    stage: int, forks: Forks, swap: Path
) -> None:
    programs = ["shard, train, train", "shard, try backward:raise, again, train"]
    ended = run(forks, swap, programs, PATIENT, stage)
    check(ended, (REFUSED, REFUSED), ())
    for end in ended:
        assert "half way" in end.report["errors"][-1]["message"], end.output
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reading_and_evaluating_on_one_rank_alone_disturbs_nobody(stage: int, forks: Forks, swap: Path) -> None:
    odd = "read, train, evaluate, evaluate, read, train, evaluate, train, read"
    undisturbed(forks, swap, stage, "train, train, train", odd)


def test_blocks_used_in_another_order_on_each_rank_are_served(forks: Forks, swap: Path) -> None:
    programs = ("shard, train, train, train, digest, close", "shard, train, turn, train, turn, train, digest, close")
    first, second = run(forks, swap, programs)
    check([first, second], (DONE, DONE), ())
    assert first.report["digests"] == second.report["digests"]
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize(("slow", "stage"), [(0, 3), (1, 3), (0, 1)])
def test_a_rank_that_drags_itself_through_shard_is_waited_for_by_who_trains_already(
    slow: int, stage: int, forks: Forks, swap: Path
) -> None:
    rest = "train, train, digest, close"
    programs = [f"shard, {rest}, {'shard:drag' if rank == slow else 'shard'}, {rest}" for rank in (0, 1)]
    ended = run(forks, swap, programs, stage=stage)
    check(ended, (DONE, DONE), ())
    assert len({digest for end in ended for digest in end.report["digests"]}) == 1
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_is_slow_inside_its_model_is_waited_for(place: str, forks: Forks, swap: Path) -> None:
    slow = "forward:sleep, train, train" if place == "forward" else "backward:sleep, step, train"
    quiet = "forward, train, train" if place == "forward" else "train, train"
    undisturbed(forks, swap, 3, quiet, slow, SLOW_S / 2)


def test_after_a_rank_error_a_model_can_only_be_dropped(forks: Forks, swap: Path) -> None:
    after = "try forward, try step, try state_dict, try close, drop"
    ended = run(forks, swap, (f"shard, train, try state_dict, {after}", f"shard, train, try train, {after}"))
    check(ended, (DONE, DONE), ())
    for end in ended:
        assert [error["type"] for error in end.report["errors"]] == ["RankError"] * 5
    assert list(swap.iterdir()) == []

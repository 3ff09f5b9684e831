"""A rank's place: told by torchrun's variables, its share of a batch, and who speaks where every rank could.

The ranks here are one process that is told to be one of several; those of test_torchrun.py are real.
"""

import importlib
import io
import itertools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tiered.cli import main, ranks
from tiered.cli.ranks import Place
from tiered.cli.signals import StopSignal
from tiered.cli.train import Outcome
from tiered.errors import ConfigError, RankError, StorageError, TieredError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Without torchrun's variables, and with the signal handlers back at the end, which a rank leaves ignored."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield monkeypatch
    for number, handler in before.items():
        signal.signal(number, handler)


def be(environment: pytest.MonkeyPatch, rank: int, local_rank: int, node: int) -> None:
    """From here on this process is one of four ranks, two on each of two nodes, and nobody waits for its end."""
    told = {"WORLD_SIZE": 4, "RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
    for name, value in told.items():
        environment.setenv(name, str(value))


def test_one_process_and_torchrun_with_one_rank_are_the_same_place() -> None:
    assert Place.told({}) == Place.told({"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}) == Place()
    assert Place().alone
    assert Place().first


def test_torchruns_variables_are_the_place() -> None:
    told = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2", "TORCHELASTIC_RUN_ID": "x"}
    place = Place.told(told)
    assert place == Place(rank=5, ranks=8, local_rank=1, node=2, launched=True)
    assert (place.first, place.first_of_node, place.alone) == (False, False, False)
    assert Place.told({"WORLD_SIZE": "8", "RANK": "4", "LOCAL_RANK": "0"}).first_of_node


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: got 'two' in the environment, expected a whole number at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: got '0'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK: got '2' in the environment, expected a whole number from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK: got '-1'"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK: got ''"),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_name(told: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Place.told(told)
    assert named in str(refused.value)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_shares_of_all_ranks_are_the_batch_in_order(count: int) -> None:
    shares = [Place(rank=rank, ranks=count).share(6) for rank in range(count)]
    assert [row for share in shares for row in share] == list(range(6))
    assert {len(share) for share in shares} == {6 // count}


@pytest.mark.parametrize(("batch", "works"), [(2, "such as 4;"), (6, "such as 4 or 8;")])
def test_a_batch_that_ranks_do_not_divide_is_refused_with_what_works(batch: int, works: str) -> None:
    with pytest.raises(ConfigError, match=rf"--batch: got {batch} sequences for 4 ranks, .* a multiple of 4 {works}"):
        Place(ranks=4).check_batch(batch)
    Place(ranks=4).check_batch(8)


def test_what_a_rank_complains_of_is_one_line_that_names_it() -> None:
    assert Place().complaint("error: a\n  b") == "tiered train: error: a b\n"
    assert Place(rank=3, ranks=4).complaint("error: a") == "tiered train: rank 3: error: a\n"


OPTIONS = [["--steps", "0"], ["--heads", "3"], ["--batch", "6"]]


@pytest.mark.parametrize(
    ("rank", "options"),
    [*itertools.product(range(4), OPTIONS), *((rank, ["--json", "no/out"]) for rank in (0, 1))],  # one node writes it
)
def test_bad_options_are_reported_by_rank_0_alone(
    environment: pytest.MonkeyPatch, rank: int, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[Place] = []
    environment.setattr(Place, "let_speak", lambda place, stop: waits.append(place))
    be(environment, rank, rank % 2, rank // 2)
    try:
        code = main(["train", *options])
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    assert code == 2
    assert shown.err.count("\n") == (rank == 0)
    assert shown.out == ""
    assert len(waits) == (rank != 0)


@pytest.mark.parametrize(("rank", "whose"), [(0, ""), (1, None), (2, "rank 2: "), (3, None)])
def test_a_missing_file_is_reported_by_the_first_rank_of_each_node(
    environment: pytest.MonkeyPatch, rank: int, whose: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[Place] = []
    environment.setattr(Place, "let_speak", lambda place, stop: waits.append(place))
    be(environment, rank, rank % 2, rank // 2)
    assert main(["train", "missing-file.txt"]) == 2
    complaint = f"tiered train: {whose}error: missing-file.txt: no such file; expected a text file\n"
    assert capsys.readouterr().err == ("" if whose is None else complaint)
    assert len(waits) == (whose is None)


@pytest.mark.parametrize("rank", [0, 1])
def test_help_is_shown_once(environment: pytest.MonkeyPatch, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    be(environment, rank, rank, 0)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert not ended.value.code
    assert ("--stage" in capsys.readouterr().out) == (rank == 0)


def test_variables_that_cannot_be_are_one_line_and_code_2(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("WORLD_SIZE", "many")
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("tiered train: error: WORLD_SIZE: got 'many'")


def test_the_json_of_another_node_is_not_made_here(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    be(environment, 2, 0, 1)
    assert main(["train", "missing-file.txt", "--json", str(target)]) == 2
    assert not target.exists()


@pytest.mark.parametrize(
    ("rank", "losses", "error", "code", "said"),
    [
        (0, [2.0, 1.0], RankError("rank 1 is gone"), 1, "tiered train: error: rank 1 is gone\n"),
        (1, [2.0, 1.0], RankError("rank 0 is gone"), 1, "tiered train: rank 1: error: rank 0 is gone\n"),
        (1, [], RankError("ranks differ"), 1, "tiered train: rank 1: error: ranks differ\n"),
        (1, [], StorageError("no drive"), 2, "tiered train: rank 1: error: no drive\n"),
        (1, [], ConfigError("a budget is too small"), 2, ""),
        (1, [2.0], StorageError("a drive failed"), 1, "tiered train: rank 1: error: a drive failed\n"),
    ],
)
def test_what_fails_on_a_rank_it_says_itself_and_rank_0_tells_what_was_trained(
    environment: pytest.MonkeyPatch,
    rank: int,
    losses: list[float],
    error: TieredError,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(order: object, batches: object, stop: object, outcome: Outcome, observe: object) -> NoReturn:
        outcome.losses += losses
        outcome.seconds += losses
        raise error

    be(environment, rank, rank, 0)
    environment.setattr(importlib.import_module("tiered.cli.main"), "train_tiered", fail)
    assert main(["train"]) == code
    shown = capsys.readouterr()
    heading = "" if rank else shown.err.splitlines(keepends=True)[0]
    assert shown.err == heading + said
    assert ("stopped by RankError" in shown.out) == (rank == 0)
    assert bool(shown.out) == (rank == 0)


class Sleeper:
    """Time that passes only in `sleep`, in which a signal may come."""

    def __init__(self, stop: StopSignal, signalled_at: float) -> None:
        self.now, self._stop, self._signalled_at = 0.0, stop, signalled_at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._signalled_at:
            self._stop.received = signal.SIGTERM


@pytest.mark.parametrize(
    ("launched", "signalled_at", "until"), [(False, 5.0, 0.0), (True, 5.0, 5.0), (True, 1e9, ranks.QUIET_SECONDS)]
)
def test_a_silent_rank_of_torchrun_waits_for_its_signal_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, launched: bool, signalled_at: float, until: float
) -> None:
    stop = StopSignal()
    clock = Sleeper(stop, signalled_at)
    monkeypatch.setattr(ranks, "time", clock)
    Place(rank=1, ranks=2, launched=launched).let_speak(stop)
    assert clock.now == pytest.approx(until, abs=2 * ranks.POLL_SECONDS)


def test_what_every_rank_says_is_heard_from_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, heard in ((0, "out err "), (1, "")):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with Place(rank=rank, ranks=2).spoken():
            print("out", end=" ")
            print("err", end=" ", file=sys.stderr)
        print("after", end="")
        assert stream.getvalue() == heard + "after"

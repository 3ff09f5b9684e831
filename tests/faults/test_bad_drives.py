"""Training on a drive that is slow or fails, by both engines: the bits of a run without a fault, or an error by name.

Whatever happens, nothing hangs, no signal ends the process, and closing gives everything back.
"""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bad_drives import BadDrives, Call, Effect, Error, Flip, Short, Stall, Torn, bad_drives
from faults.program import chain, config, digest, steps
from threaded_ranks import World

import tiered
from tiered.errors import CorruptDataError, RankError, StorageError, TieredError
from tiered.io.engine import chosen_mode

FAULTS_FROM = 2  # steps without a fault


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.native), "portable"], autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with each engine; child processes inherit the choice."""
    monkeypatch.setenv("TIERED_PORTABLE", "0" if request.param == "native" else "1")
    if chosen_mode() != request.param:
        pytest.skip("the extension tiered._native is not installed")
    return str(request.param)


@pytest.fixture
def drives() -> Iterator[BadDrives]:
    with bad_drives() as made:
        yield made


def every(nth: int, effect: Callable[[Call], Effect], *, write: bool) -> Callable[[Call], Effect]:
    """A rule that strikes each `nth` read (or write) of more than a block, and never twice in a row in one place."""
    count = itertools.count(1)
    struck: set[tuple[str, int]] = set()

    def rule(call: Call) -> Effect:
        place = (call.path, call.offset)
        if call.write != write or call.nbytes <= 4096 or next(count) % nth or place in struck:
            struck.discard(place)
            return None
        struck.add(place)
        return effect(call)

    return rule


def stalling(drives: BadDrives, number: int) -> Callable[[Call], Effect]:
    """A rule by which now and then a read stalls until the one that is made once more is over, and then fails with
    `number`, or does not."""
    stalled: dict[tuple[str, int], Stall] = {}

    def stall(call: Call) -> Stall:
        return stalled.setdefault((call.path, call.offset), drives.stall(number))

    strike = every(61, stall, write=False)

    def rule(call: Call) -> Effect:
        if (again := stalled.pop((call.path, call.offset), None)) is not None and not call.write:
            threading.Timer(0.2, again.until.set).start()  # by then the second one's bytes are there, most likely
            return None
        return strike(call)

    return rule


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def train(
    swap: Path, drives: BadDrives | None = None, rule: Callable[[Call], Effect] | None = None
) -> dict[str, object]:
    """Four steps with everything on two drives, the last two under `rule`."""
    model = chain()
    for name in ("a", "b"):
        (swap / name).mkdir(exist_ok=True)
    settings = {"nvme": [swap / "a", swap / "b"], "host_budget": "6MiB"}
    try:
        with tiered.shard(model, config(swap, **settings, drive_timeout_s=1.0)):
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            losses = steps(model, optimizer, FAULTS_FROM)
            if drives is not None and rule is not None:
                drives.rule = rule
            losses += steps(model, optimizer, 2)
            seen = digest(model, optimizer)
            stats = tiered.stats(model)
            if drives is not None:
                drives.release()  # what has stalled comes back, so that closing leaves nothing
            return {
                "losses": losses,
                "digest": seen,
                "retries": stats.drive_retries,
                "stalls": stats.drive_stalls,
            }
    finally:
        assert [os.listdir(swap / name) for name in ("a", "b")] == [[], []]


MENDED = {
    "reads that fail once": lambda drives: every(7, lambda call: Error(errno.EIO), write=False),
    "reads with a flipped bit": lambda drives: every(5, lambda call: Flip(call.nbytes // 2), write=False),
    "reads cut short": lambda drives: every(3, lambda call: Short(4096), write=False),
    "writes cut short": lambda drives: every(3, lambda call: Short(4096), write=True),
    "reads that stall": lambda drives: stalling(drives, 0),
    "reads that stall and fail": lambda drives: stalling(drives, errno.EBADMSG),
}


@pytest.mark.parametrize("fault", MENDED)
def test_a_fault_that_passes_changes_no_bit(
    swap: Path, drives: BadDrives, fault: str, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = train(swap, drives, MENDED[fault](drives))
    retries, stalls = found.pop("retries"), found.pop("stalls")
    again = train(swap)
    assert (again.pop("retries"), again.pop("stalls")) == (0, 0)
    assert found == again
    said = [m for m in caplog.messages if "once more" in m]
    assert len(said) == retries
    assert (retries > 0) == ("cut short" not in fault)
    assert (stalls > 0) == ("stall" in fault)


LASTING: dict[str, tuple[bool, Callable[[Call], Effect], type[StorageError], str]] = {
    "a drive that fails every read": (False, lambda call: Error(errno.EIO), StorageError, "Input/output error"),
    "a drive that fails every write": (True, lambda call: Error(errno.EIO), StorageError, "Input/output error"),
    "a drive that is full": (True, lambda call: Error(errno.ENOSPC), StorageError, "No space left"),
    "a drive that went read-only": (True, lambda call: Error(errno.EROFS), StorageError, "Read-only file system"),
    "writes of nothing": (True, lambda call: Short(0), StorageError, "ends before"),
    "the file is cut": (False, lambda call: Short(0), StorageError, "ends before"),
    "torn writes": (True, lambda call: Torn(call.nbytes // 8192 * 4096), CorruptDataError, "differ"),
    "writes with a flipped bit": (True, lambda call: Flip(call.nbytes - 1), CorruptDataError, "differ"),
    "reads with a flipped bit": (False, lambda call: Flip(0), CorruptDataError, "differ"),
}


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_is_an_error_that_names_the_drive_and_never_other_numbers(
    swap: Path, drives: BadDrives, fault: str
) -> None:
    write, effect, kind, words = LASTING[fault]
    ailing = str(swap / "b")

    def rule(call: Call) -> Effect:
        return effect(call) if call.write == write and call.path.startswith(ailing) else None

    model = chain()
    (swap / "a").mkdir()
    (swap / "b").mkdir()
    before = descriptors()
    tiered.shard(model, config(swap, nvme=[swap / "a", swap / "b"], host_budget="6MiB"))
    try:
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        losses = steps(model, optimizer, FAULTS_FROM)
        drives.rule = rule
        with pytest.raises(kind, match=words) as caught:
            for _ in range(3):  # a write that went wrong shows when it is read
                losses += steps(model, optimizer, 1)
        assert str(caught.value.filename).startswith(ailing)
        with pytest.raises(TieredError):  # and it stays an error
            for _ in range(3):
                steps(model, optimizer, 1)
    finally:
        tiered.close(model, keep_weights=False)
    assert [os.listdir(swap / name) for name in ("a", "b")] == [[], []]
    assert descriptors() <= before
    drives.release()
    assert losses == train(swap)["losses"][: len(losses)]  # what was computed before is right


@pytest.mark.parametrize("write", [False, True], ids=["reads", "writes"])
def test_a_drive_that_fails_while_sharding_gives_the_plain_model_back(
    swap: Path, drives: BadDrives, write: bool
) -> None:
    model = chain()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    count = itertools.count()
    drives.rule = lambda call: Error(errno.EIO) if call.write == write and next(count) >= 2 else None
    try:
        tiered.shard(model, config(swap))
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
            steps(model, tiered.AdamW(model.parameters(), lr=1e-2), 1)
        assert not write, "no write failed while sharding"
        tiered.close(model, keep_weights=False)
    except StorageError as error:
        assert write, error
        assert error.errno == errno.EIO
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert os.listdir(swap) == []


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_a_drive_that_never_answers_again_ends_the_step_by_name_and_the_model_closes(
    run: Callable, swap: Path, kind: str
) -> None:
    seen = run(f"dead_{kind}", swap)
    name, number, message = seen["errors"][0]
    assert (name, number) == ("StorageError", errno.ETIMEDOUT)
    assert f"{swap}/dead/tiered-" in message
    assert "has not come back for" in message or "was not begun" in message
    assert len(seen["errors"]) == 3, "a step after it was taken as whole"
    assert seen["steps"] == 2
    assert seen["left"] == [1, 1]  # on either what its last step has committed, to go on from


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_ranks_wait_for_one_whose_drive_is_late_until_it_is_given_up_and_then_all_say_why(
    swap: Path, drives: BadDrives, kind: str
) -> None:
    """Longer than for a rank that makes no call: the drive is what has to be named."""
    models = [chain() for _ in range(2)]
    settings = {"rank_timeout_s": 0.5, "drive_timeout_s": 0.7, "stage": 1}
    told: list[str] = []

    def program(rank: int) -> None:
        tiered.shard(models[rank], config(swap, **settings))
        try:
            optimizer = tiered.AdamW(models[rank].parameters(), lr=1e-2)
            steps(models[rank], optimizer, 1)
            tiered.average(models[rank], 0.0)  # every rank is here
            drives.rule = lambda call: (
                drives.stall() if call.write == (kind == "writes") and "-r1/" in call.path else None
            )
            steps(models[rank], optimizer, 1)
        finally:
            told.append("")
            if len(told) == 2:
                drives.release()
            tiered.close(models[rank], keep_weights=False)

    with World(2).installed() as world:
        first, second = world.ended(program)
    assert isinstance(second, StorageError)
    assert second.errno == errno.ETIMEDOUT
    assert "-r1/" in str(second.filename)
    assert isinstance(first, RankError)
    assert "rank 1" in str(first)

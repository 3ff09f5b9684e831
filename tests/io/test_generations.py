"""Generations of a swap space: what was committed is there, whatever is written, fails or ends afterwards.

Leaves whole models to tests/checkpoint/test_resume.py, and kills at random instants to tools/kill_storm.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.device.memory import Memory
from tiered.errors import CorruptDataError, StorageError, SwapDirectoryError, UsageError
from tiered.io import commit as commits
from tiered.io import directory, share
from tiered.io.commit import Commit, Identity, Kept, decode, encode
from tiered.io.drive import Drive
from tiered.io.engine import RECORD
from tiered.io.extent import Extent, Stripes
from tiered.io.swapfile import SwapSpace

PIECE = 4096
NBYTES = 5 * PIECE + 100
WHO = Identity("model", "layout", "in words")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for folder in made:
        folder.mkdir()
    return made


def opened(folders: list[Path], identity: Identity | None = WHO, **how: Any) -> SwapSpace:
    return SwapSpace(folders, piece_bytes=PIECE, threads=2, identity=identity, weights=[1] * len(folders), **how)


def begun(folders: list[Path], serial: int | None = None, **how: Any) -> tuple[SwapSpace, Extent]:
    """A space that goes on from generation `serial`, or from nothing, with its one extent."""
    space = opened(folders, **how)
    space.generations.choose(serial, "0" * 16, max((s for s, _ in space.generations.offers), default=0))
    return space, space.allocate(NBYTES, "states", kept=True)


def put(space: SwapSpace, extent: Extent, value: int, offset: int = 0, nbytes: int = NBYTES) -> None:
    memory = Memory(NBYTES, committed=True)
    memory.bytes.fill_(value)
    space.write(extent, memory.address, nbytes, offset).wait()


def got(space: SwapSpace, extent: Extent) -> list[int]:
    """The first byte of each piece, all of whose bytes are alike."""
    memory = Memory(NBYTES, committed=True)
    space.read(extent, memory.address, NBYTES).wait()
    whole = memory.bytes.numpy().copy()
    pieces = [whole[at : at + PIECE] for at in range(0, NBYTES, PIECE)]
    assert all((piece == piece[0]).all() for piece in pieces)
    return [int(piece[0]) for piece in pieces]


def abandoned(space: SwapSpace) -> None:
    """The process ends by an error: what is committed stays."""
    space.generations.left = True
    space.close()


def test_what_was_committed_comes_back_whatever_was_written_since(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"one")
    put(space, extent, 2, PIECE, 2 * PIECE)
    put(space, extent, 3, PIECE, PIECE)
    assert got(space, extent) == [1, 3, 2, 1, 1, 1]
    space.revert()
    assert got(space, extent) == [1] * 6
    put(space, extent, 4, 0, PIECE)
    space.commit(b"two")
    put(space, extent, 5)
    space.revert()
    assert got(space, extent) == [4, 1, 1, 1, 1, 1]
    space.close()
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def put_beside(space: SwapSpace, extent: Extent, value: int, offset: int = 0, nbytes: int = NBYTES) -> None:
    memory = Memory(NBYTES, committed=True)
    memory.bytes.fill_(value)
    space.write_beside(extent, memory.address, nbytes, offset).wait()


def test_a_candidate_is_seen_when_it_is_taken_and_lasts_when_it_is_committed(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"one")
    put_beside(space, extent, 2)
    assert got(space, extent) == [1] * 6
    space.take(extent, 2 * PIECE, PIECE)
    assert got(space, extent) == [1, 2, 2, 1, 1, 1]
    space.commit(b"two")
    assert got(space, extent) == [1, 2, 2, 1, 1, 1]
    put(space, extent, 3)
    space.revert()
    assert got(space, extent) == [1, 2, 2, 1, 1, 1]
    abandoned(space)
    again = opened(folders)
    again.generations.choose(2, "1" * 16, 2)
    extent = again.allocate(NBYTES, "states", kept=True)
    again.revert()
    assert got(again, extent) == [1, 2, 2, 1, 1, 1]
    again.close()


def test_a_candidate_that_nobody_took_is_not_there_for_the_next_run(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"one")
    put_beside(space, extent, 2)
    abandoned(space)
    again = opened(folders)
    again.generations.choose(1, "1" * 16, 1)
    extent = again.allocate(NBYTES, "states", kept=True)
    again.revert()
    assert got(again, extent) == [1] * 6
    again.close()


@pytest.mark.parametrize("change", ["write", "write and commit", "revert", "take"])
def test_a_candidate_for_contents_that_have_changed_cannot_be_taken(change: str, folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"one")
    put_beside(space, extent, 2)
    if change == "revert":
        space.revert()
    elif change == "take":
        space.take(extent, NBYTES)
    else:
        put(space, extent, 3, PIECE, PIECE)
        if change == "write and commit":
            space.commit(b"two")
    before = got(space, extent)
    with pytest.raises(UsageError, match="no longer holds"):
        space.take(extent, NBYTES)
    assert got(space, extent) == before
    space.close()


def test_nothing_is_written_beside_what_is_not_committed_or_has_one_slot_or_while_it_is_written(
    folders: list[Path],
) -> None:
    from bad_drives import bad_drives  # not for the program that is made of this file

    space, extent = begun(folders)
    memory = Memory(NBYTES, committed=True)
    with pytest.raises(UsageError, match="not committed"):
        space.write_beside(extent, memory.address, NBYTES)
    put(space, extent, 1)
    with pytest.raises(UsageError, match="not committed"):
        space.write_beside(extent, memory.address, NBYTES)
    space.commit(b"one")
    lone = space.allocate(NBYTES, "gradients")
    with pytest.raises(UsageError, match="not committed"):
        space.write_beside(lone, memory.address, NBYTES)
    with bad_drives() as drives:
        stall = drives.stall()
        drives.rule = lambda call: stall if call.write else None
        ticket = space.write_beside(extent, memory.address, NBYTES)
        for write in (space.write, space.write_beside):
            with pytest.raises(UsageError, match="is being written"):
                write(extent, memory.address, NBYTES)
        assert got(space, extent) == [1] * 6, "reading what is there goes on beside it"
        drives.release()
        ticket.wait()
    space.close()


@pytest.mark.parametrize("durability", ["process", "power"])
def test_the_next_space_offers_the_last_two_generations_and_goes_on_from_either(
    folders: list[Path], durability: Any
) -> None:
    for wanted, value in ((3, 3), (2, 2)):
        space, extent = begun(folders, durability=durability)
        for generation in (1, 2, 3):
            put(space, extent, generation)
            space.commit(bytes([generation]))
        abandoned(space)
        again = opened(folders, durability=durability)
        assert [serial for serial, _ in again.generations.offers] == [3, 2]
        again.generations.choose(wanted, "1" * 16, 3)
        assert again.generations.protected == bytes([value])
        extent = again.allocate(NBYTES, "states", kept=True)
        assert got(again, extent) == [0] * 6, "it is blank until it is reverted"
        put(again, extent, 9)
        again.revert()
        assert got(again, extent) == [value] * 6
        again.commit(b"more")
        assert again.generations.untouched is False
        again.close()
        assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_space_that_ends_before_it_has_gone_on_leaves_what_it_found(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 7)
    space.commit(b"seven")
    abandoned(space)
    for _ in range(2):
        again, extent = begun(folders, 1)
        put(again, extent, 1)
        again.close()
    last, extent = begun(folders, 1)
    last.revert()
    assert got(last, extent) == [7] * 6
    last.close()
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_what_is_not_chosen_is_forgotten_before_its_space_is_used(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"")
    abandoned(space)
    again, extent = begun(folders, None)
    put(again, extent, 2)
    abandoned(again)  # nothing was committed: all of it goes
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_directory_is_kept_only_while_it_has_a_whole_record(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is killed in the first commit, or while what was left is forgotten, leaves nothing that nobody removes."""
    kept_at: dict[str, list[bool]] = {"write": [], "clear": []}

    def watched(name: str) -> None:
        call = getattr(commits.RecordFile, name)

        def noting(record: commits.RecordFile, *given: Any) -> None:
            kept_at[name].append((Path(record.path).parent / directory._KEPT).exists())
            call(record, *given)

        monkeypatch.setattr(commits.RecordFile, name, noting)

    watched("write")
    watched("clear")
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"one")
    space.commit(b"two")
    abandoned(space)
    begun(folders)[0].close()
    assert kept_at == {"write": [False, True], "clear": [False, False]}


@pytest.mark.parametrize("other", [Identity("model", "another layout", "so"), Identity("another", "another", "so")])
def test_another_identity_does_not_take_it_and_is_told_where_the_model_is_the_same(
    folders: list[Path], other: Identity
) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"")
    abandoned(space)
    stranger = opened(folders, other)
    assert stranger.generations.offers == []
    assert len(stranger.generations.strangers) == (other.model == "model")
    stranger.close()
    again, extent = begun(folders, 1)
    again.revert()
    assert got(again, extent) == [1] * 6
    again.close()


def test_other_extents_than_were_committed_are_not_reverted(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"")
    abandoned(space)
    again, _ = begun(folders, 1)
    again.allocate(NBYTES, "more states", kept=True)
    with pytest.raises(UsageError, match="more states"):
        again.revert()
    again.close()


def test_a_generation_that_cannot_be_written_leaves_the_one_before(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"one")
    put(space, extent, 2)
    with monkeypatch.context() as patch:
        patch.setattr(commits.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError, match=r"a commit cannot be written") as caught:
            space.commit(b"two")
        assert caught.value.errno == errno.ENOSPC
    put(space, extent, 3)
    abandoned(space)
    again, extent = begun(folders, 1)
    again.revert()
    assert got(again, extent) == [1] * 6
    again.close()


def test_a_commit_first_flushes_what_was_written_where_nothing_was_or_where_blocks_are_shared(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, extent = begun(folders)
    synced: list[str] = []
    monkeypatch.setattr(Drive, "sync", lambda drive: synced.append(drive.path))
    monkeypatch.setattr(Drive, "direct", True)

    def committed() -> bool:
        synced.clear()
        put(space, extent, 1)
        space.commit(b"so")
        return bool(synced)

    assert [committed() for _ in range(4)] == [True, True, False, False]
    monkeypatch.setattr(share, "_share", lambda *_: None)
    with open(tmp_path / "linked", "wb") as target:
        assert space.link(extent, target.fileno(), 0)
    assert [committed() for _ in range(4)] == [False, True, False, False], "what is linked is written by the second"
    space.close()


@pytest.mark.parametrize("failing", ["fdatasync", "fsync"])
def test_a_record_that_was_written_and_not_flushed_is_no_generation(
    failing: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    first = failing == "fsync"  # which the first commit alone needs
    if not first:
        space.commit(b"one")
        put(space, extent, 2)

    def fails(_: int) -> None:
        raise OSError(errno.EIO, "no")

    space.generations._unsynced = False  # of the record, not of what it names
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fails)
        with pytest.raises(StorageError):
            space.commit(b"two")
    put(space, extent, 3)
    abandoned(space)
    again = opened(folders)
    assert [serial for serial, _ in again.generations.offers] == ([] if first else [1])
    again.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The drive keeps every flush until this is set."""
    gate, flush = threading.Event(), os.fdatasync

    def fdatasync(descriptor: int) -> None:
        assert gate.wait(30)
        flush(descriptor)

    gate.set()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    yield gate
    gate.set()


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_commit_that_the_drive_keeps_is_given_up_by_name_and_counts_for_nothing_when_it_comes_back(
    commits: int, folders: list[Path], held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    space, extent = begun(folders, timeout_s=0.1)
    for number in range(commits):
        put(space, extent, number)
        space.commit(b"before")
    put(space, extent, 7)
    space.generations._unsynced = False  # what is kept is the record, and it is whole
    held.clear()
    with pytest.raises(StorageError, match=r"a commit has not come back in 0.2 s") as caught:
        space.commit(b"kept")
    assert str(folders[0]) in str(caught.value)
    assert "commit-0: a commit has taken 0.1 s" in caplog.text
    for change in (lambda: put(space, extent, 8), lambda: space.commit(b"after")):
        with pytest.raises(StorageError, match="was given up and has not come back"):
            change()  # what the record names is not written over
    assert got(space, extent) == [7] * 6
    held.set()
    while space.generations.stuck:
        time.sleep(0.01)
    put(space, extent, 8)
    abandoned(space)
    again, extent = begun(folders, commits or None)
    assert again.generations.protected == (b"before" if commits else None)
    if commits:
        again.revert()
        assert got(again, extent) == [commits - 1] * 6
    again.close()


def test_a_commit_that_is_late_and_comes_back_in_time_is_one(folders: list[Path], held: threading.Event) -> None:
    space, extent = begun(folders, timeout_s=0.2)
    put(space, extent, 1)
    held.clear()
    threading.Timer(0.3, held.set).start()
    space.commit(b"late")
    put(space, extent, 2)
    abandoned(space)
    again, extent = begun(folders, 1)
    again.revert()
    assert got(again, extent) == [1] * 6
    again.close()


def test_a_space_whose_commit_the_drive_keeps_is_closed_and_the_next_run_takes_what_it_left(
    folders: list[Path], held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    space, extent = begun(folders, timeout_s=0.1)
    put(space, extent, 1)
    space.commit(b"one")
    put(space, extent, 2)
    held.clear()
    with pytest.raises(StorageError):
        space.commit(b"two")
    space.close()
    assert "not back from the drive: a commit" in caplog.text
    held.set()
    while space.generations.stuck:
        time.sleep(0.01)
    for claimed in space.generations._claims:
        claimed.leave()  # as the system does when the process ends
    again, extent = begun(folders, 1)
    again.revert()
    assert got(again, extent) == [1] * 6
    again.close()


@pytest.mark.parametrize("cut", [0, 16, 31, 40, -1])
@pytest.mark.parametrize("flip", [False, True])
def test_a_torn_or_changed_record_counts_for_nothing_and_the_other_opens(
    folders: list[Path], cut: int, flip: bool
) -> None:
    space, extent = begun(folders)
    for generation in (1, 2):
        put(space, extent, generation)
        space.commit(b"")
    file = Path(space.generations.path) / "commit-1"
    abandoned(space)
    data = bytearray(file.read_bytes())
    if flip:
        data[cut] ^= 1
    else:
        del data[cut:]
    file.write_bytes(data)
    again, extent = begun(folders, 1)
    assert again.generations.protected is not None
    again.revert()
    assert got(again, extent) == [1] * 6
    again.close()


def test_a_flipped_byte_of_a_generation_is_named_with_file_and_place(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"")
    path, at = space.stats().drives[0].path, extent.starts[0][0]
    abandoned(space)
    with open(path, "r+b") as file:
        file.seek(at + 7)
        file.write(b"\xff")
    again, extent = begun(folders, 1)
    again.revert()
    with pytest.raises(CorruptDataError) as caught:
        got(again, extent)
    assert caught.value.filename == path
    again.close()


def test_a_record_that_names_what_is_not_on_the_drive_is_not_offered(folders: list[Path]) -> None:
    space, extent = begun(folders)
    put(space, extent, 1)
    space.commit(b"")
    path = space.stats().drives[1].path
    abandoned(space)
    os.truncate(path, 4096)
    again = opened(folders)
    assert again.generations.offers == []
    again.close()


def hostile_mode(left: Path) -> None:
    left.chmod(0o777)


def hostile_link(left: Path) -> None:
    elsewhere = left.parent.parent / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (left / "swap").unlink()
    (left / "swap").symlink_to(elsewhere)


def hostile_second_name(left: Path) -> None:
    os.link(left / "swap", left.parent.parent / "elsewhere")


@pytest.mark.parametrize("change", [hostile_mode, hostile_link, hostile_second_name])
def test_a_directory_that_others_could_have_made_is_not_gone_on_from_and_nothing_outside_is_touched(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    space, extent = begun([folder])
    put(space, extent, 1)
    space.commit(b"")
    left = Path(space.generations.path)
    abandoned(space)
    change(left)
    before = (tmp_path / "elsewhere").read_bytes() if (tmp_path / "elsewhere").exists() else b""
    try:
        again = opened([folder])
    except (StorageError, SwapDirectoryError) as error:
        assert str(left) in str(error)
    else:
        assert again.generations.offers == []
        again.close()
    assert not before or (tmp_path / "elsewhere").read_bytes() == before


def test_a_process_that_ends_by_an_error_leaves_its_generation_and_one_that_ends_well_nothing(
    tmp_path: Path, run_python: Callable
) -> None:
    program = """
import sys
sys.path.insert(0, %r)
from pathlib import Path
from io_generations import begun, put
space, extent = begun([Path(sys.argv[1])])
put(space, extent, 1)
space.commit(b"")
%s
"""
    (tmp_path / "swap").mkdir()
    name = tmp_path / "io_generations.py"
    name.write_text(Path(__file__).read_text())
    for ending, left in (("raise SystemExit(0)", 0), ("1 / 0", 1)):
        run_python(program % (str(tmp_path), ending), tmp_path / "swap")
        assert len(list((tmp_path / "swap").iterdir())) == left


# --- records ---


def record(pieces: int = 3) -> Commit:
    stripes = Stripes((pieces - 1) * PIECE + 1, PIECE, (3, 1), 1)
    records = np.zeros(pieces, RECORD)
    records["state"] = 2
    kept = Kept("states", stripes, ((0, 4096), (8192, 12288)), np.array([0, 1, 0], np.uint8)[:pieces], records)
    names = (f"tiered-{'0' * 16}-r0", f"tiered-{'1' * 16}-r0")
    return Commit(5, "ab" * 8, WHO, names, (2, 1), (kept,), b"payload")


def test_a_record_is_what_was_encoded() -> None:
    found = decode(encode(record()), "path")
    assert (found.serial, found.run, found.identity, found.names, found.weights, found.payload) == (
        5, "ab" * 8, WHO, record().names, (2, 1), b"payload",
    )  # fmt: skip
    assert found.extents[0].stripes == record().extents[0].stripes
    assert found.extents[0].slots.tolist() == [0, 1, 0]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_record_file_holds_it_is_a_sound_record_or_a_named_error(data: st.DataObject) -> None:
    whole = bytearray(encode(record()))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(0, len(whole))) :]
    if data.draw(st.booleans()):  # and the hash fits what is there
        import xxhash

        body = bytes(whole[32:])
        whole[16:24] = len(body).to_bytes(8, "little")
        whole[24:32] = xxhash.xxh3_64_digest(body)
        whole[:16] = b"tiered commit 1\n"
    try:
        found = decode(bytes(whole), "path")
    except CorruptDataError as error:
        assert "path" in str(error)
    else:
        assert found.extents[0].slots.max() <= 1


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.none(), st.text(max_size=3), st.booleans())


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_header_of_any_values_with_a_right_hash_is_a_sound_record_or_a_named_error(data: st.DataObject) -> None:
    import json

    import xxhash

    whole = encode(record())
    length = int.from_bytes(whole[32:40], "little")
    header = json.loads(whole[40 : 40 + length])
    where = data.draw(
        st.sampled_from(["serial", "run", "names", "payload", "version", "identity", "weights", "extents"])
    )
    if where == "extents" and data.draw(st.booleans()):
        value = data.draw(st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3)))
        header["extents"][0][data.draw(st.integers(0, 5))] = value
    else:
        header[where] = data.draw(st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3)))
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + whole[40 + length :]
    made = b"tiered commit 1\n" + len(body).to_bytes(8, "little") + xxhash.xxh3_64_digest(body) + body
    try:
        found = decode(made, "path")
    except CorruptDataError:
        return
    assert found.serial >= 0
    assert all(kept.stripes.nbytes >= 0 for kept in found.extents)

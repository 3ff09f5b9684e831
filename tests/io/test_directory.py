"""A swap directory belongs to one run: refusals come before any write, and only the provably dead are reclaimed."""

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered.errors import StorageError, SwapDirectoryError
from tiered.io.directory import check, claim

HOLD = """
import sys, time
from tiered.io.directory import claim
claimed = claim(sys.argv[1])
claimed.create("swap")
print(claimed.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def start_owner(tmp_path: Path, start_python: Callable) -> Callable[[], tuple[subprocess.Popen[str], Path]]:
    """Starts processes that claim a directory below tmp_path and sit there."""

    def start() -> tuple[subprocess.Popen[str], Path]:
        owner = start_python(HOLD, tmp_path)
        return owner, Path(owner.stdout.readline().strip())

    return start


def test_a_claim_is_private_and_names_its_owner(tmp_path: Path) -> None:
    before = os.umask(0o277)
    try:
        claimed = claim(tmp_path, rank=3)
    finally:
        os.umask(before)
    os.close(claimed.create("swap"))
    path = Path(claimed.path)
    assert path.parent == tmp_path
    assert path.name.startswith("tiered-")
    assert path.name.endswith("-r3")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == {
        "lock": 0o600,
        "swap": 0o600,
    }
    owner = json.loads((path / "lock").read_text())
    assert owner["pid"] == os.getpid()
    assert owner["host"] == socket.gethostname()
    assert owner["started"]
    assert owner["boot"]
    claimed.release()
    claimed.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file", "link", "link with a slash", "dangling"])
def test_a_path_that_is_no_real_directory_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given"
    real = tmp_path / "real"
    real.mkdir()
    if kind == "file":
        path.write_bytes(b"precious")
    elif kind != "missing":
        path.symlink_to(tmp_path / "nowhere" if kind == "dangling" else real)
    given = f"{path}/" if kind == "link with a slash" else path
    for call in (claim, check):
        with pytest.raises(SwapDirectoryError, match=r"make it first|give a directory|target instead") as caught:
            call(given)
        assert caught.value.filename == str(path)
        assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    assert list(real.iterdir()) == []
    if kind == "file":
        assert path.read_bytes() == b"precious"


def test_a_read_only_drive_is_refused_by_name(tmp_path: Path, run_mounted: Callable) -> None:
    code = """
import subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[1]], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", sys.argv[1]], check=True)
from tiered.errors import SwapDirectoryError
from tiered.io import SwapSpace
try:
    SwapSpace([sys.argv[1]])
except SwapDirectoryError as error:
    assert error.filename == sys.argv[1], error
    print(error)
"""
    result = run_mounted(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "not writable" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try the rights of another user")
@pytest.mark.parametrize("mode", [0o700, 0o555])
def test_a_directory_of_another_user_is_refused_by_name(tmp_path: Path, run_python: Callable, mode: int) -> None:
    code = """
import os, sys
from tiered.errors import SwapDirectoryError
from tiered.io.directory import claim
os.chdir(sys.argv[1])  # so that the directories above need not be open to the other user
os.seteuid(65534)
try:
    claim("given")
except SwapDirectoryError as error:
    print(error)
"""
    (tmp_path / "given").mkdir(mode=mode)
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "given" in result.stdout
    assert "writable" in result.stdout
    assert list((tmp_path / "given").iterdir()) == []


def test_a_planted_link_in_place_of_the_swap_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    claimed = claim(tmp_path)
    (Path(claimed.path) / "swap").symlink_to(precious)
    with pytest.raises(SwapDirectoryError, match="swap"):
        claimed.create("swap")
    with pytest.raises(OSError, match=r"[Ss]ymbolic"):
        claimed.reopen("swap")
    claimed.release()
    assert precious.read_bytes() == b"precious"


def test_two_claims_in_one_process_and_two_processes_coexist(tmp_path: Path, start_owner: Callable) -> None:
    first, second = claim(tmp_path), claim(tmp_path)
    _, other = start_owner()
    third = claim(tmp_path)
    assert len({first.path, second.path, third.path, str(other)}) == 4
    assert all(Path(path).is_dir() for path in (first.path, second.path, third.path, other))
    for claimed in (first, second, third):
        claimed.release()
    assert list(tmp_path.iterdir()) == [other]


def test_what_a_killed_process_left_is_reclaimed(tmp_path: Path, start_owner: Callable) -> None:
    owner, left = start_owner()
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    assert (left / "swap").exists()
    claimed = claim(tmp_path)
    assert not left.exists()
    assert list(tmp_path.iterdir()) == [Path(claimed.path)]
    claimed.release()


def test_what_a_stopped_process_owns_is_left_alone(tmp_path: Path, start_owner: Callable) -> None:
    owner, held = start_owner()
    owner.send_signal(signal.SIGSTOP)
    claim(tmp_path).release()
    assert (held / "swap").exists()
    owner.send_signal(signal.SIGCONT)


@pytest.fixture
def leftover(tmp_path: Path, start_owner: Callable) -> Path:
    """The directory of a killed process."""
    owner, left = start_owner()
    owner.kill()
    owner.wait(60)
    return left


def _rewrite(lock: Path, **changes: object) -> None:
    lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))


def test_a_held_lock_protects_even_where_the_named_owner_is_dead(tmp_path: Path, leftover: Path) -> None:
    with (leftover / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        claim(tmp_path).release()
        assert (leftover / "swap").exists()
    claim(tmp_path).release()
    assert not leftover.exists()


def test_a_living_owner_protects_even_where_the_lock_is_free(tmp_path: Path, leftover: Path) -> None:
    stat_line = Path(f"/proc/{os.getpid()}/stat").read_text()
    started = stat_line.rpartition(")")[2].split()[19]
    _rewrite(leftover / "lock", pid=os.getpid(), started=started)
    claim(tmp_path).release()
    assert leftover.exists()
    _rewrite(leftover / "lock", started="1")  # the number was given again to another process since
    claim(tmp_path).release()
    assert not leftover.exists()


def test_an_owner_on_another_host_is_never_judged(tmp_path: Path, leftover: Path) -> None:
    _rewrite(leftover / "lock", host="elsewhere", boot="other")
    claim(tmp_path).release()
    assert leftover.exists()


def test_an_owner_of_an_earlier_boot_is_dead(tmp_path: Path, leftover: Path) -> None:
    _rewrite(leftover / "lock", pid=os.getpid(), boot="earlier")
    claim(tmp_path).release()
    assert not leftover.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_an_unreadable_owner_protects_contents_but_not_a_half_made_claim(
    tmp_path: Path, leftover: Path, text: str
) -> None:
    (leftover / "lock").write_text(text)
    claim(tmp_path).release()
    assert (leftover / "swap").exists()
    (leftover / "swap").unlink()
    claim(tmp_path).release()
    assert not leftover.exists()


def test_a_directory_without_a_lock_goes_only_when_it_is_empty(tmp_path: Path, leftover: Path) -> None:
    (leftover / "lock").unlink()
    claim(tmp_path).release()
    assert (leftover / "swap").exists()
    (leftover / "swap").unlink()
    claim(tmp_path).release()
    assert not leftover.exists()


def test_names_that_are_not_ours_and_links_with_our_names_are_left_alone(tmp_path: Path, leftover: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    leftover.rename(elsewhere)
    link = tmp_path / leftover.name
    link.symlink_to(elsewhere)
    (tmp_path / "tiered-notes").mkdir()
    claim(tmp_path).release()
    assert (elsewhere / "swap").exists()
    assert link.is_symlink()
    assert (tmp_path / "tiered-notes").is_dir()


def test_a_forked_child_leaves_the_directory_to_its_parent(tmp_path: Path, run_python: Callable) -> None:
    code = """
import os, sys
from tiered.io.directory import claim
claimed = claim(sys.argv[1])
child = os.fork()
if child == 0:
    claimed.release()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.path.exists(os.path.join(claimed.path, "lock"))
claim(sys.argv[1]).release()  # the lock is still held
assert os.path.exists(os.path.join(claimed.path, "lock"))
claimed.release()
"""
    result = run_python(code, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_the_path_that_is_never_given_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered.io.directory._PATH_LOCK_SECONDS", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="lslocks"):
        claim(tmp_path)
    os.close(descriptor)
    assert list(tmp_path.iterdir()) == []


def test_claiming_leaks_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    claim(tmp_path).release()
    with pytest.raises(SwapDirectoryError):
        claim(tmp_path / "missing")
    assert len(os.listdir("/proc/self/fd")) == len(before)

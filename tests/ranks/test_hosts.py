"""Two hosts under torchrun train what one rank trains, and neither hangs when the link between them is cut.

A host is a network namespace with a host name and a swap directory of its own; a veth pair joins the two. Where the
system does not permit namespaces the tests are skipped.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import hosts_worker
from ranks.launch import VARIABLES

WORKER = Path(__file__).parent / "hosts_worker.py"
LINK = "veth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen in the two namespaces only
RUN_S = 120.0
CUT_S = 6 * hosts_worker.TIMEOUT_S  # a guard against a hang: no figure of this package
_numbers = itertools.count()


class Host:
    """A namespace, what runs in it, and its swap directory. The host is named by its address: a name that resolves."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address = ADDRESSES[number]
        self.name = f"tiered-{os.getpid()}-{next(_numbers)}"
        self.swap = folder / f"swap{number}"
        self.output = folder / f"host{number}.txt"
        self.swap.mkdir()
        self._agent: subprocess.Popen[bytes] | None = None

    def torchrun(self, per_node: int, task: str, out: Path) -> subprocess.Popen[bytes]:
        """Start this host's part of a run."""
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", "--rdzv-id=tiered"]
        nodes = ["--nnodes=2", f"--nproc-per-node={per_node}", f"--local-addr={self.address}"]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.address} && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.name, *named, sys.executable, "-m", "torch.distributed.run", *nodes]
        surroundings = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        with open(self.output, "wb") as log:
            self._agent = subprocess.Popen(
                [*command, *rendezvous, str(WORKER), task, str(self.swap), str(out)],
                env={**surroundings, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self._agent

    def ended(self) -> bool:
        return self._agent is not None and self._agent.poll() is not None

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", LINK, "down")

    def end(self) -> None:
        """Kill everything in the namespace, and remove it."""
        living = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in living.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        if self._agent is not None:
            self._agent.wait()
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"two hosts need {missing[0]}, which is not installed")
    made = [Host(number, tmp_path) for number in (0, 1)]
    try:
        try:
            for host in made:
                ip("netns", "add", host.name)
            ip("link", "add", LINK, "netns", made[0].name, "type", "veth", "peer", "name", LINK, "netns", made[1].name)
            for host in made:
                ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
                for link in ("lo", LINK):
                    ip("-n", host.name, "link", "set", link, "up")
            subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts need namespaces, which are not permitted here: {error.stderr.strip()}")
        yield made
    finally:
        for host in made:
            host.end()


def wait_for(what: Callable[[], bool], seconds: float, hosts: list[Host]) -> None:
    """Fail, with all output, where `what` does not come about in time, or before every run has ended."""
    deadline = time.monotonic() + seconds
    over = False
    while not what():
        if over:
            pytest.fail("\n".join(host.output.read_text(errors="replace") for host in hosts))
        over = time.monotonic() > deadline or all(host.ended() for host in hosts)
        time.sleep(0.02)


def running(pid: int) -> bool:
    """A zombie has ended: torchrun, which waits for the other host, may not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_hosts_train_what_one_rank_trains_on_the_joined_batch(
    per_node: int, hosts: list[Host], tmp_path: Path
) -> None:
    agents = [host.torchrun(per_node, "train", tmp_path) for host in hosts]
    wait_for(lambda: all(host.ended() for host in hosts), RUN_S, hosts)
    assert [agent.returncode for agent in agents] == [0, 0], [host.output.read_text() for host in hosts]
    got = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2 * per_node)]
    assert sorted(seen["host"] for seen in got) == sorted(ADDRESSES * per_node)
    for stage in (3, 1):
        want = hosts_worker.train(stage, hosts[0].swap)
        for seen in got:
            torch.testing.assert_close(seen[stage]["losses"], want["losses"], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(seen[stage]["weights"], want["weights"], rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(seen[stage]["weights"], got[0][stage]["weights"], rtol=0, atol=0)
    assert [list(host.swap.iterdir()) for host in hosts] == [[], []]


def test_hosts_whose_link_is_cut_in_the_middle_of_training_both_say_so(hosts: list[Host], tmp_path: Path) -> None:
    for host in hosts:
        host.torchrun(1, "endless", tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("*.started"))) == 2, RUN_S, hosts)
    hosts[1].cut()
    workers = [int(path.read_text()) for path in tmp_path.glob("*.started")]
    wait_for(lambda: not any(running(pid) for pid in workers), CUT_S, hosts)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["type"] == "RankError", seen
        assert f"rank {1 - rank}" in seen["message"]
        assert seen["left"] == []

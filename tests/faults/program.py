"""Training that something goes wrong with, each scenario in a fresh process: prints what was seen, as JSON.

Usage: program.py SCENARIO SWAP_DIRECTORY. Run by the tests of this directory, which set the time limit. Limits of the
process, mounts and signals are real here and end with the process.
"""

import fcntl
import hashlib
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.argv[1:2] == ["no_extension"]:
    sys.modules["tiered._native"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError

import torch
from torch import Tensor, nn

import tiered
from tiered.errors import StorageError, TieredError

MIB = 1 << 20


class Chain(nn.Module):
    """Equal layers in a row; `width` 512 makes one layer 1 MiB of float32."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.pow(2).mean()


def chain(layers: int = 6, width: int = 256) -> Chain:
    """The same model every time."""
    torch.manual_seed(3)
    return Chain(layers, width)


def config(swap: Path, **settings: Any) -> tiered.Config:
    """Everything on the drive, on the CPU device."""
    chosen = {"device": "cpu", "host_budget": "24MiB", "param_tier": "nvme", "optimizer_tier": "nvme", "nvme": swap}
    return tiered.Config(**{**chosen, **settings})


def steps(model: Chain, optimizer: tiered.AdamW, count: int) -> list[float]:
    """The losses of `count` whole training steps on one batch."""
    x = torch.linspace(-1, 1, 2 * model.width).reshape(2, model.width)
    losses = []
    for _ in range(count):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def warm_up() -> None:
    """Plain torch trains a layer: what it takes once (libraries, the modules an optimizer loads) is taken then."""
    model = chain(1, 1024)
    model(torch.ones(2, 1024)).backward()
    torch.optim.AdamW(model.parameters()).step()


def digest(model: nn.Module, optimizer: tiered.AdamW) -> str:
    """Of the bits of every weight and moment."""
    seen = hashlib.sha256()
    for tensor in model.state_dict().values():
        seen.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for tensor in (state["exp_avg"], state["exp_avg_sq"]):
            seen.update(tensor.numpy().tobytes())
    return seen.hexdigest()


def train(model: Chain, chosen: tiered.Config, count: int = 3) -> dict[str, Any]:
    """Shards, trains and closes; what was computed, bit for bit."""
    with tiered.shard(model, chosen):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        losses = steps(model, optimizer, count)
        return {"losses": losses, "digest": digest(model, optimizer)}


def refusal(model: Chain, chosen: tiered.Config) -> dict[str, Any]:
    """The error that sharding raises, and whether the model is still the plain one it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    caught: Exception | None = None
    try:
        tiered.shard(model, chosen)
    except TieredError as error:
        caught = error
    after = model.state_dict()
    plain = all(type(p) is nn.Parameter for p in model.parameters())
    kept = plain and all(torch.equal(before[name], after[name]) for name in before)
    model(torch.ones(1, model.width)).backward()
    return {
        "error": type(caught).__name__,
        "message": str(caught),
        "kept": kept,
        "files": os.listdir(chosen.directories[0]),
    }


def mount(path: Path, options: str) -> None:
    """A small memory file system; private to this process, which unshare(1) started."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    if found is None:
        raise KeyError(field)
    return int(found[1]) * 1024


# --- scenarios ---


def full(swap: Path) -> Any:
    """A drive of 4 MiB takes a model of 1 MiB of states, but not one of 24 MiB, even after a failure."""
    mount(swap, "size=4m")
    model = chain(6, 512)
    return {
        "refused": refusal(model, config(swap)),
        "small": train(chain(2, 128), config(swap)),
        "left": os.listdir(swap),
    }


def read_only(swap: Path) -> Any:
    mount(swap, "ro")
    return refusal(chain(), config(swap))


def short_write(swap: Path) -> Any:
    """The system cuts writes beyond a file size short in the middle of training."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model = chain()
    tiered.shard(model, config(swap))
    optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2 + 100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    seen = []
    for _ in range(3):
        try:
            steps(model, optimizer, 1)
            seen.append({"error": "none"})
        except TieredError as error:
            names = re.search(r"[\w/.-]+/swap", str(error))
            seen.append({"error": type(error).__name__, "message": str(error), "path": names and names[0]})
    tiered.close(model, keep_weights=False)
    return {"seen": seen, "left": os.listdir(swap)}


def short_write_while_sharding(swap: Path) -> Any:
    """Writes are cut short once the first group has gone to the drive."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    from tiered.zero import build

    fill = build._fill

    def cut(group: Any, kind: str, dtype: torch.dtype) -> None:
        if group.index == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        fill(group, kind, dtype)

    build._fill = cut
    return refusal(chain(), config(swap))


def no_locked_memory(swap: Path) -> Any:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    chosen = config(swap, device="emulated", device_budget="2MiB")
    return [train(chain(), config(swap)), train(chain(), chosen)]


def reference(swap: Path) -> Any:
    """A training that other processes must repeat bit for bit."""
    from tiered.optim import kernels

    return {"native": kernels.native(), **train(chain(), config(swap), 4)}


def no_extension(swap: Path) -> Any:
    """As `reference`, in a process that cannot import the extension (see the top)."""
    return reference(swap)


def endless(swap: Path) -> Any:
    """Trains until somebody ends the process; says when it has begun."""
    model = chain(8, 512)
    tiered.shard(model, config(swap, durability=os.environ.get("TIERED_TEST_DURABILITY", "process")))
    optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
    steps(model, optimizer, 2)
    print("training", flush=True)
    while True:
        steps(model, optimizer, 1)


def bounded_by_the_system(swap: Path) -> Any:
    """States of 257 MiB where the kernel gives the process 128 MiB of data beyond what torch has taken."""
    warm_up()
    return _bounded(swap, 64, 512, memory("VmData") + 128 * MIB, "48MiB")


def states_of_three_gib(swap: Path) -> Any:
    """States of 3.1 GiB in a process that may have 1.5 GiB of data."""
    return _bounded(swap, 48, 2048, 1536 * MIB, "768MiB")


def _bounded(swap: Path, layers: int, width: int, limit: int, budget: str) -> Any:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    chosen = config(swap, host_budget=budget, io_threads=2)  # a thread's stack is 8 MiB of data
    with tiered.deferred_init(chosen):
        model = chain(layers, width)
    states = 16 * sum(p.numel() for p in model.parameters())
    refused = False
    try:
        torch.empty(limit, dtype=torch.uint8)
    except RuntimeError:
        refused = True
    with tiered.shard(model, chosen):
        losses = steps(model, tiered.AdamW(model.parameters(), lr=1e-3), 2)
        tiered.close(model, keep_weights=False)
    return {"states": states, "limit": limit, "refused": refused, "losses": losses}


def resident_peak(swap: Path) -> Any:
    """How far the process grows, at most, while it builds and trains 48 layers of 4 MiB under 64 MiB."""
    warm_up()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    chosen = config(swap, host_budget=64 * MIB)
    with tiered.deferred_init(chosen):
        model = chain(48, 1024)
    tiered.shard(model, chosen)
    steps(model, tiered.AdamW(model.parameters(), lr=1e-3), 2)
    peak = memory("VmHWM")
    used = tiered.stats(model).peak_bytes["host"]
    tiered.close(model, keep_weights=False)
    return {"growth": peak - before, "host peak": used}


def dead_drive(swap: Path, kind: str) -> Any:
    """One of two drives stops answering reads, or writes, in the middle of a step, and never does again."""
    sys.path.append(str(Path(__file__).parents[1]))
    from bad_drives import bad_drives

    from tiered.io import engine, portable

    engine._CLOSE_SECONDS = portable._CLOSE_SECONDS = 0.3
    good, dead = swap / "good", swap / "dead"
    good.mkdir()
    dead.mkdir()
    seen: dict[str, Any] = {"errors": []}
    with bad_drives() as drives:
        model = chain()
        tiered.shard(model, config(swap, nvme=[good, dead], host_budget="6MiB", drive_timeout_s=0.3))
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer, 2)
        drives.rule = lambda call: (
            drives.stall() if call.write == (kind == "write") and call.path.startswith(str(dead)) else None
        )
        for _ in range(3):
            try:
                steps(model, optimizer, 1)
            except TieredError as error:
                number = error.errno if isinstance(error, StorageError) else None
                seen["errors"].append([type(error).__name__, number, str(error)])
        seen["steps"] = tiered.stats(model).steps
        tiered.close(model, keep_weights=False)
        seen["left"] = [len(os.listdir(path)) for path in (good, dead)]
        seen["bytes"] = [p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta]
        print(json.dumps(seen), flush=True)
        os._exit(0)  # with the threads in the calls that never come back


def dead_reads(swap: Path) -> Any:
    return dead_drive(swap, "read")


def dead_writes(swap: Path) -> Any:
    return dead_drive(swap, "write")


# --- real file systems; the mounts are private to this process, and end with it ---


def file_system(swap: Path, mib: int, *made: str, options: str = "") -> str:
    """Mounts a new file system of `mib` MiB in a file on `swap`; gives its device. `made`: mkfs and its options."""
    image = swap.with_name("image")
    with image.open("wb") as file:
        file.truncate(mib * MIB)
    subprocess.run([*made, "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", ",".join(filter(None, ["loop", options])), str(image), str(swap)], check=True)
    found = subprocess.run(["findmnt", "-no", "SOURCE", str(swap)], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def full_without_fallocate(swap: Path) -> Any:
    """ext2 cannot reserve space: the C library writes to each block instead. Alone, and as the second of two drives, of
    which the first then has too little room as well."""
    other = swap.with_name("other")
    other.mkdir()
    mount(other, "size=14m")
    file_system(swap, 12, "mkfs.ext2", "-O", "^extent")
    free = os.statvfs(swap).f_bavail
    both = config(other, nvme=[other, swap], param_tier="nvme")
    return {
        "refused": [refusal(chain(6, 512), config(swap)), refusal(chain(10, 512), both)],
        "given back": os.statvfs(swap).f_bavail == free,
        "small": train(chain(2, 128), config(swap)),
        "left": [os.listdir(swap), os.listdir(other)],
    }


def filled_by_another(swap: Path) -> Any:
    """Another program takes all that is left of the drive once the model is sharded."""
    file_system(swap, 64, "mkfs.ext4")
    model = chain()
    with tiered.shard(model, config(swap)):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        try:
            with (swap / "other").open("wb", buffering=0) as other:
                while other.write(bytes(MIB)):
                    pass
        except OSError as error:
            full = error.errno
        losses = steps(model, optimizer, 3)
        return {"errno": full, "free": os.statvfs(swap).f_bfree, "losses": losses, "digest": digest(model, optimizer)}


def _failing(swap: Path, fail: Callable[[str], None], mend: Callable[[], None] = bool, **settings: Any) -> Any:
    """Trains two steps, lets the file system fail, and trains on; `mend` comes after the close."""
    device = file_system(swap, 64, "mkfs.ext4", options="errors=remount-ro")
    model = chain()
    tiered.shard(model, config(swap, host_budget="6MiB", **settings))
    optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
    losses = steps(model, optimizer, 2)
    fail(device)
    seen = []
    try:
        for _ in range(3):
            try:
                steps(model, optimizer, 1)
                seen.append(["none", None, ""])
            except TieredError as error:
                seen.append([type(error).__name__, getattr(error, "errno", None), str(error)])
        taken = tiered.stats(model).steps
        tiered.close(model, keep_weights=False)
    finally:
        mend()
    return {"losses": losses, "seen": seen, "steps": taken}


def goes_read_only(swap: Path) -> Any:
    return _failing(swap, lambda device: _trigger(device))


def _trigger(device: str) -> None:
    """An error of the file system, after which it takes no more writes."""
    Path(f"/sys/fs/ext4/{os.path.basename(device)}/trigger_fs_error").write_text("1")


def goes_away(swap: Path) -> Any:
    return _failing(swap, lambda device: _ioctl(swap, 0x8004587D, 1))  # FS_IOC_SHUTDOWN, as of a drive pulled out


def freezes(swap: Path) -> Any:
    """The file system takes no write and gives no answer: a stall inside the kernel, which no signal ends."""
    from tiered.io import engine

    engine._CLOSE_SECONDS = 0.3

    def freeze(device: str) -> None:
        # whatever becomes of this process, its threads come back: nothing else could end them
        thaw = (
            "import fcntl, os, sys, time; time.sleep(60); fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0xC0045878, 0)"
        )
        subprocess.Popen([sys.executable, "-c", thaw, str(swap)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _ioctl(swap, 0xC0045877, 0)  # FIFREEZE

    return _failing(swap, freeze, lambda: _ioctl(swap, 0xC0045878, 0), drive_timeout_s=0.3)  # FITHAW


def _ioctl(path: Path, request: int, argument: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, request, struct.pack("I", argument))
    finally:
        os.close(descriptor)


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    function.__name__: function
    for function in (
        full, read_only, short_write, short_write_while_sharding, no_locked_memory, reference, no_extension, endless,
        bounded_by_the_system, states_of_three_gib, resident_peak, dead_reads, dead_writes,
        full_without_fallocate, filled_by_another, goes_read_only, goes_away, freezes,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))))

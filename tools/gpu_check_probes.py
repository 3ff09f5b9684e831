"""Part of `tools/gpu_check`: what the link, the drive and the memory of this machine give, by this project's own means.

    python tools/gpu_check_probes.py SETTINGS        run by tools/gpu_check

link    H2D and D2H, alone and together, from registered memory (`Memory`, `CudaDevice.pin`) and, beside it in the same
        rounds, from torch's pinned memory; bytes that are really page-locked for what was asked, of both
drive   read, write, and both at once, through `tiered.io.SwapSpace`, checksums included
memory  the CPU AdamW kernel as the runtime calls it (bf16 gradient, bf16 copy out) and, over the same memory, torch's
        copy and triad; bytes counted once, write-allocation is not counted
"""

import contextlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch
from gpu_check_decoder import Figures, Machine, Settings, emit
from torch import Tensor

import tiered
from tiered.device.base import Device
from tiered.device.cuda import CudaDevice
from tiered.device.emulated import EmulatedDevice
from tiered.device.memory import Memory
from tiered.io import SwapSpace
from tiered.optim import kernels

PIECE_BYTES = 16 << 20  # what `locked_bytes` asks about at once
DRIVE_S = 3.0  # of each direction
ROUNDS = 5


def main() -> None:
    settings = Settings.given()
    machine = Machine(settings.device)
    emit(
        versions={
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "kernels": "native" if kernels.native() else "portable",
        }
    )
    failed = False
    for name, probe in (("link", link), ("memory", memory), ("drive", drive)):
        if settings.left_s() > 0:
            try:
                emit(**{name: probe(settings, machine)})
            except Exception:  # the others are measured all the same
                traceback.print_exc()
                failed = True
    sys.exit(int(failed))


# --- link ---


def link(settings: Settings, machine: Machine) -> Figures:
    """Rates of both directions from our memory and from torch's, medians over rounds that alternate between them."""
    nbytes = (4 << 20) if settings.small else 5 << 28  # no power of two: torch's pinned allocator rounds up to one
    device: Device = CudaDevice() if machine.cuda else EmulatedDevice(tiered.Emulation(poison=False))
    with contextlib.closing(device):
        ours, seconds = _registered(device, nbytes)
        theirs = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=machine.cuda).fill_(1) for _ in range(2)]
        places = [device.allocate(nbytes) for _ in range(2)]
        for place in places:
            device.commit(place)
        there = [place.bytes for place in places]
        contenders = {
            "ours": _our_copies(device, [m.bytes for m in ours], there),
            "torch": _torch_copies(machine, theirs, there),
        }
        found = _race(machine, contenders, nbytes)
        found["register_s_per_gib"] = seconds / (2 * nbytes / 2**30)
        found["asked_bytes"] = 2 * nbytes
        found["ours_locked_bytes"] = sum(locked_bytes(m.bytes) for m in ours)
        found["torch_locked_bytes"] = _torch_pool_bytes(machine)
        for memory_ in ours:
            device.unpin(memory_)
    return found


def _registered(device: Device, nbytes: int) -> tuple[list[Memory], float]:
    """Two pieces of touched host memory, page-locked, and the seconds that locking took."""
    memories = [Memory(nbytes, committed=True) for _ in range(2)]
    for memory_ in memories:
        memory_.bytes.fill_(1)
    start = time.perf_counter()
    for memory_ in memories:
        device.pin(memory_)
    return memories, time.perf_counter() - start


Copies = dict[str, Callable[[], object]]


def _our_copies(device: Device, host: list[Tensor], there: list[Tensor]) -> Copies:
    def inward() -> list[object]:
        return [device.copy_in(there[0], host[0])]

    def outward() -> list[object]:
        return [device.copy_out(host[1], there[1])]

    return _each_way(inward, outward, lambda events: [event.wait() for event in events])


def _torch_copies(machine: Machine, host: list[Tensor], there: list[Tensor]) -> Copies:
    """As plain torch does it: `copy_(non_blocking=True)` on a stream for each direction."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if machine.cuda else []

    def given(way: int, destination: Tensor, source: Tensor) -> list[object]:
        with torch.cuda.stream(streams[way]) if streams else contextlib.nullcontext():
            destination.copy_(source, non_blocking=True)
        return []

    return _each_way(
        lambda: given(0, there[0], host[0]),
        lambda: given(1, host[1], there[1]),
        lambda _: [stream.synchronize() for stream in streams],
    )


def _each_way(
    inward: Callable[[], list[object]], outward: Callable[[], list[object]], finish: Callable[[list], object]
) -> Copies:
    return {
        "h2d": lambda: finish(inward()),
        "d2h": lambda: finish(outward()),
        "both": lambda: finish(inward() + outward()),
    }


def _race(machine: Machine, contenders: dict[str, Copies], nbytes: int) -> Figures:
    """Median bytes a second by contender and way; "both" counts the bytes of one direction. Who is first alternates."""
    rates: dict[str, list[float]] = {}
    for number in range(-1, ROUNDS):  # the first warms up
        names = list(contenders) if number % 2 else list(reversed(contenders))
        for name in names:
            for way, copy in contenders[name].items():
                seconds = machine.seconds(copy, 3)
                if number >= 0:
                    rates.setdefault(f"{name}_{way}_bytes_per_s", []).append(nbytes / seconds)
    return {name: statistics.median(values) for name, values in rates.items()}


def locked_bytes(host: Tensor) -> int:
    """Bytes of a host tensor that CUDA knows as page-locked, asked piece by piece."""
    pieces = host.split(PIECE_BYTES)
    return sum(piece.numel() for piece in pieces if piece.is_pinned())


def _torch_pool_bytes(machine: Machine) -> int:
    """Bytes torch's pinned allocator has taken from CUDA for what it was asked."""
    if not machine.cuda:
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))  # older and newer torch


# --- memory ---


def memory(settings: Settings, machine: Machine) -> Figures:
    """Bytes a second of the update and of plain torch over the same memory, best of the rounds."""
    count = (1 << 20) if settings.small else 1 << 28
    whole = Memory(16 * count, committed=True)  # the same kind of memory as the runtime's: large pages where it can
    exp_avg, exp_avg_sq, master = (whole.view(torch.float32, i * count, (i + 1) * count) for i in range(3))
    grad, copy = (whole.view(torch.bfloat16, i * count, (i + 1) * count) for i in (6, 7))
    for tensor, value in ((exp_avg, 1e-3), (exp_avg_sq, 1e-6), (master, 0.02), (grad, 1e-3), (copy, 0.0)):
        tensor.fill_(value)
    segment = kernels.Segment(
        start=0, stop=count, lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10
    )
    state = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    seconds: dict[str, list[float]] = {"adam": [], "copy": [], "triad": []}
    for _ in range(ROUNDS):
        seconds["adam"].append(_timed(lambda: kernels.adamw([segment], grad=grad, param_out=copy, **state)))
        seconds["copy"].append(_timed(lambda: exp_avg.copy_(exp_avg_sq)))
        seconds["triad"].append(_timed(lambda: torch.add(exp_avg_sq, master, alpha=1e-9, out=exp_avg)))
    each = {"adam": 28, "copy": 8, "triad": 12}
    rates = {name: each[name] * count / min(taken) for name, taken in seconds.items()}
    found = {f"{name}_bytes_per_s": rate for name, rate in rates.items()}
    found["dram_bytes_per_s"] = max(rates.values())
    found["adam_share_of_dram"] = rates["adam"] / max(rates["copy"], rates["triad"])
    found["adam_parameters_per_s"] = count / min(seconds["adam"])
    found["threads"] = torch.get_num_threads()
    return found


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- drive ---


def drive(settings: Settings, machine: Machine) -> Figures:
    """Bytes a second of writing, of reading, and of the two at once (each one's share named), over about 3 s each."""
    nbytes = (4 << 20) if settings.small else 1 << 30
    lasting = 0.05 if settings.small else DRIVE_S
    with SwapSpace([settings.swap]) as space:
        first, second = space.allocate(nbytes, "probe"), space.allocate(nbytes, "probe")
        source, target = Memory(nbytes, committed=True), Memory(nbytes, committed=True)
        tile = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        source.bytes.view(-1, tile.numel()).copy_(tile)
        for extent in (first, second):
            space.write(extent, source.address, nbytes).wait()  # lays the file out: not counted

        def write() -> None:
            space.write(first, source.address, nbytes).wait()

        def read() -> None:
            space.read(second, target.address, nbytes).wait()

        def both() -> None:
            tickets = [space.write(first, source.address, nbytes), space.read(second, target.address, nbytes)]
            for ticket in tickets:
                ticket.wait()

        figures: Figures = {"direct": space.stats().drives[0].direct, "free_bytes": settings.free_swap_bytes()}
        for name, work, moved in (("write", write, 1), ("read", read, 1), ("mixed", both, 2)):
            figures[f"{name}_bytes_per_s"] = moved * nbytes / _repeated(work, lasting)
    return figures


def _repeated(work: Callable[[], None], lasting: float) -> float:
    """Mean seconds of `work`, done again and again for about `lasting` seconds."""
    start, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - start < lasting:
        work()
        times += 1
    return (time.perf_counter() - start) / times


if __name__ == "__main__":
    main()

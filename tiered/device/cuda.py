"""A CUDA GPU as a device; the only importer of torch.cuda.

Memory comes from torch's caching allocator by resizing a buffer's storage, so that it is handed on in the order of the
compute stream; host memory is page-locked by registering it with the driver. The waits are `device.streams`'.

Invariants:
1. Nothing here waits for the whole device, and nothing but `Event.wait`, what brings values to the host
   (`to_host`, `CudaBuffer.read`) or from it (`write`), and `close` waits at all.
2. torch's settings, its current device and its current stream are as the caller left them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tiered.device.buffer import Buffer
from tiered.device.memory import Memory
from tiered.device.pinning import Pinning
from tiered.device.streams import Streams
from tiered.device.ticket import Event
from tiered.errors import ConfigError, UsageError

_POLL_S = 1e-4


def available() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


class CudaEvent:
    """A point of a CUDA stream; see `device.ticket.Event`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        make: Any = torch.cuda.Event
        self.raw = make(blocking=True)  # waiting must not burn the core that computes the optimizer
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self, timeout: float | None = None) -> None:
        if timeout is None:
            self.raw.synchronize()
            return
        end = time.monotonic() + timeout
        while not self.raw.query():
            if time.monotonic() > end:
                raise TimeoutError(f"the GPU did not get there within {timeout} s")
            time.sleep(_POLL_S)


def _raw(event: Event) -> Any:
    """The driver's event. Raises RuntimeError for a point of something else: no CUDA stream can wait for that."""
    if not isinstance(event, CudaEvent):
        raise RuntimeError(f"a CUDA stream cannot wait for a {type(event).__name__}")
    return event.raw


class CudaStream:
    """One CUDA stream; see `device.streams.Stream` and `WorkStream`."""

    def __init__(self, stream: torch.cuda.Stream, pinning: Pinning) -> None:
        self._stream = stream
        self._pinning = pinning

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        self._stream.wait_event(_raw(event))

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        host = source if destination.is_cuda else destination
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for start, stop in self._pinning.pieces(host):
                destination[start:stop].copy_(source[start:stop], non_blocking=True)


class CudaBuffer(Buffer):
    """Memory of torch's caching allocator that comes and goes under one storage object."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory.untyped_storage().resize_(0)
        self.stream: torch.cuda.Stream | None = None  # in whose order the memory was handed out
        super().__init__(nbytes, memory)

    @property
    def committed(self) -> bool:
        return self.stream is not None

    def read(self, out: torch.Tensor, offset: int) -> None:
        out.copy_(self.bytes[offset : offset + out.numel()])

    def write(self, data: torch.Tensor, offset: int) -> None:
        self.bytes[offset : offset + data.numel()].copy_(data)

    def commit(self, stream: torch.cuda.Stream) -> None:
        """Take memory in the order of `stream`, which is the current one."""
        self.bytes.untyped_storage().resize_(self.nbytes)
        self.stream = stream

    def decommit(self) -> None:
        if self.exported():
            raise RuntimeError(f"{self.nbytes} bytes of device memory are still viewed by a tensor")
        self.bytes.untyped_storage().resize_(0)
        self.stream = None


class CudaDevice(Streams):
    """See `device.base.Device`."""

    name = "cuda"
    in_place = False

    def __init__(self) -> None:
        """The GPU of this process: the current one, or under torchrun the one of its local rank.

        Raises ConfigError where there is none.
        """
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda': torch sees no GPU: use device='cpu', or a torch built for CUDA")
        self.torch_device = torch.device("cuda", chosen_index())
        self._pinning = Pinning(_register, _unregister)
        with torch.cuda.device(self.torch_device):
            make: Any = torch.cuda.Stream
            self._raw = (make(), make(), make())
        super().__init__(*(CudaStream(stream, self._pinning) for stream in self._raw))

    def allocate(self, nbytes: int) -> CudaBuffer:
        return CudaBuffer(nbytes, self.torch_device)

    def commit(self, buffer: Buffer) -> None:
        if isinstance(buffer, CudaBuffer) and not buffer.committed:
            with torch.cuda.device(self.torch_device):
                try:
                    buffer.commit(self._compute())
                except torch.cuda.OutOfMemoryError as error:
                    raise MemoryError(f"the GPU has no {buffer.nbytes} bytes free: {error}") from error

    def release(self, buffer: Buffer) -> None:
        if isinstance(buffer, CudaBuffer) and buffer.stream is not None:
            current = self._compute()
            if buffer.stream != current:  # it was used here: the stream that gets the memory back waits for that
                buffer.stream.wait_stream(current)
            buffer.decommit()

    def fence(self) -> CudaEvent:
        return CudaEvent(self._compute())

    def order(self, event: Event) -> None:
        self._compute().wait_event(_raw(event))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def pin(self, memory: Memory) -> None:
        self._pinning.pin(memory)

    def unpin(self, memory: Memory) -> None:
        self._pinning.unpin(memory)

    def pinned_bytes(self) -> int:
        return self._pinning.pinned_bytes

    def allocated(self) -> tuple[int, int]:
        found: Any = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        whole = found["allocated_bytes"]["all"] if found else {"current": 0, "peak": 0}
        return int(whole["current"]), int(whole["peak"])

    def fragmentation_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device))

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free) + self.fragmentation_bytes()

    def check_usable(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured around a sharded module: its weights move between calls, so a replay "
                "would read other memory. Capture parts that hold no sharded parameters, or run without the graph"
            )

    def close(self) -> None:
        for stream in self._raw:
            stream.synchronize()
        self._pinning.close()

    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)


def chosen_index() -> int:
    """The GPU of this process."""
    if "LOCAL_RANK" in os.environ and torch.cuda.device_count() > 1:
        return int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    return torch.cuda.current_device()


def _register(address: int, nbytes: int) -> bool:
    """Page-lock a range for every GPU; False where the driver refuses."""
    if int(_driver().cudaHostRegister(address, nbytes, 1)) == 0:  # 1: portable, for every context
        return True
    _forget_error()
    return False


def _unregister(address: int) -> None:
    if int(_driver().cudaHostUnregister(address)) != 0:
        _forget_error()


def _driver() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()


def _forget_error() -> None:
    """Let a checked launch take the driver's last error, which torch would else find after some later kernel."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)

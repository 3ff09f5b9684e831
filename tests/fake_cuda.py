"""A stand-in for `torch.cuda` on a machine without a GPU, so that `tiered.device.cuda` runs line by line.

Streams are threads that copy in order, late and at random (those of the emulated device), the current stream is one
that has done its work when it has been given, and "cuda" tensors are CPU tensors. What it cannot show is what only a
GPU does: kernels that run late (the deferred compute stream shows that for the same waits) and the driver's own rules.

Invariant: what the runtime must not use inside a step (a wait for the whole device) is not here, so using it fails.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiered.device import cuda
from tiered.device.emulated import Link
from tiered.device.ticket import Event as Reached
from tiered.device.ticket import Finished

_seeds = itertools.count()
_links: list[Link] = []


def _new_link() -> Link:
    _links.append(Link("cuda", None, 1e-3, next(_seeds)))
    return _links[-1]


class Stream:
    """Of `torch.cuda.Stream`: what the device uses."""

    def __init__(self, link: Link | None = None) -> None:
        self.link = link or _new_link()

    def wait_event(self, event: Event) -> None:
        self.link.wait(event.reached)

    def wait_stream(self, other: Stream) -> None:
        self.link.wait(other.link.record())

    def synchronize(self) -> None:
        self.link.record().wait()


class _Now:
    """The link of the current stream: torch on the CPU has done its work when it has been given."""

    def record(self) -> Reached:
        return Finished()

    def wait(self, event: Reached) -> None:
        event.wait()


class Event:
    """Of `torch.cuda.Event`."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "waiting for an event must not burn a core"
        self.reached: Reached = Finished()

    def record(self, stream: Stream) -> None:
        self.reached = stream.link.record()

    def query(self) -> bool:
        return self.reached.done()

    def synchronize(self) -> None:
        self.reached.wait()


class Runtime:
    """Of `torch.cuda`, and of the driver: what is registered, and how much memory buffers have."""

    Stream = Stream
    Event = Event

    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    def __init__(self) -> None:
        self.current = Stream(_Now())  # type: ignore[arg-type]
        self.registered: dict[int, int] = {}
        self.refuses_above = 1 << 40
        self.activations = 0  # bytes allocated beside buffers
        self.peak = 0

    def holds(self, activations: int) -> None:
        """So many bytes are allocated beside buffers from now on."""
        self.activations = activations
        self.peak = max(self.peak, self._allocated())

    def _allocated(self) -> int:
        return self.activations + sum(b.nbytes for b in Buffer.alive if b.committed)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return False

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _CopyOnStream(stream):
            yield

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def memory_stats_as_nested_dict(self, device: Any) -> dict[str, Any]:
        self.peak = max(self.peak, self._allocated())
        return {"allocated_bytes": {"all": {"current": self._allocated(), "peak": self.peak}}}

    def memory_reserved(self, device: Any) -> int:
        return 3 << 20

    def memory_allocated(self, device: Any) -> int:
        return 1 << 20

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        assert address % 4096 == 0
        assert nbytes % 4096 == 0
        if nbytes > self.refuses_above:
            return 2
        assert all(address + nbytes <= a or a + n <= address for a, n in self.registered.items()), "registered twice"
        self.registered[address] = nbytes
        return 0

    def _unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class _Torch:
    """torch, but for its GPU."""

    def __init__(self, runtime: Runtime) -> None:
        self.cuda = runtime

    def device(self, kind: str, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def empty(self, *size: int, device: Any, **more: Any) -> torch.Tensor:
        return torch.empty(*size, device="cpu", **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _CopyOnStream(TorchDispatchMode):
    """Gives a copy that does not block to the stream it is made on; any other waits as torch's does."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[2:] == (True,), "a copy on a stream of its own that blocks"
            assert args[0].dtype == args[1].dtype, "a copy that casts is many times slower"
            self._stream.link.copy(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


class Buffer(cuda.CudaBuffer):
    """A CudaBuffer that the stand-in counts; new memory is poisoned, and so is memory given up."""

    alive: ClassVar[weakref.WeakSet[Buffer]] = weakref.WeakSet()

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, device)
        self.alive.add(self)

    def commit(self, stream: Any) -> None:
        super().commit(stream)
        self.bytes.fill_(0xFF)

    def decommit(self) -> None:
        if self.committed and not self.exported():
            self.bytes.fill_(0xFF)
        super().decommit()


@contextlib.contextmanager
def installed() -> Iterator[Runtime]:
    """Inside, `device="cuda"` is the stand-in."""
    runtime = Runtime()
    before = cuda.torch, cuda.CudaBuffer
    cuda.torch, cuda.CudaBuffer = _Torch(runtime), Buffer  # type: ignore[assignment,misc]
    try:
        yield runtime
    finally:
        cuda.torch, cuda.CudaBuffer = before  # type: ignore[misc]
        while _links:
            _links.pop().close()

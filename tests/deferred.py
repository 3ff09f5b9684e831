"""A compute stream that is late, as a GPU's is: inside `compute`, torch only gives work, and a thread does it later.

A missing wait between what computes and what copies or releases cannot show on a device that computes at once. Here an
operation on device memory is queued with what a GPU would know of it, its outputs hold NaN until it has run, and what
reads a value on the host waits. Results are bit-equal to torch's own, for the same kernels run on the same values.

What belongs to the device: the buffers of an emulated device, what a queued operation makes, and any host tensor that
one takes part in (a batch, say: on a GPU the loop would have moved it). Invariants:
1. Work happens in the order in which it is given, as late as it may: when an event after it is waited for or asked
   about, or after a random delay. It happens below autograd: graph, version counters and views are made by the thread
   that gives it, once.
2. A queued operation keeps no tensor that shares a buffer's storage, as a GPU's kernel holds no object; it keeps the
   mapping. Anything else that it uses it keeps alive until it has run.
3. What an operation returns (shapes, strides, or an error) is known by a `rehearsal` on zeros of the same geometry. One
   that cannot be rehearsed, draws random numbers, returns a number, or has a shape that depends on values, waits for
   the queue and runs at once.
4. A copy between device and host waits for the queue and is done on return, as `Tensor.copy_` to or from pageable
   memory is; with non_blocking it is queued, and the host's part stays the host's.
5. The first error stays: every later event carries it, and leaving the context raises it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import math
import queue
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from rehearsal import Form, Made, Plan, Plans, Way, flattened, plain, rebuilt
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tiered.device.buffer import Buffer
from tiered.device.emulated import computing_on
from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Completion, Event

aten = torch.ops.aten

_THREADS_BENEATH = ("tiered-", "late-")  # those of the runtime and of streams: they compute on the host
_HELD_S = 30.0
_UNWRITTEN = 0xFF  # all bits set: NaN in every floating dtype, and no valid index


@contextlib.contextmanager
def compute(max_delay_s: float = 0.0, seed: int = 0) -> Iterator[LateStream]:
    """Inside, torch's operations that touch device memory run late: each when somebody waits for it, or else at most
    `max_delay_s` after the one before.

    The emulated device must be made inside. Leaving waits for all work, and raises the first error of any of it.
    """
    stream = LateStream(max_delay_s, seed)
    try:
        with computing_on(stream), _reads_wait(stream), _threads_give(stream), _Deferring(stream):
            yield stream
    except BaseException:
        stream.close()
        raise
    stream.close()
    if stream.error is not None:
        raise stream.error


class Unreached:
    """A compute stream for `computing_on` that works at once, but has not come to where anybody waits for it until
    `reached` is finished."""

    def __init__(self) -> None:
        self.reached = Completion()

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return self.reached

    def wait(self, event: Event) -> None:
        event.wait()

    def took(self, buffer: Buffer) -> None:
        return None


def now(tensor: Tensor) -> float:
    """The first element of a float32 tensor as memory has it now, past every wait."""
    return ctypes.c_float.from_address(tensor.data_ptr()).value


class LateStream:
    """See `device.emulated.ComputeStream`; `deferred` and `at_once` count operations on device memory by name."""

    def __init__(self, max_delay_s: float, seed: int) -> None:
        self.deferred: collections.Counter[str] = collections.Counter()
        self.at_once: collections.Counter[str] = collections.Counter()
        self.error: BaseException | None = None
        self.storages = _Storages()
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._given = 0
        self._awaited = 0.0  # all work up to this one, in the order given, is asked for
        self._asking = threading.Condition()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        arguments = (torch.get_num_threads(),)
        self._thread = threading.Thread(target=self._serve, args=arguments, name="late-compute", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        self._put(work)

    def record(self) -> Event:
        reached = _Point()
        position = self._put(lambda: reached.finish(self.error))
        reached.ask = lambda: self._await(position)
        return reached

    def wait(self, event: Event) -> None:
        self._put(event.wait)

    def took(self, buffer: Buffer) -> None:
        if isinstance(buffer, Memory):
            self.storages.add_buffer(buffer)

    def took_tensor(self, tensor: Tensor) -> None:
        """`tensor`'s memory is the device's from now on."""
        self.storages.add(tensor)

    def sync(self) -> None:
        """Wait for all that was given; raises what that raised."""
        self.record().wait()

    @property
    def idle(self) -> bool:
        """Nothing is left to do, as far as that can be seen without waiting."""
        return self._queue.empty()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storages that operations on the device have made and that are alive."""
        return self.storages.made_bytes()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is given inside is done when the block is left, not before; waiting for it inside ends in an error."""
        gate = threading.Event()

        def pass_gate() -> None:
            assert gate.wait(_HELD_S), "somebody waited for work that was held"

        self._put(pass_gate)
        try:
            yield
        finally:
            gate.set()

    def close(self) -> None:
        """Wait for all that was given, and join the thread."""
        if self._thread.is_alive():
            self._await(math.inf)
            self._queue.put(None)
            self._thread.join()

    def _put(self, work: Callable[[], None]) -> int:
        with self._asking:  # the position and the place in the queue go together
            self._given += 1
            self._queue.put(work)
            return self._given

    def _await(self, position: float) -> None:
        with self._asking:
            self._awaited = max(self._awaited, position)
            self._asking.notify()

    def _serve(self, threads: int) -> None:
        torch.set_num_threads(threads)  # the number of parts a sum is made of is part of its value
        position = 0
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C.DisableTorchFunction():
            while (work := self._queue.get()) is not None:
                position += 1
                delay = self._random.uniform(0, self._max_delay_s)
                with self._asking:
                    self._asking.wait_for(lambda position=position: self._awaited >= position, delay)
                try:
                    work()
                except BaseException as error:
                    self.error = self.error or error
                del work  # what is done holds no memory


class _Point(Completion):
    """A point of the stream: who asks for it has the work before it done."""

    ask: Callable[[], None]

    def done(self) -> bool:
        self.ask()
        return super().done()

    def wait(self, timeout: float | None = None) -> None:
        self.ask()
        super().wait(timeout)


@dataclasses.dataclass(slots=True)
class _Known:
    """A storage of the device. The weak reference keeps its address from being used again, not its bytes."""

    alive: StorageWeakRef
    made_bytes: int = 0
    buffer: weakref.ref[Memory] | None = None


class _Storages:
    """Which storages are the device's."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._sweep_at = 1024

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def add(self, tensor: Tensor, made_bytes: int = 0) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._sweep()
            self._known[storage._cdata] = _Known(StorageWeakRef(storage), made_bytes)

    def add_buffer(self, buffer: Memory) -> None:
        storage = buffer.bytes.untyped_storage()
        self._known[storage._cdata] = _Known(StorageWeakRef(storage), buffer=weakref.ref(buffer))

    def held(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A tensor over the same memory for a kernel to use, and what must live until it has; see invariant 2."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        buffer = known.buffer() if known is not None and known.buffer is not None else None
        if buffer is None:
            return aten.detach.default(tensor), None
        span = max(page_ceil(buffer.nbytes), 1)
        window = torch.frombuffer((ctypes.c_char * span).from_address(buffer.address), dtype=torch.uint8)
        whole = window[: span - span % tensor.element_size()].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()), buffer

    def made_bytes(self) -> int:
        return sum(known.made_bytes for known in list(self._known.values()) if not known.alive.expired())

    def _sweep(self) -> None:
        if len(self._known) > self._sweep_at:
            self._known = {key: known for key, known in list(self._known.items()) if not known.alive.expired()}
            self._sweep_at = 1024 + 2 * len(self._known)


_ALLOCATIONS = {aten.empty_like, aten.new_empty, aten.new_empty_strided}
_TO_THE_HOST = {aten._to_copy, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like}
"""Told `device="cpu"`, these make host memory; any other call, and backward, is told because its input has it."""


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class _Deferring(TorchDispatchMode):
    """Sees each operation of the giving thread below autograd, and decides how it is done."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream
        self._plans = Plans()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # parameters of a sharded model have one
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not (any(map(self._ours, args)) or any(map(self._ours, kwargs.values()))):  # most: what the host does
            return func(*args, **kwargs)
        if func is aten.copy_.default and not (self._ours(args[0]) and self._ours(args[1])):
            return self._cross(func, args, kwargs)
        if func.overloadpacket in _TO_THE_HOST and kwargs.get("device") is not None and not _in_backward():
            return self._at_once(func, args, kwargs, ours_after=False)
        leaves, form = flattened(args, kwargs)
        plan = self._plans.of(func, args, kwargs, leaves, form)
        if plan.way is Way.VIEW:
            return func(*args, **kwargs)
        if func.overloadpacket in _ALLOCATIONS:
            return self._made(func(*args, **kwargs))
        if plan.way is Way.AT_ONCE:
            return self._at_once(func, args, kwargs)
        return self._later(func, leaves, form, plan)

    def _ours(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._ours, value))
        return plain(value) and value in self._stream.storages

    def _later(self, func: Any, leaves: list[Any], form: Form, plan: Plan) -> Any:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._stream.took_tensor(leaf)
        results: list[Any] = []
        made: list[Tensor | None] = []
        for output in plan.outputs:
            if isinstance(output, Made):
                results.append(self._made(torch.empty_strided(output.size, output.stride, dtype=output.dtype)))
                made.append(results[-1])
            else:
                results.append(None if output is None else leaves[output])
                made.append(None)
        self._give(func, leaves, form, made)
        return results[0] if plan.structure.is_leaf() else tree_unflatten(results, plan.structure)

    def _give(self, func: Any, leaves: list[Any], form: Form, made: list[Tensor | None]) -> None:
        storages = self._stream.storages
        inputs = [storages.held(leaf) if isinstance(leaf, Tensor) else (leaf, None) for leaf in leaves]
        outputs = [None if tensor is None else aten.detach.default(tensor) for tensor in made]
        kernel = _Kernel(func, [i for i, _ in inputs], form, outputs, [k for _, k in inputs])
        self._stream.run(kernel)
        self._stream.deferred[str(func)] += 1

    def _made(self, tensor: Tensor) -> Tensor:
        """New memory of the device, not written yet."""
        storage = tensor.untyped_storage()
        storage.fill_(_UNWRITTEN)
        self._stream.storages.add(tensor, storage.nbytes())
        return tensor

    def _at_once(self, func: Any, args: Any, kwargs: Any, *, ours_after: bool = True) -> Any:
        self._stream.sync()
        self._stream.at_once[str(func)] += 1
        result = func(*args, **kwargs)
        if ours_after:
            for value in _leaves(result):
                if plain(value):
                    self._stream.storages.add(value, value.untyped_storage().nbytes())
        return result

    def _cross(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy between host and device."""
        leaves, form = flattened(args, kwargs)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if blocking or not (plain(args[0]) and plain(args[1])):
            return self._at_once(func, args, kwargs, ours_after=False)
        self._give(func, leaves, form, [None])
        return args[0]


def _leaves(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else tree_flatten(result)[0]


class _Kernel:
    """One queued operation: run `func` on `inputs`, and copy what it makes to `outputs` (None: it is an input)."""

    def __init__(self, func: Any, inputs: list[Any], form: Form, outputs: list[Tensor | None], kept: list[Any]) -> None:
        self._func, self._inputs, self._form, self._outputs = func, inputs, form, outputs
        self._kept = kept
        self._grad = torch.is_grad_enabled()

    def __call__(self) -> None:
        args, kwargs = rebuilt(self._inputs, self._form)
        with torch.set_grad_enabled(self._grad):
            results = _leaves(self._func(*args, **kwargs))
            for output, value in zip(self._outputs, results, strict=True):
                if output is not None:
                    assert (value.dtype, value.size()) == (output.dtype, output.size()), (
                        f"{self._func} was foreseen wrong"
                    )
                    output.copy_(value)


@contextlib.contextmanager
def _reads_wait(stream: LateStream) -> Iterator[None]:
    """Let the calls wait that read a tensor's memory without an operation (on a GPU: after one that waits).

    Patched, as a mode that saw them would turn torch away from the fused paths of its modules.
    """
    numpy, tolist, deepcopy, reduce_ex = Tensor.numpy, Tensor.tolist, Tensor.__deepcopy__, Tensor.__reduce_ex__

    def wait_for(tensor: Tensor) -> Tensor:
        alias = tensor.detach()  # what was away comes
        if plain(alias) and alias in stream.storages:
            stream.sync()
        return alias

    def read_as_numpy(self: Tensor, *, force: bool = False) -> Any:
        alias = wait_for(self)
        return numpy(alias if force or not self.requires_grad else self)

    def deepcopied(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if self.is_leaf:
            wait_for(self)
        return deepcopy(self, memo)

    def reduced(self: Tensor, protocol: Any) -> Any:
        wait_for(self)
        return reduce_ex(self, protocol)

    patches = {
        "numpy": read_as_numpy,
        "tolist": lambda self: tolist(wait_for(self)),
        "cpu": lambda self: self.to("cpu", copy=True),
        "__deepcopy__": deepcopied,
        "__reduce_ex__": reduced,
    }
    with contextlib.ExitStack() as stack:
        for name, patch in patches.items():
            stack.enter_context(mock.patch.object(Tensor, name, patch))
        yield


@contextlib.contextmanager
def _threads_give(stream: LateStream) -> Iterator[None]:
    """Let threads of the program that start inside give to `stream` too: a GPU's default stream is that of all."""
    run = threading.Thread.run

    def give(self: threading.Thread) -> None:
        with contextlib.nullcontext() if self.name.startswith(_THREADS_BENEATH) else _Deferring(stream):
            run(self)

    with mock.patch.object(threading.Thread, "run", give):
        yield

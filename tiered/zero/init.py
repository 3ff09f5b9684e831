"""Deferred initialisation: a model is built as plain torch builds it, with only part of it in memory at a time.

Every parameter is created and initialised by the user's own code, in the user's order, with real values and the real
random stream. When the parameters registered so far take more than the limit, the one untouched for longest is parked:
its class becomes the guard, and its values, or this rank's part of them, are kept elsewhere (`zero.parts`), so that any
later touch (a second initialisation pass, tying, a load) brings it back. `shard` then moves each parameter from where
it is to its group.

Invariants:
1. The values are bit for bit those of plain construction; with several ranks, on rank 0.
2. What is parked when follows from the sizes of parameters and the order of their use alone, so it is the same on every
   rank; with several ranks parking one and bringing it in are calls that all of them make, and nothing else is.
3. The values of a parameter that something else views, or numpy has seen, stay where they are as long as that is so.
4. At most `limit` bytes of registered parameters are whole in memory, plus those in use (all that one operation takes)
   and those of invariant 3; while `shard` fills a group, plus that group's.
5. A parameter may be collected at any moment: that calls nobody, and what was kept of it goes at the next call.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tiered.device.host import give_back_freed
from tiered.errors import UsageError
from tiered.zero.guard import ATTRIBUTE, GuardedParameter, guard, unguard
from tiered.zero.parts import Keep, Muster, checksum

_TRIM_EVERY_BYTES = 8 << 20


class Nursery:
    """The parameters under construction, and where those that are parked are kept."""

    def __init__(self, keep: Keep, limit: int, muster: Muster | None = None) -> None:
        """muster: of several ranks, which have begun with the same `limit`."""
        self._keep = keep
        self._limit = limit
        self._muster = muster
        self._whole: collections.OrderedDict[int, tuple[Parked, int]] = collections.OrderedDict()
        self._bytes = 0
        self._built = 0
        self._away = 0  # how many are parked
        self._viewed: list[Parked] = []  # parked, but their values are still in memory
        self._freed = 0  # since freed memory was last given back to the system
        self._watching = False
        self._failed = False
        self._orphans: list[Parked] = []
        if muster is not None:
            weakref.finalize(self, muster.close).atexit = False  # of a model that was dropped; waits for nobody

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every parameter that a module registers is taken in, and every copy of one: modules that are copied
        (as the layers of torch's transformers are) register nothing."""
        self._watching = True
        handle = register_module_parameter_registration_hook(lambda module, name, param: self._register(name, param))
        try:
            with _copies_seen(self._register):
                yield
        except BaseException as error:
            self._failed = True  # what was built is not going to be used: its values go
            self._keep.close()
            if self._muster is not None:
                self._muster.leave(error)
            raise
        finally:
            handle.remove()
            self._watching = False
            self._close_if_empty()

    # --- what a parameter under construction tells ---

    def used(self, parked: Parked) -> None:
        """`parked` is whole and was touched now; others go where that is too much."""
        self._bury()
        self._viewed = [other for other in self._viewed if not other.empty()]
        if id(parked) not in self._whole:
            self._whole[id(parked)] = parked, parked.nbytes
            self._bytes += parked.nbytes
        self._whole.move_to_end(id(parked))
        for key in list(self._whole):
            if self._bytes <= self._limit:
                break
            if key != id(parked) and not self._whole[key][0].in_use:
                self._park(self._whole[key][0])
        self._close_if_empty()

    def taken(self, parked: Parked) -> None:
        """`parked` is whole, or gone, and never parked again."""
        self._gone(parked)
        self._bury()
        self._close_if_empty()

    def orphaned(self, parked: Parked) -> None:
        """The parameter of `parked` has been collected, at any moment: see to it at the next call."""
        self._orphans.append(parked)

    def put(self, name: str, row: torch.Tensor, total: int | None) -> tuple[int, int]:
        """Keep what this rank is to keep of a parameter's bytes: its number in the keep, and the checksum of all, which
        is `total` where that is known."""
        start, stop = (0, row.numel()) if self._muster is None else self._muster.part(row.numel())
        number = self._keep.put(row[start:stop], f"'{name}'")
        self._freed += row.numel()
        return number, checksum(row) if total is None and self._muster is not None else total or 0

    def bring(self, parked: Parked, row: torch.Tensor, kept: tuple[int, int] | None) -> None:
        """Fill `row` with the bytes of a parked parameter; kept: what `put` returned, None where the values never left.

        Raises RankError where other ranks do not do the same, and UsageError after a construction that failed.
        """
        if self._failed:
            raise UsageError(f"parameter '{parked.name}' was parked by a deferred_init() that failed: build it again")
        if self._muster is not None:
            read = None if kept is None else (kept[1], functools.partial(self._keep.read, kept[0]))
            self._muster.unite(f"bringing in parameter {parked.number} '{parked.name}'", row, read)
        elif kept is not None:
            self._keep.read(kept[0], row, 0)
        self.dropped(kept)

    def dropped(self, kept: tuple[int, int] | None) -> None:
        """A parameter is not parked any more."""
        self._away -= 1
        if kept is not None and not self._failed:
            self._keep.drop(kept[0])

    # --- inside ---

    def _register(self, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and param.device.type == "cpu" and param.layout is torch.strided:
            if ATTRIBUTE not in param.__dict__ and param.numel():
                self._built += 1
                param.__dict__[ATTRIBUTE] = Parked(name, self._built, param, self)
            if isinstance(home := param.__dict__.get(ATTRIBUTE), Parked):
                self.used(home)

    def _park(self, parked: Parked) -> None:
        self._gone(parked)
        param, total = parked.movable(), None
        if self._muster is not None:
            row = None if param is None else _bytes(param)
            total = self._muster.level(f"parking parameter {parked.number} '{parked.name}'", row)
            del row  # it is a view, too
        if param is None:
            return
        parked.leave(param)
        self._away += 1
        self._viewed.append(parked)  # first, as there may be no room for what it leaves
        if parked.empty(total):
            self._viewed.pop()
        if self._freed >= _TRIM_EVERY_BYTES:
            self._freed = 0
            give_back_freed()

    def _gone(self, parked: Parked) -> None:
        """`parked` does not count as whole any more."""
        self._bytes -= self._whole.pop(id(parked), (parked, 0))[1]

    def _bury(self) -> None:
        while self._orphans:
            self._orphans.pop().forsake()

    def _close_if_empty(self) -> None:
        if not self._away and not self._watching:
            self._whole.clear()
            self._keep.close()
            if self._muster is not None:
                self._muster.close()


class Parked:
    """One parameter under construction: whole (plain) or parked (guarded). See `guard.Home`."""

    def __init__(self, name: str, number: int, param: nn.Parameter, nursery: Nursery) -> None:
        self.name = name
        self.number = number  # in the order of construction
        self.nbytes = param.untyped_storage().nbytes()  # brought up to date when it is parked
        self.away = False
        self.in_use = 0  # operations that take it
        self._owner = weakref.ref(param)  # a parameter that is replaced, as by tying, takes its values with it
        self._of = weakref.ref(nursery)  # held by `_orphan`; no cycle, so that with the last parameter all goes at once
        self._kept: tuple[int, int] | None = None
        self._orphan = weakref.finalize(param, nursery.orphaned, self)
        self._orphan.atexit = False

    @property
    def _nursery(self) -> Nursery:
        nursery = self._of()
        if nursery is None:
            raise RuntimeError(f"parameter '{self.name}' is not under construction any more")
        return nursery

    @property
    def _param(self) -> nn.Parameter:
        param = self._owner()
        if param is None:
            raise RuntimeError(f"parameter '{self.name}' is gone")
        return param

    def movable(self) -> nn.Parameter | None:
        """The parameter; None where it has been collected, or made something else meanwhile."""
        param = self._owner()
        return param if type(param) is nn.Parameter and param.device.type == "cpu" else None

    def leave(self, param: nn.Parameter) -> None:
        """Put the guard on: the values may go."""
        self.nbytes = param.untyped_storage().nbytes()  # .data may have been assigned, as by `half`
        guard(param)
        self.away = True

    def empty(self, total: int | None = None) -> bool:
        """Have the values of a parked parameter kept, and free their memory. False while something else may view it.
        total: their checksum, where it is known."""
        param = self._owner()
        if param is None or not self.away or self._kept is not None:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            if _users(param) > _LONE or not param.untyped_storage().resizable():
                return False
            self._kept = self._nursery.put(self.name, _bytes(param), total)
            param.untyped_storage().resize_(0)
        return True

    def bring_in(self) -> None:
        """Make the values present and the parameter plain again, with all ranks."""
        if self.away:
            self._come_back()
            self._nursery.used(self)

    def take(self) -> None:
        """`bring_in`, for good: it is not parked again."""
        if self.away:
            self._come_back()
        self._nursery.taken(self)

    def forget(self) -> None:
        """The values have been copied to where they are going to live."""
        nursery = self._nursery
        unguard(self._param)
        self._orphan.detach()
        self.forsake()
        nursery.taken(self)

    def forsake(self) -> None:
        """Give up what is kept of the values."""
        if self.away:
            self.away = False
            kept, self._kept = self._kept, None
            self._nursery.dropped(kept)

    def _come_back(self) -> None:
        param = self._param
        unguard(param)
        try:
            if self._kept is not None:
                param.untyped_storage().resize_(self.nbytes)
            self._nursery.bring(self, _bytes(param), self._kept)
        except BaseException:
            guard(param)  # its memory stays: another rank may still be sending to it
            raise
        self.away = False
        self._kept = None

    # --- what the guard asks ---

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.in_use += 1  # first: what comes in for the same operation must not send this one away
        try:
            self.bring_in()
            yield
        finally:
            self.in_use -= 1

    def before_write(self) -> None:
        return None

    def note_write(self) -> None:
        return None  # a parameter that comes back is kept anew when it goes again

    def overwrite(self, value: torch.Tensor) -> bool:
        return False  # it comes in for that, and is kept anew when it goes

    def exported(self) -> torch.Tensor:
        self.bring_in()
        return self._param.detach().clone()

    shown = exported

    def grad(self) -> torch.Tensor | None:
        return None

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self.bring_in()
            self._param.grad = grad

    def trainable(self) -> None:
        return None


@contextlib.contextmanager
def _copies_seen(take: Callable[[str, nn.Parameter], None]) -> Iterator[None]:
    """Inside, `take` gets every deep copy of a parameter. torch has no hook for that."""
    own: list[tuple[Any, Any]] = [(kind, kind.__deepcopy__) for kind in (nn.Parameter, GuardedParameter)]

    def seeing(copy: Callable[..., nn.Parameter]) -> Callable[..., nn.Parameter]:
        def copied(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            made = copy(param, memo)
            take("a copy", made)
            return made

        return copied

    try:
        for kind, copy in own:
            kind.__deepcopy__ = seeing(copy)
        yield
    finally:
        for kind, copy in own:
            kind.__deepcopy__ = copy


def _bytes(param: nn.Parameter) -> torch.Tensor:
    """The parameter's whole storage as a row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(param.untyped_storage())


def _users(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))


_LONE = _users(nn.Parameter(torch.empty(1, device="cpu")))  # of a parameter whose storage nothing else views

"""Deferred initialisation: a model is built as plain torch builds it, with only part of it in memory at a time.

Every parameter is created and initialised by the user's own code, in the user's order, with real values and the real
random stream. When the parameters registered so far take more than the limit, the one untouched for longest is parked:
its values go to the drive, its storage is emptied and its class becomes the guard, so that any later touch (a second
initialisation pass, tying, a load) brings it back. `shard` then moves each parameter from where it is to its group.

Invariants:
1. The values are bit for bit those of plain construction.
2. A parameter that something else views is never parked.
3. What is parked in memory terms: at most `limit` bytes of registered parameters stay resident, plus the one in use.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tiered.device.host import give_back_freed
from tiered.store.block import Block, BlockKey
from tiered.store.store import TieredStore
from tiered.store.tier import Tier
from tiered.zero.guard import ATTRIBUTE, guard, unguard

_TRIM_EVERY_BYTES = 8 << 20


class Nursery:
    """The parameters under construction, and the drive they are parked on."""

    def __init__(self, store: TieredStore, limit: int) -> None:
        self._store = store
        self._limit = limit
        self._resident: collections.OrderedDict[int, Parked] = collections.OrderedDict()
        self._bytes = 0
        self._freed = 0  # since freed memory was last given back to the system
        self._parked = 0  # values on the drive, and
        self._named = 0  # the number of the last block
        self._watching = False
        self._orphans: list[Parked] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every parameter that a module registers is taken in."""
        self._watching = True
        handle = register_module_parameter_registration_hook(lambda module, name, param: self._register(name, param))
        try:
            yield
        except BaseException:
            self._store.close()  # what was built is not going to be used: its values go with the drive
            raise
        finally:
            handle.remove()
            self._watching = False
            self._close_if_empty()

    def used(self, parked: Parked) -> None:
        """`parked` is resident and was touched now; others go where that is too much."""
        self._bury()
        if id(parked) not in self._resident:
            self._bytes += parked.nbytes
        self._resident[id(parked)] = parked
        self._resident.move_to_end(id(parked))
        for key in list(self._resident):
            if self._bytes <= self._limit:
                return
            if key != id(parked) and self._resident[key].park():
                self._freed += self._resident[key].nbytes
                self.gone(self._resident[key])
                if self._freed >= _TRIM_EVERY_BYTES:
                    self._freed = 0
                    give_back_freed()

    def orphaned(self, parked: Parked) -> None:
        """The parameter of `parked` has been collected, at any moment: see to it at the next call."""
        self._orphans.append(parked)

    def gone(self, parked: Parked) -> None:
        """`parked` is not resident any more, or has left for its group."""
        if self._resident.pop(id(parked), None) is not None:
            self._bytes -= parked.nbytes

    def block(self, nbytes: int) -> Block:
        """A new block on the drive."""
        self._named += 1
        self._parked += 1
        return self._store.create(BlockKey(self._named, "initial value"), nbytes, Tier.NVME)

    def remove(self, block: Block) -> None:
        """Give a block up; the drive is given back with the last one."""
        self._store.remove(block)
        self._parked -= 1
        self._bury()
        self._close_if_empty()

    @property
    def store(self) -> TieredStore:
        """Where parked values go."""
        return self._store

    def _bury(self) -> None:
        while self._orphans:
            orphan = self._orphans.pop()
            self.gone(orphan)
            orphan.remove()

    def _close_if_empty(self) -> None:
        if not self._parked and not self._watching:
            self._store.close()

    def _register(self, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and param.device.type == "cpu" and param.layout is torch.strided:
            if ATTRIBUTE not in param.__dict__ and param.numel():
                param.__dict__[ATTRIBUTE] = Parked(name, param, self)
            if isinstance(home := param.__dict__.get(ATTRIBUTE), Parked):
                self.used(home)


class Parked:
    """One parameter under construction: resident (plain) or parked (guarded). See `guard.Home`."""

    def __init__(self, name: str, param: nn.Parameter, nursery: Nursery) -> None:
        self.name = name
        self.nbytes = param.untyped_storage().nbytes()  # as long as it is resident, brought up to date when parked
        self._owner = weakref.ref(param)  # a parameter that is replaced, as by tying, takes its values with it
        self._nursery = nursery
        self._block: Block | None = None
        self._away = False
        self._orphan = weakref.finalize(param, nursery.orphaned, self)
        self._orphan.atexit = False

    @property
    def _param(self) -> nn.Parameter:
        param = self._owner()
        if param is None:
            raise RuntimeError(f"parameter '{self.name}' is gone")
        return param

    def park(self) -> bool:
        """Move the values to the drive. False where something else views them: then nothing happens."""
        param, store = self._owner(), self._nursery.store
        if param is None or type(param) is not nn.Parameter or _users(param) > _LONE:
            return False
        if param.untyped_storage().nbytes() != self.nbytes:  # .data was assigned: leave it alone
            return False
        if self._block is None:
            self._block = self._nursery.block(self.nbytes)
        store.patch(self._block, _bytes(param), 0)
        param.untyped_storage().resize_(0)
        self._away = True
        guard(param)
        return True

    def bring_in(self) -> None:
        """Make the values present and the parameter plain again."""
        if self._away and self._block is not None:
            unguard(self._param)
            self._param.untyped_storage().resize_(self.nbytes)
            self._nursery.store.load(self._block, _bytes(self._param), 0)
            self._away = False
        self._nursery.used(self)

    def forget(self) -> None:
        """The values have been copied to where they are going to live."""
        unguard(self._param)
        self._orphan.detach()
        self._nursery.gone(self)
        self.remove()

    def remove(self) -> None:
        """Give up the values on the drive."""
        if self._block is not None:
            block, self._block = self._block, None
            self._nursery.remove(block)

    # --- what the guard asks ---

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.bring_in()
        yield

    def note_write(self) -> None:
        return None  # a resident parameter is always written when it is parked

    def exported(self) -> torch.Tensor:
        self.bring_in()
        return self._param.detach().clone()

    def grad(self) -> torch.Tensor | None:
        return None

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self.bring_in()
            self._param.grad = grad

    def trainable(self) -> None:
        return None


def _bytes(param: nn.Parameter) -> torch.Tensor:
    """The parameter's whole storage as a row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(param.untyped_storage())


def _users(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))


_LONE = _users(nn.Parameter(torch.empty(1, device="cpu")))  # of a parameter whose storage nothing else views

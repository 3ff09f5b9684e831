"""Pickles, read without running them: a machine with a stack that makes values and records, and never calls anything.

A pickle is a program: loading one calls whatever it names. Formats of torch hold pickles of a plain kind, so they are
read by their opcodes here: numbers, texts, lists, tuples and dictionaries come as themselves, and what would be a
class, a function or an object comes as a `Name` or a `Record` of the names and arguments it was to be made of.
Invariants:
1. No name is ever looked up, imported or called. A name that the reader does not expect is refused with what it says.
2. Only opcodes that such pickles have are known; the work is proportional to the bytes read.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Collection
from typing import Any


class Unreadable(Exception):
    """Why a pickle is refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A class or function, by its name."""

    text: str


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """What a pickle wanted made: the name of what makes it, its arguments and then its state. Equal to itself alone."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


PERSISTENT = "persistent id"
"""The `Record.name` of what the pickle leaves outside; the one argument says what."""
_DICTIONARY = "collections.OrderedDict"


def read(data: bytes, known: Collection[str]) -> Any:
    """The value in a pickle. known: the names it may have, "module.name". Raises Unreadable."""
    machine = _Machine(known)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.run(opcode.name, argument)
        (value,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError, RecursionError) as error:
        raise Unreadable(f"not a sound pickle: {type(error).__name__}: {error}"[:300]) from None
    return value


class _Machine:
    """The stack, the marks on it, and what the pickle has put aside."""

    def __init__(self, known: Collection[str]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._known = known

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _VALUES:
            self.stack.append(argument)
        elif opcode in _MAKES:
            self.stack.append(_MAKES[opcode]())
        elif opcode in _DOES:
            _DOES[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise Unreadable(f"it has the opcode {opcode}, which plain data have not")

    # --- put aside ---

    def put(self, number: int) -> None:
        self._memo[number] = self.stack[-1]

    def memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self._memo[number])

    # --- containers ---

    def mark(self, _: None) -> None:
        self._marks.append(len(self.stack))

    def _popped(self) -> list[Any]:
        at = self._marks.pop()
        found = self.stack[at:]
        del self.stack[at:]
        return found

    def tuple_of(self, count: int | None) -> None:
        found = self._popped() if count is None else [self.stack.pop() for _ in range(count)][::-1]
        self.stack.append(tuple(found))

    def append(self, several: bool) -> None:
        found = self._popped() if several else [self.stack.pop()]
        if type(self.stack[-1]) is not list:
            raise Unreadable("it appends to what is no list")
        self.stack[-1].extend(found)

    def set_items(self, several: bool) -> None:
        found = self._popped() if several else [self.stack.pop() for _ in range(2)][::-1]
        into = self.stack[-1]
        if type(into) is not dict or len(found) % 2:
            raise Unreadable("it sets items of what is no dictionary")
        for key, value in zip(found[::2], found[1::2], strict=True):
            if not isinstance(key, (str, int, Record)):  # tuples in tuples could be too deep to hash
                raise Unreadable(f"a key is {type(key).__name__}")
            into[key] = value

    # --- what would be objects ---

    def name(self, argument: str | None) -> None:
        if argument is None:
            last = self.stack.pop()
            module = self.stack.pop()
        else:
            module, _, last = argument.partition(" ")
        text = f"{module}.{last}" if isinstance(module, str) and isinstance(last, str) else "what is no name"
        if text not in self._known:
            raise Unreadable(f"it asks for {text[:200]!r}, which has no place there and is not loaded")
        self.stack.append(Name(text))

    def make(self, _: None) -> None:
        arguments, maker = self.stack.pop(), self.stack.pop()
        if not isinstance(maker, Name) or not isinstance(arguments, tuple):
            raise Unreadable("it makes an object of what is no name")
        plain = maker.text == _DICTIONARY and not arguments
        self.stack.append({} if plain else Record(maker.text, arguments))

    def build(self, _: None) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # attributes of an OrderedDict are of no use here
            raise Unreadable("it gives a state to what is no object")

    def persistent(self, _: None) -> None:
        self.stack.append(Record(PERSISTENT, (self.stack.pop(),)))


_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
}
_MAKES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_DOES: dict[str, Callable[[_Machine, Any], None]] = {
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.tuple_of(None),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append(False),
    "APPENDS": lambda machine, _: machine.append(True),
    "SETITEM": lambda machine, _: machine.set_items(False),
    "SETITEMS": lambda machine, _: machine.set_items(True),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.make,
    "NEWOBJ": _Machine.make,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}

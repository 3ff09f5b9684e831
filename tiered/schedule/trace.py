"""The order in which pages are used, learnt as it happens and repaired where it changes.

What is used is remembered in two ways:

    passes      whole runs of uses: a forward, a backward, one evaluation, a step. A pass ends where the phase changes
                or, but in a backward, where its first use comes again. Which one follows is learnt from the passes
                before, from as many of them (up to `CONTEXTS`) as have been seen to lead somewhere: steps that
                alternate, by two or by more, are each known before they begin.
    successors  after the last two uses, which use comes next; a rare one does not displace a common one.

Within a pass the trace follows the remembered one that it guessed. Where that is wrong it goes over to the latest one
that began in the same way, or else goes on with the same one behind the place of the difference: a branch or a layer
left out costs what it changes and no more. Each phase has its record of guesses; while that is bad (layers dropped at
random) successors predict instead, which is the commonest order. A backward of which nothing is known is taken for its
forward reversed, as long as that is what backwards are.

Invariants:
1. `predict` is a guess and only ever steers hints.
2. Memory is bounded: `PASSES` passes, `REMEMBERED` uses in them, and tables of `TABLE` entries.
3. `observe` takes a time that does not grow with the number of pages.
"""

from __future__ import annotations

import array
import enum
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

PASSES = 32
"""Passes remembered, the latest."""
REMEMBERED = 1 << 17
"""Uses remembered in all passes together."""
TABLE = 1 << 16
"""Entries of a table of successors."""
LONGEST = 1 << 14
"""Uses of one pass; a longer one is taken for several."""
CONTEXTS = (32, 16, 8, 4, 2, 1)
"""How many passes back the next one is looked up by."""
REACH = 8
"""Uses that may be left out at once before a pass counts as another one."""
SURE = 3
"""How often a successor may fail to come, once it has come often, before another takes its place."""
RECORD = 4
"""The best record of guesses; a right pass is worth 1, a wrong one costs 2, and below 0 nothing is followed."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Phase(enum.IntEnum):  # integers, since uses are hashed in the innermost loop of prediction
    """What a page is used for."""

    FORWARD = 0
    BACKWARD = 1
    EVALUATION = 2  # forward without gradients
    STEP = 3  # the optimizer's, of every page at once


class Use(NamedTuple):
    """One use of a page (-1: of all)."""

    page: int
    phase: Phase


class Pass:
    """A run of uses in one phase; complete once it is remembered."""

    __slots__ = ("hashes", "number", "uses")

    def __init__(self) -> None:
        self.number = -1  # its name among the remembered ones
        self.uses: list[Use] = []
        self.hashes = array.array("q")  # of the uses up to each

    @property
    def phase(self) -> Phase:
        return self.uses[0].phase

    def add(self, use: Use) -> None:
        self.hashes.append(hash((self.hashes[-1] if self.hashes else 0, use.page)))
        self.uses.append(use)

    def reversed(self) -> Pass:
        """The backward of this forward, where it is the forward reversed."""
        backward = Pass()
        for use in reversed(self.uses):
            backward.add(Use(use.page, Phase.BACKWARD))
        return backward

    def ended_by(self, use: Use) -> bool:
        """`use` does not belong to it any more."""
        first = self.uses[0]
        if use.phase is not first.phase or len(self.uses) == LONGEST:
            return True
        return use.page == first.page and use.phase is not Phase.BACKWARD  # two of these do without a forward between

    def begins_as(self, other: Pass) -> bool:
        """All of `other` is its beginning, as far as hashes tell."""
        count = len(other.uses)
        return len(self.uses) >= count and self.hashes[count - 1] == other.hashes[-1] and self.phase is other.phase


class Successors:
    """After the last two uses, which one came next."""

    def __init__(self) -> None:
        self.last: tuple[Use | None, Use | None] = (None, None)
        self._after_two: dict[tuple[Use | None, Use | None], tuple[Use, int]] = {}
        self._after_one: dict[Use | None, tuple[Use, int]] = {}

    def observe(self, use: Use) -> bool:
        """Record that `use` happens now; whether it was expected."""
        before, last = self.last
        expected = self.after(before, last) == use
        _count(self._after_two, (before, last), use)
        _count(self._after_one, last, use)
        self.last = (last, use)
        return expected

    def after(self, before: Use | None, last: Use | None) -> Use | None:
        """The use expected after those two."""
        found = self._after_two.get((before, last)) or self._after_one.get(last)
        return None if found is None else found[0]


class Trace:
    """Learns the order of uses and predicts what follows."""

    def __init__(self) -> None:
        self._successors = Successors()
        self._passes: dict[int, Pass] = {}  # by number, the latest last
        self._numbers: dict[tuple[Phase, int, int], int] = {}  # by phase, length and hash
        self._remembered = 0
        self._made = 0
        self._recent: tuple[int, ...] = ()  # numbers of the last passes
        self._following: dict[tuple[int, ...], int] = {}  # after those passes, which came
        self._now = Pass()
        self._mirror: Pass | None = None  # of the pass before, where that was a forward
        self._guess: Pass | None = None  # what the present pass is taken for
        self._place = 0  # in it: the use expected next
        self._strayed = False
        self._record = dict.fromkeys(Phase, RECORD)
        self._mirrored = 0  # the record of backwards as forwards reversed

    def observe(self, use: Use) -> bool:
        """Record that `use` happens now; whether it was expected."""
        likely = self._successors.observe(use)
        if self._now.uses and self._now.ended_by(use):
            self._end()
        self._now.add(use)
        guess = self._guess
        followed = guess is not None and self._place < len(guess.uses) and guess.uses[self._place] == use
        if followed:
            self._place += 1
        else:
            self._stray(use)
        return followed if self._trusted(guess) else likely

    def predict(self) -> Iterator[Use]:
        """The uses expected next, in order, without end where the order is a cycle; stops where nothing is known."""
        before, last = self._successors.last
        guess, place, recent = self._guess, self._place, self._recent
        while guess is not None and self._trusted(guess):
            uses = guess.uses
            for index in range(place, len(uses)):  # no slice: of most predictions little is taken
                yield uses[index]
            if place < len(uses):
                before, last = (uses[-2] if len(uses) - place > 1 else last), uses[-1]
            recent = (*recent, guess.number)[-CONTEXTS[0] :]
            guess, place = self._next(recent), 0
        unknown = True
        while (following := self._successors.after(before, last)) is not None:
            unknown = False
            yield following
            before, last = last, following
        if unknown and self._guess is not None:  # something new, and what was expected may yet come
            for index in range(self._place, len(self._guess.uses)):
                yield self._guess.uses[index]

    # --- inside ---

    def _trusted(self, guess: Pass | None) -> bool:
        return guess is not None and self._record[guess.phase] >= 0

    def _next(self, recent: tuple[int, ...]) -> Pass | None:
        """The pass that followed these, by as many of them as have been seen before."""
        for count in CONTEXTS:
            if count <= len(recent):
                found = self._passes.get(self._following.get(recent[-count:], -1))
                if found is not None:
                    return found
        return None

    def _stray(self, use: Use) -> None:
        """`use` was not the one guessed: take the present pass for another one, or go on behind the difference."""
        guess = self._guess
        self._strayed |= guess is not None and len(self._now.uses) > 1  # a wrong first use is another pass altogether
        for other in reversed(self._passes.values()):
            if other.begins_as(self._now):
                self._guess, self._place = other, len(self._now.uses)
                return
        if guess is not None:
            for index in range(self._place, min(self._place + REACH, len(guess.uses))):
                if guess.uses[index] == use:
                    self._place = index + 1
                    return

    def _end(self) -> None:
        """The present pass is over: remember it, and guess the next."""
        now, guess, mirror = self._now, self._guess, self._mirror
        if guess is not None and guess.phase is now.phase:
            right = not self._strayed and self._place == len(guess.uses)
            self._record[now.phase] = _scored(self._record[now.phase], right)
        if mirror is not None and now.phase is Phase.BACKWARD:
            self._mirrored = _scored(self._mirrored, now.uses == mirror.uses)
        self._mirror = now.reversed() if now.phase is Phase.FORWARD else None
        number = self._remember(now)
        for count in CONTEXTS:
            if count <= len(self._recent):
                _put(self._following, self._recent[-count:], number)
        self._recent = (*self._recent, number)[-CONTEXTS[0] :]
        self._now = Pass()
        self._guess, self._place, self._strayed = self._next(self._recent), 0, False
        if self._guess is None and self._mirrored >= 0:
            self._guess = self._mirror

    def _remember(self, now: Pass) -> int:
        """Its number, the one that it had where it has been seen before."""
        key = (now.phase, len(now.uses), now.hashes[-1])
        number = self._numbers.get(key)
        if number is not None:
            self._passes[number] = self._passes.pop(number)
            return number
        now.number = self._made
        self._made += 1
        self._numbers[key] = now.number
        self._passes[now.number] = now
        self._remembered += len(now.uses)
        while len(self._passes) > PASSES or self._remembered > REMEMBERED:
            old = self._passes.pop(next(iter(self._passes)))
            del self._numbers[old.phase, len(old.uses), old.hashes[-1]]
            self._remembered -= len(old.uses)
        return now.number


def _scored(record: int, right: bool) -> int:
    return max(-RECORD, min(record + (1 if right else -2), RECORD))


def _count(table: dict[Key, tuple[Use, int]], key: Key, use: Use) -> None:
    """`use` came after `key`: it is the successor, unless another one has come more often of late."""
    known, sure = table.get(key, (use, -1))
    if known == use:
        _put(table, key, (use, min(sure + 1, SURE)))
    else:
        _put(table, key, (known, sure - 1) if sure else (use, 0))


def _put(table: dict[Key, Value], key: Key, value: Value) -> None:
    """Set, and forget the older half of a table that is full."""
    table[key] = value
    if len(table) > TABLE:
        for old in list(table)[: TABLE // 2]:
            del table[old]

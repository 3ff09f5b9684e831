"""Exchange: one rank's side of all traffic between ranks, on a thread of its own.

The thread goes through rounds with the threads of the other ranks. In each, every rank says what it needs and what it
is doing (`zero.agreement`), and all carry out what follows from that, in the same order. A rank with something to say
begins a round at once, one without joins after at most `_IDLE_S`: so a rank whose user computes still gives out its
shards, every rank knows of every other that it lives, and nobody has to use parameters in the same order.

    user's thread   want / offer a job ---> wait ---------------------------> done
    this thread     rounds: say, conclude, carry out the jobs, grant the call

Invariants:
1. A job's memory belongs to this thread from the moment it is given until its completion is done.
2. Shards are given out only while no rank is closed, and a rank changes its shards only while it is closed, or in the
   action of a call, which runs here, on every rank in the same round.
3. Whatever fails here fails every job, this call and every later one, with one RankError; then there are no rounds.
4. The thread holds the model weakly, and ends with it, with the exchange, or with the program.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

from tiered.device.ticket import Completion, Event, Finished, Ticket, first, settled
from tiered.errors import RankError, TieredError
from tiered.stats import Meter
from tiered.zero.agreement import Call, Conclusion, Flag, Header, conclude, decode, describe, encode
from tiered.zero.collectives import Ranks, first_line
from tiered.zero.doing import Doing

T = TypeVar("T")
_IDLE_S = (0.002, 0.02)  # before a rank with nothing to say joins a round: at first, and at most
_LOST = 0.05  # of the time limit: given to the living to say so when one is lost


class Carrier(Protocol):
    """What moves the bytes of a round. Each method yields the place in what it was given of each job that is done."""

    def gather(self, moves: Sequence[tuple[int, Sequence[int], Any]]) -> Iterator[int]:
        """Groups, the ranks that want each, and what `want` was given, or None where this rank wants it not."""

    def reduce(self, payloads: Sequence[Any]) -> Iterator[int]:
        """What `offer` was given for gradients, in order of groups."""

    def complete(self, payloads: Sequence[Any]) -> Iterator[int]:
        """What `offer` was given for values, in order of groups."""


@dataclasses.dataclass(slots=True)
class _Job:
    """One group's part in a round."""

    payload: Any  # the carrier's
    ready: Event
    said: bool = False  # to the other ranks, in the round that is going on
    withheld: bool = False  # from the next round on: it is being taken back
    done: Completion = dataclasses.field(default_factory=Completion)

    @property
    def speaks(self) -> bool:
        """The next round may be about it."""
        return self.ready.done() and not self.withheld


@dataclasses.dataclass(slots=True)
class _Asked:
    """What the user waits in."""

    call: Call
    detail: int
    action: Callable[[], None]
    closes: bool = False
    unless: Sequence[Ticket] = ()  # it is no more asked for once one of these is done
    acting: bool = False  # the action has begun
    done: Completion = dataclasses.field(default_factory=Completion)

    @property
    def speaks(self) -> bool:
        return not any(ticket.done() for ticket in self.unless)


class Exchange:
    """See the file's contract."""

    def __init__(self, ranks: Ranks, meter: Meter, groups: int, timeout_s: float) -> None:
        """For a model of `groups` groups; `ranks` are connected, and from now on this thread's."""
        self.ranks = ranks
        self._meter = meter
        self._groups = groups
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._jobs: dict[tuple[Flag, int], _Job] = {}
        self._asked: _Asked | None = None
        self._failure: RankError | None = None
        self._closed = True  # until this rank's shards are filled
        self._stopping = False
        self._served = False  # some rank, in the last round
        self._last: list[Header] = []
        self._state = Doing()
        self._carrier: weakref.ref[Carrier] | None = None
        self._thread: threading.Thread | None = None

    def start(self, carrier: Carrier, owner: object) -> None:
        """Begin the rounds; they end when `owner` is collected, or `carrier`."""
        self._carrier = weakref.ref(carrier)
        self._thread = threading.Thread(target=self._rounds, name="tiered-ranks", daemon=True)
        weakref.finalize(owner, self._stop_soon).atexit = False
        atexit.register(self._at_exit)  # before the interpreter takes its threads down where they stand
        self._thread.start()

    # --- the user's thread ---

    def want(self, group: int, payload: Any, ready: Ticket) -> Completion:
        """Have the carrier gather a group once this rank's own part is `ready`."""
        done = self._give(Flag.WANT, group, payload, ready)
        if not ready.done():
            ready.add_done_callback(self._wake)
        return done

    def offer(self, flag: Flag, group: int, payload: Any) -> Completion:
        """Have the carrier exchange a group's gradient or values with every rank, once all have offered it."""
        return self._give(flag, group, payload, Finished())

    def together(self, call: Call, doing: str, action: Callable[[], T], *, detail: int = 0, closes: bool = False) -> T:
        """Run `action` once every rank has made the same `call` with the same `detail`, on the communication thread.

        closes: this rank changes its shards from then on, until `open`. Raises RankError where the ranks disagree, and
        what `action` raises.
        """
        results: list[T] = []
        self._ask(_Asked(call, detail, lambda: results.append(action()), closes), doing)
        return results[0]

    def any_of(self, jobs: Sequence[Ticket], doing: str) -> bool:
        """Wait until one of `jobs` is done; False where every rank's user waits for others, so that none will be."""
        asked = _Asked(Call.ROOM, 0, lambda: None, unless=jobs)
        self._ask(asked, doing)
        return not asked.speaks

    def _ask(self, asked: _Asked, doing: str) -> None:
        """Wait until what is asked for is granted, or is no more asked for."""
        with self.within(doing):
            with self._changed:
                self.check()
                self._asked = asked
                self._changed.notify_all()
            try:
                self.wait(first(asked.done, *asked.unless) if asked.unless else asked.done, "ranks")
                if asked.unless:
                    self._take_back(asked)
                if asked.done.done():
                    asked.done.wait()
            except BaseException as error:
                self._take_back(asked)  # first: its action may be going on
                if not asked.done.done() and not asked.unless:  # Ctrl-C: the others wait for what this rank cannot give
                    self._fail(RankError(f"rank {self.ranks.rank} was interrupted in {doing}"), error)
                raise

    def _take_back(self, asked: _Asked) -> None:
        """It is no more asked for, unless it has been answered; an action that is going on is waited for."""
        with self._changed:
            if self._asked is asked and not asked.acting:
                self._asked = None
        if asked.acting:
            settled(asked.done)

    def retract(self, flag: Flag, group: int) -> bool:
        """Take back what was offered, if it has not begun: True where it never will."""
        with self._changed:
            job = self._jobs.get((flag, group))
            if job is None:
                return False
            job.withheld = True
            while job.said and self._failure is None:
                self._changed.wait()
            return self._jobs.pop((flag, group), None) is not None

    def open(self) -> None:
        """This rank's shards are as they should be again."""
        self._closed = False

    def wait(self, event: Event, cause: str) -> None:
        """Wait for a job or a call; other ranks are told that this one waits."""
        self.settle(event, cause)
        event.wait()

    def settle(self, event: Event, cause: str) -> None:
        """As `wait`, but raises nothing. An interrupt passes."""
        if not event.done():
            with self._meter.stalled(cause), self._state.waiting():
                settled(event)

    @contextlib.contextmanager
    def within(self, doing: str, *, computing: bool = False) -> Iterator[None]:
        """The user's thread is in `doing`, in words; `computing`: and will be for a while, without any call."""
        with self._state.within(doing, computing):
            yield

    def computing(self, doing: str) -> None:
        """The user's thread has begun, or goes on with, `doing`: a forward, a backward or a step."""
        self._state.computing(doing)

    def idle(self, doing: str) -> None:
        """The user's thread has left `doing`."""
        self._state.idle(doing)

    @property
    def aboard(self) -> bool:
        """Whoever asks is the communication thread: in the action of a call, or about to give out a shard."""
        return threading.current_thread() is self._thread

    @property
    def failure(self) -> RankError | None:
        """Why there are no rounds any more."""
        return self._failure

    def stop(self) -> None:
        """End the rounds: this rank leaves. Idempotent; waits for the thread unless another rank keeps it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(2 * self._timeout_s + 1)
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what ends the program, if that is an error
        self.idle("the end of its program" + (f" by {type(error).__name__}: {first_line(error)}" if error else ""))
        self.stop()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stop_soon(self) -> None:
        """Of a model that nobody closed: it may be collected anywhere, so nothing here may lock or wait."""
        self._stopping = True

    # --- the communication thread ---

    def withdraw(self, flag: Flag) -> list[int]:
        """In the action of a call: take back what this rank has offered and not all have; returns the groups."""
        with self._changed:
            jobs = {group: self._jobs.pop((kind, group)) for kind, group in list(self._jobs) if kind is flag}
        for job in jobs.values():
            job.done.finish(RankError("it was taken back"))
        return list(jobs)

    def _rounds(self) -> None:
        idle = _IDLE_S[0]
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._speaks, idle)
                    header, jobs, asked = self._say()
                if not self._round(header, jobs, asked):
                    break
                self._over(jobs)
                busy = jobs or asked is not None or self._served  # whoever wanted something may want more
                idle = _IDLE_S[0] if busy else min(2 * idle, _IDLE_S[1])
        except BaseException as error:
            self._fail(self._named(error), error)
        finally:
            self._leave()

    def _round(self, header: Header, jobs: dict[tuple[Flag, int], _Job], asked: _Asked | None) -> bool:
        """One round; False where it was the last, since this rank has left."""
        headers = [decode(row) for row in self.ranks.headers(encode(header))]
        self._last = headers
        left = [rank for rank, other in enumerate(headers) if other.call is Call.LEAVE]
        if left:
            with contextlib.suppress(Exception):  # a connection that ends takes along what has not been read
                self.ranks.headers(encode(header))
            if header.call is not Call.LEAVE:
                raise RankError(f"rank {left[0]} has left the run: {describe(headers)}")
            return False
        decided = conclude(headers, self._timeout_s)
        if decided.disagreement is not None:
            raise RankError(decided.disagreement)
        self._carry_out(decided, jobs, asked)
        return True

    def _over(self, jobs: dict[tuple[Flag, int], _Job]) -> None:
        """A round is over. (Here, since no frame that lives on may hold a job: it would keep the model.)"""
        with self._changed:
            for job in jobs.values():
                job.said = False
            self._changed.notify_all()

    def _carry_out(self, decided: Conclusion, jobs: dict[tuple[Flag, int], _Job], asked: _Asked | None) -> None:
        self._served = bool(decided.gathers)
        if decided.gathers or decided.gradients or decided.values:
            self._move(decided, jobs)
        refused = decided.refused and asked is not None and asked.call is Call.ROOM
        if asked is not None and (decided.granted or refused):
            with self._changed:
                asked.acting = self._asked is asked
            if asked.acting:
                self._act(asked)
            elif decided.granted:
                raise RankError(f"rank {self.ranks.rank} was interrupted in a call that every rank made")

    def _act(self, asked: _Asked) -> None:
        """Answer the call."""
        self._closed |= asked.closes
        try:
            asked.action()
        except TieredError as error:  # this rank's own; what a connection raises fails everything alike
            self._asked = None
            asked.done.finish(error)
            raise
        self._asked = None
        asked.done.finish()

    def _move(self, decided: Conclusion, jobs: dict[tuple[Flag, int], _Job]) -> None:
        carrier = self._carrier() if self._carrier is not None else None
        if carrier is None:
            raise RankError("the model was collected")
        moves = []
        for group, wanting in decided.gathers:
            job = jobs.get((Flag.WANT, group))
            moves.append((group, wanting, None if job is None else job.payload))
        self._finish(Flag.WANT, [group for group, _, _ in moves], jobs, carrier.gather(moves))
        gradients = [jobs[Flag.GRADIENT, group].payload for group in decided.gradients]
        self._finish(Flag.GRADIENT, decided.gradients, jobs, carrier.reduce(gradients))
        values = [jobs[Flag.VALUES, group].payload for group in decided.values]
        self._finish(Flag.VALUES, decided.values, jobs, carrier.complete(values))

    def _finish(
        self, flag: Flag, groups: Sequence[int], jobs: dict[tuple[Flag, int], _Job], done: Iterator[int]
    ) -> None:
        with (
            self._meter.span(f"{str(flag.name).lower()} of groups {list(groups)}", "ranks") if groups else nullcontext()
        ):
            for position in done:
                if (job := jobs.get((flag, groups[position]))) is not None:
                    with self._changed:
                        self._jobs.pop((flag, groups[position]), None)
                    job.done.finish()

    def _say(self) -> tuple[Header, dict[tuple[Flag, int], _Job], _Asked | None]:
        """This rank's header, and what of it this round may be about."""
        jobs = {key: job for key, job in self._jobs.items() if job.speaks}
        flags = bytearray(self._groups)
        for (flag, group), job in jobs.items():
            flags[group] |= flag
            job.said = True
        asked = self._asked if self._asked is not None and self._asked.speaks else None
        leaving = self._stopping or self._failure is not None
        call = Call.LEAVE if leaving else asked.call if asked is not None else Call.NONE
        doing, computing, waited, quiet = self._state.seen()
        detail = asked.detail if asked is not None else 0
        header = Header(call, detail, self._closed, computing, waited, quiet, doing, bytes(flags))
        return header, jobs, asked

    def _speaks(self) -> bool:
        if self._stopping or self._failure is not None:
            return True
        asks = self._asked is not None and self._asked.speaks
        return asks or any(job.speaks for job in self._jobs.values())

    def _named(self, error: BaseException) -> RankError:
        """What has failed, as an error that says who was doing what."""
        if isinstance(error, RankError):
            return error
        before = f"; before that, {describe(self._last)}" if self._last else ""
        self.ranks.close()  # whoever else waits in a call finds out now
        reason = f"{type(error).__name__}: {first_line(error)}"
        found = self.ranks.roll_call(reason, _LOST * self._timeout_s)
        lost = [rank for rank in range(self.ranks.size) if rank not in found]
        who = f"ranks {lost} are gone, or do not answer" if found and lost else "a call between the ranks has failed"
        others = {rank: said for rank, said in found.items() if not lost or rank == self.ranks.rank}
        return RankError(f"{who} ({'; '.join(f'rank {r}: {said}' for r, said in others.items()) or reason}){before}")

    # --- both ---

    def _give(self, flag: Flag, group: int, payload: Any, ready: Event) -> Completion:
        job = _Job(payload, ready)
        with self._changed:
            self.check()
            self._jobs[flag, group] = job
            self._changed.notify_all()
        return job.done

    def check(self) -> None:
        """Raise RankError where there are no rounds any more."""
        if self._failure is not None:
            raise RankError(str(self._failure)) from self._failure
        if self._stopping:
            raise RankError(f"rank {self.ranks.rank} has left the run: its model is closed, or its program ends")

    def _fail(self, failure: RankError, cause: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                failure.__cause__ = cause.with_traceback(None) if cause is not failure else None
                self._failure = failure.with_traceback(None)  # whose frames would keep the model
            over = {key: job for key, job in self._jobs.items() if self.aboard or not job.said}
            self._jobs = {key: job for key, job in self._jobs.items() if key not in over}  # which a round is about
            asked, self._asked = self._asked, None
            self._changed.notify_all()
        waiting = [job.done for job in over.values()] + ([asked.done] if asked is not None else [])
        for completion in waiting:
            completion.finish(self._failure)

    def _leave(self) -> None:
        """The thread ends: whoever still waits is told, and connections end, so that other ranks are."""
        self._fail(RankError(f"rank {self.ranks.rank} has left the run"), RankError())
        with contextlib.suppress(Exception):
            self.ranks.close()
        atexit.unregister(self._at_exit)  # which would keep it

"""The rounds of ranks that are threads of one process: what is served, granted, taken back, refused, and given up.

Each side has an exchange on a thread of its own, over a stand-in for torch.distributed, and a carrier that only notes
what it is asked to do. The tests' own thread is every side's user, but where sides wait for each other.
"""

import contextlib
import gc
import itertools
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from threaded_ranks import LIMIT_S, THREAD, World, ranks_threads

import tiered
from tiered.device.ticket import Completion, Finished
from tiered.stats import Meter
from tiered.zero.agreement import Call, Flag, Header, decode
from tiered.zero.collectives import Ranks
from tiered.zero.exchange import Exchange

PATIENT_S, IMPATIENT_S = 2 * LIMIT_S, 1.0  # the limit of a test ends before a patient rank gives up
HELD_S = 0.1
GROUPS = 4
Done = tuple[str, Any]


class Carrier:
    """Notes what it is asked to do, in order; fails where it is told to."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.failing: BaseException | None = None

    def gather(self, moves: Sequence[tuple[int, Sequence[int], Any]]) -> Iterator[int]:
        return self._note("gather", [(group, tuple(wanting), payload) for group, wanting, payload in moves])

    def reduce(self, payloads: Sequence[Any]) -> Iterator[int]:
        return self._note("reduce", payloads)

    def complete(self, payloads: Sequence[Any]) -> Iterator[int]:
        return self._note("complete", payloads)

    def asked(self, verb: str) -> list[Any]:
        return [what for kind, what in self.done if kind == verb]

    def _note(self, verb: str, jobs: Sequence[Any]) -> Iterator[int]:
        for position, job in enumerate(jobs):
            if self.failing is not None:
                raise self.failing
            self.done.append((verb, job))
            yield position


class Owner:
    """Stands for the model: nothing that an exchange keeps leads here."""


class Watch:
    """What a test does when a rank is about to say something."""

    def __init__(self) -> None:
        self.on_header: Callable[[Header], None] = lambda header: None

    def over(self, send: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def headers(mine: torch.Tensor) -> torch.Tensor:
            self.on_header(decode(mine))
            return send(mine)

        return headers


class Side:
    """One rank: its exchange, and all that keeps it."""

    def __init__(self, timeout_s: float) -> None:
        self.ranks = Ranks("cpu", timeout_s)
        self.ranks.connect()
        self.meter, self.carrier, self.owner = Meter(), Carrier(), Owner()
        self.exchange = Exchange(self.ranks, self.meter, GROUPS, timeout_s)
        self.watch = Watch()
        self.ranks.headers = self.watch.over(self.ranks.headers)  # type: ignore[method-assign]

    def want(self, group: int, payload: Any = "wanted") -> Completion:
        return self.exchange.want(group, payload, Finished())

    def offer(self, group: int, payload: Any = "offered", flag: Flag = Flag.GRADIENT) -> Completion:
        return self.exchange.offer(flag, group, payload)

    def together(self, call: Call, action: Callable[[], Any] = lambda: None, **how: Any) -> Any:
        return self.exchange.together(call, call.name.lower(), action, **how)

    def ended(self) -> None:
        """Wait until there are no rounds any more."""
        assert self.exchange._thread is not None
        self.exchange._thread.join(LIMIT_S)
        assert not self.exchange._thread.is_alive()

    def refuses(self) -> str:
        """What every call says from now on."""
        said = set()
        for call in (lambda: self.want(0), lambda: self.offer(0), lambda: self.together(Call.STEP)):
            with pytest.raises(tiered.RankError) as caught:
                call()
            said.add(str(caught.value))
        (message,) = said
        return message


class Sides(list[Side]):
    """All sides, and what they do at once."""

    world: World

    def run(self, program: Callable[[Side], Any]) -> list[Any]:
        """What `program(side)` returns on each."""
        return self.world.run(lambda rank: program(self[rank]))

    def refused(self, program: Callable[[Side], Any]) -> list[str]:
        """What the RankError says that `program(side)` ends in on each."""
        ends = self.world.ended(lambda rank: program(self[rank]))
        assert [type(end) for end in ends] == [tiered.RankError] * len(self), ends
        return [str(end) for end in ends]


@contextlib.contextmanager
def sides(ranks: int, timeout_s: float = PATIENT_S) -> Iterator[Sides]:
    """Sides whose rounds go on; they leave together at the end."""
    with World(ranks).installed() as world:
        made = Sides(world.run(lambda rank: Side(timeout_s)))
        made.world = world
        made.run(lambda side: side.exchange.start(side.carrier, side.owner))
        made.run(lambda side: side.exchange.open())
        try:
            yield made
        finally:
            world.ended(lambda rank: made[rank].exchange.stop())
    assert ranks_threads() == []


def waits(*events: Completion) -> None:
    for event in events:
        event.wait(LIMIT_S)


class Held:
    """Holds a rank's thread in a round whose header says something, until it is let go."""

    def __init__(self, side: Side, says: Callable[[Header], bool]) -> None:
        self.there, self.gone = threading.Event(), threading.Event()
        self._says = says
        side.watch.on_header = self._hold

    def _hold(self, header: Header) -> None:
        if self._says(header) and not self.gone.is_set():
            self.there.set()
            assert self.gone.wait(LIMIT_S)

    def await_it(self) -> None:
        assert self.there.wait(LIMIT_S)

    @contextlib.contextmanager
    def letting_go_soon(self) -> Iterator[None]:
        timer = threading.Timer(HELD_S, self.gone.set)
        timer.start()
        yield
        timer.join()


# --- what is served ---


def test_what_one_rank_wants_is_served_while_the_others_users_do_nothing() -> None:
    with sides(3) as made:
        first, second, third = made
        waits(first.want(2, "mine"))
        assert first.carrier.done == [("gather", (2, (0,), "mine"))]
        waits(second.want(1, "own"), third.want(3, "other"))
        made.world.await_rounds(1)  # so that all have done their part in the ones before
        assert ("gather", (2, (0,), None)) in second.carrier.done
        for side, there in ((first, None), (third, None), (second, "own")):
            assert (1, there) in [(group, payload) for group, _, payload in side.carrier.asked("gather")]


def test_a_want_that_is_not_ready_keeps_nobody_and_is_served_when_it_is() -> None:
    with sides(2) as made:
        first, second = made
        ready = Completion()
        job = first.exchange.want(0, "late", ready)
        waits(second.want(1))
        made.world.await_rounds(3)
        assert not job.done()
        assert [group for group, _, _ in first.carrier.asked("gather")] == [1]
        ready.finish()
        waits(job)


def test_a_rank_gives_nothing_before_it_has_opened_at_first() -> None:
    with World(2).installed() as world:
        made = Sides(world.run(lambda rank: Side(PATIENT_S)))
        made.world = world
        made.run(lambda side: side.exchange.start(side.carrier, side.owner))
        first, second = made
        first.exchange.open()
        job = first.want(0)
        world.await_rounds(3)
        assert not job.done()
        second.exchange.open()
        waits(job)
        made.run(lambda side: side.exchange.stop())


def test_nothing_is_served_while_a_rank_is_closed_and_all_that_waits_when_it_opens() -> None:
    with sides(3) as made:
        first, second, third = made
        made.run(lambda side: side.together(Call.STEP, closes=True))
        jobs = first.want(0), second.want(1)
        for opening in (first, third):
            made.world.await_rounds(3)
            assert not any(job.done() for job in jobs)
            opening.exchange.open()
        made.world.await_rounds(3)
        assert not any(job.done() for job in jobs)
        assert all(side.carrier.done == [] for side in made)
        second.exchange.open()
        waits(*jobs)


@pytest.mark.parametrize(("flag", "verb"), [(Flag.GRADIENT, "reduce"), (Flag.VALUES, "complete")])
def test_offers_are_matched_by_group_whatever_the_order_they_come_in(flag: Flag, verb: str) -> None:
    for order in itertools.permutations(range(3)):
        with sides(2) as (first, second):
            jobs = [first.offer(group, f"first {group}", flag) for group in range(3)]
            jobs += [second.offer(group, f"second {group}", flag) for group in order]
            waits(*jobs)
            done = [[what.split() for what in side.carrier.asked(verb)] for side in (first, second)]
            assert [name for name, _ in done[0]] == ["first"] * 3
            assert [group for _, group in done[0]] == [group for _, group in done[1]]


def test_what_not_all_have_offered_waits() -> None:
    with sides(3) as made:
        first, second, third = made
        jobs = first.offer(0), second.offer(0), third.offer(1)
        made.world.await_rounds(3)
        assert not any(job.done() for job in jobs)
        waits(third.offer(0), *jobs[:2])
        assert not jobs[2].done()


# --- what all do together ---


def test_a_call_runs_its_action_on_every_rank_in_one_round_and_returns_what_it_made() -> None:
    with sides(3) as made:
        for number in range(3):
            sums = made.run(
                lambda side, number=number: side.together(
                    Call.AVERAGE, lambda: side.ranks.sum([side.ranks.rank, number])
                )
            )
            assert sums == [[3.0, 3.0 * number]] * 3
        assert all(side.exchange.failure is None for side in made)


def test_a_call_waits_for_the_last_rank_to_make_it() -> None:
    with sides(2) as made:
        acted: list[int] = []

        def call(side: Side) -> None:
            if side.ranks.rank:
                made.world.await_rounds(5)
                assert acted == []
            side.together(Call.EDIT, lambda: acted.append(side.ranks.rank))

        made.run(call)
        assert sorted(acted) == [0, 1]


def test_a_wait_for_any_of_several_jobs_ends_with_the_first_and_says_no_more_then() -> None:
    with sides(2) as made:
        first, second = made
        jobs = [first.offer(0), first.offer(1)]
        outcome: list[bool] = []
        waiting = threading.Thread(target=lambda: outcome.append(first.exchange.any_of(jobs, "room")), daemon=True)
        waiting.start()
        waits(second.offer(1))
        waiting.join(LIMIT_S)
        assert outcome == [True]
        assert [job.done() for job in jobs] == [False, True]
        made.run(lambda side: side.together(Call.STEP))  # which no other call is in the way of


def test_a_wait_for_jobs_that_no_rank_can_do_any_more_is_refused_and_leaves_calls_as_they_are() -> None:
    with sides(3) as made:
        before, after = [0] * 3, [0] * 3

        def program(side: Side) -> bool:
            rank = side.ranks.rank
            if rank == 2:  # has nothing to offer
                side.together(Call.BACKWARD, lambda: before.__setitem__(rank, 1))
                return False
            job = side.offer(rank)  # which nobody else does
            found = side.exchange.any_of([job], "room")
            side.together(Call.BACKWARD, lambda: after.__setitem__(rank, 1))
            return found

        assert made.run(program) == [False] * 3
        assert (before, after) == ([0, 0, 1], [1, 1, 0])


def test_an_error_ends_a_wait_for_any_of_several_jobs() -> None:
    with sides(2) as made:

        def program(side: Side) -> None:
            if side.ranks.rank:
                side.exchange.stop()
            side.exchange.any_of([side.offer(0)], "room")

        for message in made.refused(program):
            assert "has left the run" in message


def test_what_is_offered_before_a_call_is_done_before_its_action() -> None:
    with sides(2) as made:

        def call(side: Side) -> None:
            job = side.offer(0)
            side.together(Call.BACKWARD, lambda: side.carrier.done.append(("action", job.done())))

        made.run(call)
        assert all(side.carrier.done == [("reduce", "offered"), ("action", True)] for side in made)


@pytest.mark.parametrize("error", [tiered.StorageError("the drive is full"), OSError("the drive is full")])
def test_what_an_action_raises_is_named_on_every_rank_and_its_own_where_it_is_of_this_package(error: Exception) -> None:
    with sides(2) as made:

        def act(side: Side) -> None:
            if side.ranks.rank:
                raise error
            side.ranks.sum([1.0])  # which the other never does

        ends = made.world.ended(lambda rank: made[rank].together(Call.VALUES, lambda: act(made[rank])))
        assert isinstance(ends[0], tiered.RankError)
        assert ends[1] is error if isinstance(error, tiered.TieredError) else isinstance(ends[1], tiered.RankError)
        for side in made:
            side.ended()
            assert f"rank 1: {type(error).__name__}: the drive is full" in side.refuses()


@pytest.mark.parametrize("other", [{"call": Call.STEP}, {"call": Call.EDIT, "detail": 3}])
def test_different_calls_end_in_an_error_on_every_rank_at_once(other: dict[str, Any]) -> None:
    with sides(3) as made:
        calls = [{"call": Call.EDIT}, other, {"call": Call.EDIT}]
        for message in made.refused(lambda side: side.together(**calls[side.ranks.rank])):
            assert message.startswith("the ranks wait for different things")
            assert all(f"rank {rank}: waits 0 s in" in message for rank in range(3))
        assert len({side.refuses() for side in made}) == 1


def test_a_rank_that_does_not_come_ends_the_wait_of_every_other_within_the_limit() -> None:
    with sides(3, IMPATIENT_S) as made:
        with made[2].exchange.within("its own affairs"):
            pass

        def call(side: Side) -> None:
            if side.ranks.rank < 2:
                side.together(Call.STEP)
            else:
                side.ended()

        ends = made.world.ended(lambda rank: call(made[rank]))
        assert isinstance(ends[0], tiered.RankError)
        assert isinstance(ends[1], tiered.RankError)
        for side in made:
            assert "for rank 2, which made no call (rank_timeout_s=1)" in side.refuses()
            assert "ago it was in its own affairs" in side.refuses()


def test_a_rank_whose_threads_stand_still_is_named_by_the_others() -> None:
    with sides(3, IMPATIENT_S) as made:
        made.world.stop(1)

        ends = made.world.ended(lambda rank: made[rank].want(0).wait() if rank != 1 else None)
        for rank in (0, 2):
            assert isinstance(ends[rank], tiered.RankError)
            assert "ranks [1] are gone, or do not answer" in made[rank].refuses()
        made.world.go_on(1)


# --- what others are told ---


def test_who_waits_for_a_job_says_so_to_the_others_and_is_counted_as_stalled() -> None:
    with sides(2) as made:
        first, _ = made
        ready, told = Completion(), threading.Event()
        first.watch.on_header = lambda header: told.set() if header.waits else None
        job = first.exchange.want(0, "wanted", ready)

        def finish() -> None:
            if told.wait(LIMIT_S / 2):
                made.world.await_rounds(1)
            ready.finish()

        timer = threading.Thread(target=finish)
        timer.start()
        first.exchange.wait(job, "gather")
        timer.join()
        assert told.is_set()
        assert first.meter.stalls["gather"] > 0


def test_what_a_user_is_doing_is_said_with_whether_it_computes() -> None:
    with sides(2) as made:
        first, _ = made
        said: list[tuple[str, bool]] = []
        first.watch.on_header = lambda header: said.append((header.doing, header.computing))

        def after_a_round() -> tuple[str, bool]:
            made.world.await_rounds(3)
            return said[-1]

        with first.exchange.within("the forward of 'layer 1'", computing=True):
            assert after_a_round() == ("the forward of 'layer 1'", True)
            with first.exchange.within("reading 'weight'"):
                assert after_a_round() == ("reading 'weight'", True)
            assert after_a_round() == ("the forward of 'layer 1'", True)
        assert after_a_round() == ("the forward of 'layer 1'", False)
        first.exchange.computing("step()")
        assert after_a_round() == ("step()", True)
        first.exchange.idle("step()")
        with first.exchange.within("state_dict()"):
            pass
        assert after_a_round() == ("state_dict()", False), "what was done last"


# --- what is taken back ---


def taken_back(side: Side, group: int) -> bool:
    """`retract`, which must not go on for ever while rounds do."""
    gave_up = threading.Event()

    def give_up() -> None:
        gave_up.set()
        side.exchange._failure = tiered.RankError("the test gave up")  # which ends every wait

    watchdog = threading.Timer(LIMIT_S / 4, give_up)
    watchdog.start()
    back = side.exchange.retract(Flag.GRADIENT, group)
    watchdog.cancel()
    assert not gave_up.is_set()
    return back


def test_what_others_have_not_offered_is_taken_back_and_may_be_offered_anew() -> None:
    with sides(2) as made:
        first, second = made
        first.offer(0, "old")
        made.world.await_rounds(3)
        assert taken_back(first, 0)
        assert not taken_back(first, 0)
        waits(second.offer(0), first.offer(0, "new"))
        assert first.carrier.asked("reduce") == ["new"]


def test_what_has_been_done_cannot_be_taken_back() -> None:
    with sides(2) as (first, second):
        waits(first.offer(0), second.offer(0))
        assert not first.exchange.retract(Flag.GRADIENT, 0)


@pytest.mark.parametrize("matched", [False, True])
def test_what_a_round_has_begun_to_speak_of_is_taken_back_after_it_if_at_all(matched: bool) -> None:
    with sides(2) as made:
        first, second = made
        held = Held(first, lambda header: bool(header.flags[0] & Flag.GRADIENT))
        job = first.offer(0)
        held.await_it()
        if matched:
            second.offer(0)
        with held.letting_go_soon():
            back = taken_back(first, 0)
            assert held.gone.is_set(), "the round had not been carried out"
        if not back:
            waits(job)
        assert back == (first.carrier.asked("reduce") == [])
        assert matched or back


def test_an_action_takes_back_what_this_rank_alone_has_offered() -> None:
    with sides(2) as made:
        orders = [(0, 1, 2), (2,)]
        jobs: dict[int, list[Completion]] = {}

        def meet(side: Side) -> list[int]:
            jobs[side.ranks.rank] = [side.offer(group) for group in orders[side.ranks.rank]]
            side.offer(3, flag=Flag.VALUES)
            return side.together(Call.BACKWARD, lambda: side.exchange.withdraw(Flag.GRADIENT))

        assert made.run(meet) == [[0, 1], []]
        for job in jobs[0][:2]:  # whoever waits for one of them hears of it
            with pytest.raises(tiered.RankError, match="taken back"):
                job.wait(LIMIT_S)
        assert jobs[0][2].done()
        before = [side.carrier.asked("reduce") for side in made]
        waits(*(side.offer(0) for side in made))
        made.world.await_rounds(3)
        assert [side.carrier.asked("reduce") for side in made] == [[*each, "offered"] for each in before]


# --- what fails ---


@pytest.mark.parametrize("failing", [0, 1])
def test_one_job_that_fails_fails_all_that_wait_and_every_later_call_on_every_rank(failing: int) -> None:
    with sides(2) as made:
        made[failing].carrier.failing = OSError("the drive is gone")
        never = Completion()

        def use(side: Side) -> None:
            others = [side.offer(side.ranks.rank), side.exchange.want(3, "later", never)]
            with pytest.raises(tiered.RankError):
                side.want(2).wait(LIMIT_S)
                side.together(Call.STEP)  # where the want had been served before
            for job in others:
                with pytest.raises(tiered.RankError):
                    job.wait(LIMIT_S)

        made.run(use)
        for side in made:
            assert f"rank {failing}: OSError: the drive is gone" in side.refuses()
            assert not side.exchange.retract(Flag.GRADIENT, side.ranks.rank)
        assert isinstance(made[failing].exchange.failure.__cause__, OSError)


def test_waiting_for_a_job_that_failed_raises_its_error_each_time() -> None:
    with sides(2) as made:
        made[0].carrier.failing = OSError("the drive is gone")
        job = made[0].want(0)
        for _ in range(2):
            with pytest.raises(tiered.RankError, match="the drive is gone"):
                made[0].exchange.wait(job, "gather")
        made[0].exchange.settle(job, "gather")


def test_an_interrupt_in_a_call_is_raised_and_ends_the_rounds_of_every_rank() -> None:
    with sides(2) as made:
        ready = threading.Event()
        made[0].watch.on_header = lambda header: ready.set() if header.waits else None

        def strike() -> None:
            ready.wait(LIMIT_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        striking = threading.Thread(target=strike)
        striking.start()
        with pytest.raises(KeyboardInterrupt):
            made[0].together(Call.STEP)
        striking.join()
        assert made[0].refuses() == "rank 0 was interrupted in step"
        made[1].ended()
        with pytest.raises(tiered.RankError):
            made[1].together(Call.STEP)


def test_an_interrupt_while_the_action_of_a_call_goes_on_is_raised_when_that_has_ended() -> None:
    with sides(2) as made:
        ended = threading.Event()

        def act() -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(HELD_S)
            ended.set()

        other = threading.Thread(target=lambda: made[1].together(Call.STEP), daemon=True)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            made[0].together(Call.STEP, act)
        assert ended.is_set()
        other.join(LIMIT_S)
        made.run(lambda side: side.together(Call.VALUES))  # the call was made, so the ranks go on


def test_an_interrupt_while_a_job_is_waited_for_leaves_the_job_as_it_is() -> None:
    with sides(2) as made:
        ready, told = Completion(), threading.Event()
        made[0].watch.on_header = lambda header: told.set() if header.waits else None
        job = made[0].exchange.want(0, "wanted", ready)

        def strike() -> None:
            told.wait(LIMIT_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        striking = threading.Thread(target=strike)
        striking.start()
        with pytest.raises(KeyboardInterrupt):
            made[0].exchange.wait(job, "gather")
        striking.join()
        ready.finish()
        waits(job)
        assert all(side.exchange.failure is None for side in made)


# --- the end ---


def test_a_rank_that_leaves_ends_the_rounds_and_the_others_say_who() -> None:
    with sides(3) as made:
        made[1].exchange.stop()
        assert made[1].refuses() == "rank 1 has left the run"
        for side in (made[0], made[2]):
            side.ended()
            assert side.refuses().startswith("rank 1 has left the run: rank 0: ")


def test_a_rank_that_is_about_to_leave_takes_no_more_calls() -> None:
    with sides(2) as made:
        made.world.stop(1)
        made[0].exchange._stop_soon()  # and cannot leave yet
        assert made[0].refuses().startswith("rank 0 has left the run: its model is closed, or its program ends")
        made.world.go_on(1)


def test_who_waits_when_a_rank_leaves_is_told() -> None:
    with sides(2) as made:
        jobs = [made[0].offer(0), made[0].exchange.want(1, "wanted", Completion())]
        made[1].exchange.stop()
        for job in jobs:
            with pytest.raises(tiered.RankError, match="rank 1 has left the run"):
                job.wait(LIMIT_S)


def test_ranks_that_leave_together_leave_without_an_error() -> None:
    with sides(3) as made:
        made.run(lambda side: side.together(Call.CLOSE))
        made.run(lambda side: side.exchange.stop())
        assert ranks_threads() == []
        assert all("has left the run" in side.refuses() for side in made)


def test_stopping_twice_is_stopping_once() -> None:
    with sides(2) as made:
        for _ in range(2):
            made.run(lambda side: side.exchange.stop())


def test_an_owner_that_is_collected_ends_its_thread_and_the_others_are_told() -> None:
    with sides(2) as made:
        first, second = made
        first.owner = None  # type: ignore[assignment]
        gc.collect()
        first.ended()
        with pytest.raises(tiered.RankError, match="rank 0 has left the run"):
            second.together(Call.STEP)
        left = weakref.ref(first.exchange)
        del first.exchange
        gc.collect()
        assert left() is None, "it is kept for the end of the program"
        first.exchange = second.exchange  # which is stopped at the end


def test_after_the_end_nothing_is_kept_of_jobs_or_of_the_exchange() -> None:
    class Payload:
        pass

    with sides(2) as made:
        kept = []

        def give(flag: Flag) -> None:
            given = [Payload(), Payload()]
            kept.extend(weakref.ref(payload) for payload in given)
            waits(*(side.exchange._give(flag, 1, each, Finished()) for side, each in zip(made, given, strict=True)))

        for flag in Flag:
            give(flag)
        for side in made:
            side.carrier.done.clear()
        made.world.await_rounds(2)
        gc.collect()
        assert [reference() for reference in kept] == [None] * 6, "a job that is done keeps what it was given"
        made.run(lambda side: side.exchange.stop())
        exchanges = [weakref.ref(side.exchange) for side in made]
        made.clear()
        del side
        gc.collect()
        assert [reference() for reference in exchanges] == [None, None]


def test_threads_are_named_and_end_with_their_exchange() -> None:
    before = threading.active_count()
    with sides(3) as made:
        assert [thread.name for thread in ranks_threads()] == [THREAD] * 3
        made.run(lambda side: side.exchange.stop())
        assert ranks_threads() == []
        assert threading.active_count() == before

"""Tickets: done once, with the error it had every time, and continued where it ended."""

import threading

import pytest

from tiered.device.ticket import Completion, Finished, Ticket, chain


def test_a_completion_is_done_when_it_is_finished_and_not_before() -> None:
    ticket = Completion()
    assert not ticket.done()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        ticket.wait(0.01)
    ticket.finish()
    assert ticket.done()
    ticket.wait()


def test_an_error_is_raised_by_every_wait() -> None:
    ticket = Completion()
    error = OSError("the drive is gone")
    ticket.finish(error)
    for _ in range(3):
        with pytest.raises(OSError, match="the drive is gone") as caught:
            ticket.wait(0)
        assert caught.value is error


@pytest.mark.parametrize("error", [None, OSError("no")])
def test_callbacks_run_once_each_whether_added_before_or_after(error: OSError | None) -> None:
    ticket = Completion()
    ran: list[str] = []
    ticket.add_done_callback(lambda: ran.append("before"))
    assert ran == []
    ticket.finish(error)
    ticket.add_done_callback(lambda: ran.append("after"))
    assert ran == ["before", "after"]


def test_callbacks_added_while_another_thread_finishes_all_run_once() -> None:
    for _ in range(50):
        ticket, ran, barrier = Completion(), [0] * 20, threading.Barrier(2)

        def finish(ticket: Completion = ticket, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(30)
            ticket.finish()

        thread = threading.Thread(target=finish)
        thread.start()
        barrier.wait(30)
        for index in range(20):
            ticket.add_done_callback(lambda index=index, ran=ran: ran.__setitem__(index, ran[index] + 1))
        thread.join(30)
        assert ran == [1] * 20


def test_what_is_finished_stays_finished() -> None:
    ticket: Ticket = Finished()
    ran: list[int] = []
    ticket.add_done_callback(lambda: ran.append(1))
    ticket.wait(0)
    assert ticket.done()
    assert ran == [1]


def test_a_chain_starts_the_second_after_the_first_and_ends_after_the_second() -> None:
    first, second = Completion(), Completion()
    started: list[bool] = []

    def then() -> Ticket:
        started.append(first.done())
        return second

    whole = chain(first, then)
    assert (started, whole.done()) == ([], False)
    first.finish()
    assert (started, whole.done()) == ([True], False)
    second.finish()
    whole.wait(0)


def test_a_chain_whose_first_fails_never_starts_the_second() -> None:
    first = Completion()
    started: list[int] = []
    whole = chain(first, lambda: (started.append(1), Finished())[1])
    first.finish(OSError("the read failed"))
    with pytest.raises(OSError, match="the read failed"):
        whole.wait(0)
    assert started == []


@pytest.mark.parametrize("early", [True, False])
def test_a_chain_has_the_error_of_its_second(early: bool) -> None:
    first, second = Completion(), Completion()
    whole = chain(first, lambda: second)
    for ticket in (first, second) if not early else (second, first):
        ticket.finish(OSError("the copy failed") if ticket is second else None)
    with pytest.raises(OSError, match="the copy failed"):
        whole.wait(0)


def test_a_chain_whose_second_cannot_start_has_that_error() -> None:
    def then() -> Ticket:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        chain(Finished(), then).wait(0)

"""Tickets: done once, with the error it had every time, and continued where it ended."""

import threading

import pytest

from tiered.device.ticket import Completion, Finished, Ticket, after


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


def test_what_comes_after_a_ticket_runs_when_it_ends_and_is_part_of_the_whole() -> None:
    first = Completion()
    ran: list[bool] = []
    whole = after(first, lambda: ran.append(first.done()))
    assert (ran, whole.done()) == ([], False)
    first.finish()
    whole.wait(0)
    assert ran == [True]


def test_after_a_failure_nothing_runs_and_the_whole_has_its_error() -> None:
    first = Completion()
    ran: list[int] = []
    whole = after(first, lambda: ran.append(1))
    first.finish(OSError("the read failed"))
    with pytest.raises(OSError, match="the read failed"):
        whole.wait(0)
    assert ran == []


@pytest.mark.parametrize("early", [True, False])
def test_the_whole_has_the_error_of_what_runs_after(early: bool) -> None:
    def then() -> None:
        raise ValueError("no room")

    first = Completion()
    if early:
        first.finish()
    whole = after(first, then)
    if not early:
        first.finish()
    with pytest.raises(ValueError, match="no room"):
        whole.wait(0)

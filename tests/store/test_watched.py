"""A watched transfer: its owner knows of a failure before those who wait for it."""

import pytest

from tiered.device.ticket import Completion
from tiered.store.watched import Watched


def test_who_sees_a_failure_finds_that_the_owner_knows() -> None:
    ticket, told = Completion(), list[BaseException]()
    watched, error = Watched(ticket, told.append), OSError("the drive is gone")
    ticket.finish(error)
    assert told == []
    with pytest.raises(OSError, match="the drive is gone"):
        watched.wait()
    assert told == [error]


def test_patience_that_ends_is_no_failure_of_the_transfer() -> None:
    ticket, told = Completion(), list[BaseException]()
    watched = Watched(ticket, told.append)
    with pytest.raises(TimeoutError):
        watched.wait(0.01)
    assert not watched.done()
    ticket.finish()
    watched.wait()
    assert (watched.done(), told) == (True, [])


def test_callbacks_are_the_transfers_own() -> None:
    ticket, ran = Completion(), list[int]()
    Watched(ticket, lambda error: None).add_done_callback(lambda: ran.append(1))
    ticket.finish(OSError("no"))
    assert ran == [1]

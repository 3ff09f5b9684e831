"""Stop signals: the first is a request, a second SIGINT interrupts at once, and the old handlers come back."""

import signal
import threading

import pytest

from tiered.cli.signals import StopSignal


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_remembered_and_interrupts_nothing(number: signal.Signals, code: int) -> None:
    with StopSignal() as stop:
        assert not stop.requested
        assert stop.exit_code == 0
        signal.raise_signal(number)
        assert stop.requested
        assert stop.exit_code == code


def test_a_second_sigint_interrupts_at_once() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.exit_code == 130


def test_a_later_sigterm_neither_interrupts_nor_hides_the_first_signal() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGINT


def test_the_previous_handlers_come_back() -> None:
    before = handlers()
    with StopSignal():
        assert handlers() != before
    assert handlers() == before


def test_outside_the_main_thread_no_handler_changes() -> None:
    before, within = handlers(), []

    def enter() -> None:
        with StopSignal():
            within.extend(handlers())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert within == before

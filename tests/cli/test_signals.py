"""Stop signals: the first is a request, a second SIGINT interrupts at once, and the old handlers come back."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered.cli.signals import StopSignal

Mean = Callable[[float], float]


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


def test_of_several_ranks_the_handlers_stay_away_and_a_late_signal_changes_nothing() -> None:
    before = handlers()
    try:
        with StopSignal(restore=False):
            pass
        assert handlers() == [signal.SIG_IGN, signal.SIG_IGN]
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)  # type: ignore[arg-type]


def mean_over(count: int) -> Mean:
    """The mean over that many threads of what each gives."""
    given: list[float] = []
    means: list[float] = []

    def take() -> None:
        means.append(sum(given) / len(given))
        given.clear()

    barrier = threading.Barrier(count, action=take, timeout=60)

    def mean(value: float) -> float:
        given.append(value)
        barrier.wait()
        return means[-1]

    return mean


@pytest.mark.parametrize(
    ("received", "agreed"),
    [
        ((None, None, None), None),
        ((None, signal.SIGINT, None), signal.SIGINT),
        ((signal.SIGINT, signal.SIGINT, signal.SIGINT), signal.SIGINT),
        ((signal.SIGTERM, None, None), signal.SIGTERM),
        ((signal.SIGINT, None, signal.SIGTERM), signal.SIGTERM),
    ],
)
def test_ranks_agree_to_stop_if_any_of_them_got_a_signal_and_on_which(
    received: tuple[signal.Signals | None, ...], agreed: signal.Signals | None
) -> None:
    stops, mean = [StopSignal() for _ in received], mean_over(len(received))
    for stop, number in zip(stops, received, strict=True):
        stop.received = number
    with ThreadPoolExecutor(len(stops)) as ranks:
        answers = list(ranks.map(lambda stop: stop.agreed(mean), stops))
    assert answers == [agreed is not None] * len(stops)
    assert [stop.received for stop in stops] == [agreed] * len(stops)


def test_outside_the_main_thread_no_handler_changes() -> None:
    before, within = handlers(), []

    def enter() -> None:
        with StopSignal():
            within.extend(handlers())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert within == before

import os
import signal
import threading

import pytest

from pipetune.errors import InterruptedStudyError
from pipetune.search.signals import Signals


@pytest.fixture(autouse=True)
def nobody_ignores_signals():
    """Under nohup, or in the background of a shell, some are ignored, and then Signals leaves them so."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    former[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_breaks_into_what_may_be_interrupted(number):
    signals = Signals()
    with signals.caught(), pytest.raises(InterruptedStudyError) as caught, signals.interruptible():
        os.kill(os.getpid(), number)
    assert str(caught.value) == f"interrupted by {number.name}"
    assert caught.value.signal_number == number


def test_a_signal_outside_waits_for_the_next_chance():
    signals, written = Signals(), []
    with signals.caught():
        # GIVEN a signal in the middle of a write
        os.kill(os.getpid(), signal.SIGTERM)
        written.append("all of it")
        # THEN the next trial does not begin
        with pytest.raises(InterruptedStudyError, match="SIGTERM"), signals.interruptible():
            written.append("a trial")
    assert written == ["all of it"]


def test_the_first_signal_is_the_one_that_counts():
    signals = Signals()
    with signals.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(InterruptedStudyError, match="SIGTERM"), signals.interruptible():
            pass


def test_while_it_ends_another_signal_does_not_disturb():
    cleaned = []

    def trial():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append("all")

    signals = Signals()
    with signals.caught(), pytest.raises(InterruptedStudyError), signals.interruptible():
        trial()
    assert cleaned == ["all"]


def test_former_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(ZeroDivisionError), Signals().caught():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals()
    try:
        with signals.caught(), signals.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_caught():
    before, seen = signal.getsignal(signal.SIGINT), []

    def elsewhere():
        signals = Signals()
        with signals.caught(), signals.interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]

"""SIGINT and SIGTERM: the first asks, the second SIGINT interrupts, handlers come back."""

from __future__ import annotations

import signal
import threading

import pytest

from flaxrl.trainers.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_only_asks(number):
    with Interrupt() as interrupt:
        assert interrupt.requested is None
        signal.raise_signal(number)
        assert interrupt.requested == number.name


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_sigint_interrupts_at_once(first):
    with Interrupt() as interrupt:
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupt.requested == first.name


def test_second_sigterm_asks_again():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested == "SIGTERM"


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_handlers_come_back(error):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) != before[0]
            if error:
                raise error
    except RuntimeError:
        pass
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_does_nothing_outside_the_main_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]

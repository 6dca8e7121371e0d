"""What the device takes, measured by a thread beside the loop."""

from __future__ import annotations

import threading
import time

import pytest

from flaxrl.trainers.clock import DeviceClock


class Result:
    """Something that is ready once `done` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def block_until_ready(self) -> Result:
        self.done.wait(10)
        return self


def _later(result: Result, seconds: float) -> None:
    threading.Timer(seconds, result.done.set).start()


def test_each_call_counts_from_the_end_of_the_one_before():
    clock = DeviceClock()
    results = [Result() for _ in range(4)]
    call = clock.timed(lambda i: ("state", {"loss": results[i]}))
    try:
        call(0)  # would compile: left out, and not waited for
        began = time.perf_counter()
        for i in (1, 2, 3):
            call(i)
        assert time.perf_counter() - began < 0.1, "the loop waited"
        for i, seconds in ((1, 0.2), (2, 0.3), (3, 0.4)):
            _later(results[i], seconds)
        while (seen := clock._count) < 3:
            time.sleep(0.01)
        seconds, calls = clock.read()
        # Dispatched together, one after another on the device: 0.4 s in all, not 0.2 + 0.3 + 0.4.
        assert (seen, calls) == (3, 3) and 0.4 <= seconds < 0.7
        assert clock.read() == (0.0, 0)
    finally:
        clock.close()
        clock.close()


def test_a_failed_result_does_not_end_it():
    class Fails:
        def block_until_ready(self) -> None:
            raise RuntimeError("on the device")

    clock = DeviceClock()
    good = Result()
    good.done.set()
    outcomes = iter([Fails(), Fails(), good])
    call = clock.timed(lambda: (None, [next(outcomes)]))
    for _ in range(3):
        call()
    clock.close()
    assert clock.read()[1] == 1


def test_errors_of_the_call_are_its_own():
    def fails() -> tuple:
        raise ValueError("no")

    clock = DeviceClock()
    with pytest.raises(ValueError, match="no"):
        clock.timed(fails)()
    clock.close()

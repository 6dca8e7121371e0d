"""What the device takes, measured by a thread beside the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from flaxrl.trainers import clock as clock_module
from flaxrl.trainers.clock import DeviceClock


class Result:
    """Something that is ready once `done` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def block_until_ready(self) -> Result:
        assert self.done.wait(60)
        return self


def test_each_call_counts_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    clock = DeviceClock()
    results = [Result() for _ in range(4)]
    call = clock.timed(lambda i: ("state", {"loss": results[i]}))
    try:
        for i in range(4):  # none is waited for; the first would compile, and is left out
            call(i)
        for i, at in ((1, 100.25), (2, 100.5), (3, 101.0)):
            now[0] = at
            results[i].done.set()
            wait_for(lambda count=i: clock._count == count)
        # Dispatched together, one after another on the device: 1 s in all, not 0.25 + 0.5 + 1.
        assert clock.read() == (1.0, 3)
        assert clock.read() == (0.0, 0)
    finally:
        clock.close()
        clock.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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

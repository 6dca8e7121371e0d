"""How long the device works on each call, measured beside the loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

_JOIN_S = 5.0


class DeviceClock:
    """Times jitted calls from their dispatch, or the end of the call before, until their results are there.

    A thread of its own waits for the results, so the loop that dispatches does not. The first call is left out: it
    compiles.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seconds, self._count = 0.0, 0
        self._thread = threading.Thread(target=self._watch, name="device-clock", daemon=True)
        self._thread.start()

    def timed(self, call: Callable[..., tuple]) -> Callable[..., tuple]:
        """`call`, timed; the first array of its last result must not be donated afterwards."""
        first = True

        def run(*args: Any) -> tuple:
            nonlocal first
            began = time.perf_counter()
            results = call(*args)
            if not first:
                self._calls.put((began, jax.tree.leaves(results[-1])[0]))
            first = False
            return results

        return run

    def read(self) -> tuple[float, int]:
        """Seconds and calls since the last read."""
        with self._lock:
            seconds, count = self._seconds, self._count
            self._seconds, self._count = 0.0, 0
        return seconds, count

    def close(self) -> None:
        """Ends the thread once what was dispatched is done, or leaves it where that never ends; may be called twice."""
        self._calls.put(None)
        self._thread.join(_JOIN_S)

    def _watch(self) -> None:
        last = 0.0
        while (call := self._calls.get()) is not None:
            began, result = call
            try:
                jax.block_until_ready(result)
            except Exception:  # the loop meets the same error, and raises it
                continue
            now = time.perf_counter()
            with self._lock:
                self._seconds += now - max(began, last)
                self._count += 1
            last = now

"""The processes of a run keep together: they agree where to stop, share what one of them knows, and end together.

All of it goes through the key-value store of jax's coordination service, which process 0 hosts, so that nothing here
needs a device or waits for one. A thread in each process looks into it several times a second: a process whose main
thread waits in a collective for one that failed ends as well, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers.differences import config_difference, value_difference

_POLL_S = 0.25
_BEAT_S = 2.0
_LOST_S = 30.0  # a process that says nothing for so long is lost
_REASON_S = 3.0  # a broken connection waits so long for the other's own account of it
_LEAVE_S = 20.0  # what a failing process may take to close what it has open
_WAIT_MS = 1000  # a wait inside jax, during which Python handles no signal

_WATCH, _ALIVE, _AGREE = "flaxrl/watch/", "flaxrl/alive/", "flaxrl/agree/"
_LEFT = "left"


class Peers:
    """The other processes, as one of them sees them; in a run of one process everything is answered at once.

    Attributes:
        index: of this process.
        count: of processes.
        on_end: called before a failure elsewhere ends this process; of one run, so reset when that ends.
    """

    def __init__(self, client: Any = None, index: int = 0, count: int = 1):
        self._client, self.index, self.count = client, index, count
        self.on_end: Callable[[], None] = _nothing
        self._asked: Callable[[], str | None] = lambda: None
        self._changed = threading.Condition()
        self._run = self._round = 0
        self._new_run()
        self._exit_code: int | None = None
        self._closed = threading.Event()
        self._beats: dict[str, tuple[str, float]] = {}
        self._beat_at = -float("inf")
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        if count > 1:
            self._thread.start()

    # -- stopping at the same update -------------------------------------------------------------------------------

    def begin(self, asked: Callable[[], str | None], config: dict[str, Any], workdir: str) -> None:
        """A new run begins, in all processes.

        Args:
            asked: says why this process was told to stop, or None.
            config: of the run, JSON-able.
            workdir: its folder's path.

        Raises:
            ConfigError: the processes were given different ones.
        """
        with self._changed:
            self._run += 1
            self._new_run()
            self._asked = asked
        fault = self.agree(config, config_difference)
        if fault:
            raise ConfigError(fault)
        self.same("workdir", workdir)

    def _new_run(self) -> None:
        self._position = -1
        self._stop: str | None = None
        self._stop_at: int | None = None

    @property
    def stop_asked(self) -> str | None:
        """Why the run is to stop, by what this process knows yet; the others may know later."""
        return self._asked() or self._stop

    def stops_at(self, call: int) -> bool:
        """Asked before each call of the loop, numbered from any start: whether the run stops here, in all processes.

        One process is told to stop; each tells which call it is in, and stops after the highest of them. Whoever asks
        in between waits for the answer, so that none is past it.
        """
        if self.count == 1:
            return self._asked() is not None
        with self._changed:
            while self._stop is not None and self._stop_at is None:
                self._changed.wait(_POLL_S)
            if self._stop_at is not None:
                return call >= self._stop_at
            self._position = call
            return False

    def _agree_on_stop(self, seen: dict[str, str]) -> None:
        """The watching thread's part in `stops_at`; `seen` is what the processes have said so far."""
        with self._changed:
            run, asked_here = self._run, self._asked
        asked, position = f"stop/{run}", f"at/{run}/"
        reason = asked_here()
        if asked not in seen:
            if reason is not None:
                self._say(f"{_WATCH}{asked}", reason if self.index == 0 else f"{reason} in process {self.index}")
            return
        with self._changed:
            if self._run != run:  # another one has begun meanwhile
                return
            self._stop, own = seen[asked], self._position  # which does not change any more
        if f"{position}{self.index}" not in seen:  # again, where it did not arrive
            self._say(f"{_WATCH}{position}{self.index}", str(own))
        told = [int(value) for key, value in seen.items() if key.startswith(position)]
        with self._changed:
            if self._run == run and len(told) == self.count:
                self._stop_at = max(told) + 1
                self._changed.notify_all()

    # -- sharing what one knows ------------------------------------------------------------------------------------

    def agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Gives all processes what process 0 makes of the values of all; each calls it at the same place.

        Args:
            value: this process's, JSON-able.
            decide: values by process -> a JSON-able answer; runs in process 0.
        """
        if self.count == 1:
            return decide([value])
        folder, self._round = f"{_AGREE}{self._round}", self._round + 1
        if self.index > 0:
            self._say(f"{folder}/{self.index}", json.dumps(value))
            return json.loads(self._hear(f"{folder}/all"))
        values = [json.loads(json.dumps(value))]
        values += [json.loads(self._hear(f"{folder}/{i}")) for i in range(1, self.count)]
        answer = json.dumps(decide(values))
        self._say(f"{folder}/all", answer)
        if self._round > 1:  # all have spoken in this round, so all have heard the one before
            self._client.key_value_delete(f"{_AGREE}{self._round - 2}")
        return json.loads(answer)

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives in process 0, where alone it runs; the others wait for it, however long it takes."""
        if self.count == 1:
            return compute()
        return self.agree(compute() if self.index == 0 else None, lambda values: values[0])

    def same(self, what: str, value: str | None) -> None:
        """Checks that all processes were given the same value of `what`.

        Raises:
            ConfigError: in all of them, with the values of two.
        """
        fault = self.agree(value, functools.partial(value_difference, what))
        if fault:
            raise ConfigError(fault)

    def _say(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text, allow_overwrite=True)

    def _hear(self, key: str) -> str:
        while True:
            try:
                return self._client.blocking_key_value_get(key, _WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    # -- ending together -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An error in here is told to the others, which end of it; one that comes of their end is put in one line."""
        try:
            yield
        except BaseException as error:
            lost = self._explained(error)
            self.fail(lost or error)
            if lost is None:
                raise
            raise lost from error
        finally:
            self.on_end = _nothing  # what it closes is closed

    def _explained(self, error: BaseException) -> TrainingError | None:
        """What a broken collective means; None for any other error."""
        text = str(error)
        if self.count == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
            return None
        if not any(word in text.lower() for word in ("gloo", "nccl", "connection", "socket", "unavailable")):
            return None
        time.sleep(_REASON_S)  # the watching thread ends this process if another one tells why
        return TrainingError(f"lost another process of this run: {text.splitlines()[0]}")

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process ends, and of what; it has `_LEAVE_S` seconds to close what it has open."""
        if self.count == 1 or self._exit_code is not None:
            return
        code = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ConfigError) else 1
        self._exit_code = code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, which all of them notice
            self._say(f"{_WATCH}failed/{self.index}", f"{code} {reason}")
        threading.Thread(target=self._leave_late, args=(code, reason), daemon=True).start()

    def _leave_late(self, code: int, reason: str) -> None:
        time.sleep(_LEAVE_S)
        self._end(code, reason)

    def _end(self, code: int, reason: str) -> None:
        """Ends this process now: its main thread may be waiting for one that is gone."""
        with contextlib.suppress(Exception):  # a terminal or pipe that is closed must not keep it alive
            self.on_end()
        with contextlib.suppress(Exception):
            print(f"error: {reason}", file=sys.stderr)
        self._leave(code)

    def _leave(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self.index == 0:
            time.sleep(4 * _POLL_S)  # with it goes the store, from which the others learn of the reason
        os._exit(code)

    def close(self) -> None:
        """At the process's end: one that failed does not wait for the others, as jax would."""
        self._closed.set()
        if self._exit_code is not None:
            self._leave(self._exit_code)
        if self.count > 1:
            self._thread.join()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._say(f"{_ALIVE}{self.index}", _LEFT)

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            # Where process 0 cannot be reached jax ends this process, if that lasts.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                seen = {key.removeprefix(_WATCH): value for key, value in self._client.key_value_dir_get(_WATCH)}
                self._look_for_failures(seen)
                self._agree_on_stop(seen)
                self._beat()

    def _look_for_failures(self, seen: dict[str, str]) -> None:
        for key, text in seen.items():
            if key.startswith("failed/") and self._exit_code is None:
                code, _, reason = text.partition(" ")
                self._end(int(code), f"process {key.removeprefix('failed/')} failed: {reason}")

    def _beat(self) -> None:
        """Says that this process lives; process 0 looks whether the others do."""
        now = time.monotonic()
        if now - self._beat_at < _BEAT_S:
            return
        self._beat_at = now
        self._say(f"{_ALIVE}{self.index}", str(now))
        if self.index > 0 or self._exit_code is not None:
            return
        for key, beat in self._client.key_value_dir_get(_ALIVE):
            if key not in self._beats or self._beats[key][0] != beat:
                self._beats[key] = (beat, now)
            elif beat != _LEFT and now - self._beats[key][1] > _LOST_S:
                lost = f"process {key.removeprefix(_ALIVE)} was not heard of for {_LOST_S:g} s: it was killed or hangs"
                self._exit_code = 1
                self._say(f"{_WATCH}failed/0", f"1 {lost}")
                self._end(1, lost)


def _nothing() -> None:
    pass


def settle(tree: Any) -> None:
    """Waits for `tree`, on CPUs of several processes: two programs with collectives in flight there block one another.

    Seen with gloo and several devices a process: the threads that wait in one program are those that the other needs.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(tree)

"""A signal reaches whatever the run waits for: an evaluation, an env that hangs; and nothing is lost by it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flaxrl import Trainer, processes
from flaxrl.envs.fake import HostScripted
from flaxrl.trainers import evaluate as evaluate_module
from flaxrl.trainers.peers import Peers
from tests.small_runs import STEPS, every, host_config, rows, saved_steps, train


def after(seconds: float) -> None:
    """SIGTERM to this process in a while."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()


@contextlib.contextmanager
def evaluations_interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM comes in each evaluation, once it has begun."""
    play = evaluate_module.Evaluator._play_host

    def interrupted(self: Any, env: Any, *rest: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        while not self._stop():
            time.sleep(0.01)
        return play(self, env, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(evaluate_module.Evaluator, "_play_host", interrupted)
        yield


def evaluated(workdir: Path) -> list[int]:
    """Steps at which the metrics have an evaluation."""
    return [row["step"] for row in rows(workdir) if "eval/return_mean" in row]


def test_a_signal_breaks_off_an_evaluation_and_the_next_start_does_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with evaluations_interrupted(monkeypatch):
        trainer = train(host_config(3), tmp_path)
    assert saved_steps(tmp_path) == [3 * STEPS] and evaluated(tmp_path) == [] and not trainer.finished
    assert "SIGTERM: no evaluation at the end; the same command makes up for it" in capsys.readouterr().out
    assert train(host_config(3), tmp_path).finished and evaluated(tmp_path) == [3 * STEPS]
    again = Trainer(host_config(3), tmp_path)
    assert again.run() == {} and again.finished


class Late(Peers):
    """Stops a run one call after it was told to, as several processes may."""

    _told = False

    def stops_at(self, call: int) -> bool:
        told, self._told = self._told, self.stop_asked is not None
        return told


def test_a_run_stops_at_the_evaluation_that_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there can it be made up for."""
    config = host_config(6, **every(2))
    monkeypatch.setattr(processes, "current", Late)
    with evaluations_interrupted(monkeypatch):
        train(config, tmp_path)
        assert saved_steps(tmp_path) == [2 * STEPS] and evaluated(tmp_path) == []
        train(config, tmp_path)  # another signal while it is made up for
        assert saved_steps(tmp_path) == [2 * STEPS] and evaluated(tmp_path) == []
    train(config, tmp_path)
    assert evaluated(tmp_path) == [2 * STEPS, 4 * STEPS, 6 * STEPS]


class Hanging(HostScripted):
    """Answers no step after the tenth until it is closed."""

    def __init__(self, **fields: Any):
        super().__init__(**fields)
        self._left, self._closed = 10, threading.Event()

    def step(self, action: np.ndarray) -> Any:
        self._left -= 1
        if self._left < 0 and threading.current_thread() is not threading.main_thread():
            self._closed.wait(20)
        return super().step(action)

    def close(self) -> None:
        self._closed.set()
        super().close()


def test_a_signal_ends_the_wait_for_an_env_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flaxrl.trainers.actors._STOP_S", 0.2)
    monkeypatch.setattr("flaxrl.trainers.actors._JOIN_S", 0.2)
    monkeypatch.setattr("flaxrl.trainers.setup.build", lambda block, where, **c: _hanging(block, where, **c))
    trainer = Trainer(host_config(1000, threads=1), tmp_path)
    after(10)
    began = time.monotonic()
    trainer.run()
    assert time.monotonic() - began < 55  # stall_seconds is 60
    assert saved_steps(tmp_path) == [trainer.steps] and 0 < trainer.updates < 1000


def _hanging(block: Any, where: str, **context: Any) -> Any:
    from flaxrl.build import build

    return Hanging(num_envs=context["num_envs"]) if where == "config.env" else build(block, where, **context)

"""The Trainer: the only loop."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxrl import processes, run_folder
from flaxrl.compilation_cache import use_cache
from flaxrl.envs.base import HostEnv
from flaxrl.trainers.acting import EvaluationStopped
from flaxrl.trainers.announcement import announcement
from flaxrl.trainers.checkpoint import Checkpointer
from flaxrl.trainers.clock import DeviceClock
from flaxrl.trainers.evaluate import Evaluator, held_here
from flaxrl.trainers.interrupt import Interrupt
from flaxrl.trainers.peers import settle
from flaxrl.trainers.plan import check
from flaxrl.trainers.program import make_program
from flaxrl.trainers.progress import Progress
from flaxrl.trainers.seeds_program import SeedsEvaluator
from flaxrl.trainers.setup import build_agent, env_factory, fold_in, run_key
from flaxrl.trainers.shared_folder import check_shared
from flaxrl.trainers.source import Data, Runtime, SourceStopped, iterate
from flaxrl.trainers.writers import make_writers
from flaxrl.types import PyTree, TrainState


class Trainer:
    """Trains what a config says, in a folder that a later Trainer with the same config goes on from.

    Args:
        config: as `flaxrl.run_config` makes it.
        workdir: the run's folder; made if absent.

    Attributes:
        updates: done so far.
        finished: whether `run` came to the end, the last evaluation included; False where a signal stopped it.

    Raises:
        ConfigError: a config that breaks a rule, or differs from the one stored in `workdir`.
    """

    def __init__(self, config: Any, workdir: str | Path):
        self.plan = check(config)
        self.config, self.workdir = config, Path(workdir)
        self._folder = run_folder.RunFolder(workdir)
        self._folder.check(config)
        self.updates = 0
        self.finished = False

    @property
    def steps(self) -> int:
        """Steps done, exact: rows inserted by the source."""
        return self.updates * self.plan.steps_per_update

    def run(self) -> dict[str, float]:
        """Trains to `total_steps`, or until SIGINT or SIGTERM; saves either way. Another call goes on from there.

        Returns:
            The last log line's metrics, evaluation included; empty where nothing was left to do.

        Raises:
            TrainingError: the run cannot go on; what was saved stays.
        """
        plan = self.plan = check(self.config)  # a source serves one run only
        self.finished = False
        peers = self._peers = processes.current()
        use_cache()
        with Interrupt() as interrupt, contextlib.ExitStack() as self._resources, peers.together():
            peers.begin(lambda: interrupt.requested, run_folder.plain(self.config), str(self.workdir.absolute()))
            self._set_up()
            done = self.updates >= plan.total_updates
            broken_off = self._lacks_evaluation(done) and not self._evaluate(even_if_stopped=done)
            while not (done or broken_off or peers.stops_at(self.updates // plan.updates_per_call)):
                try:
                    self._call()
                except SourceStopped:
                    break
                done = self.updates >= plan.total_updates
                if done or plan.due(plan.log.every, self.updates):
                    self._log()
                if done or plan.due(plan.checkpoint.every, self.updates):
                    self._save()
                if done or plan.due(plan.eval.every, self.updates):
                    # All processes know of it, so they stop here: the evaluation can be made up at this update only.
                    broken_off = not self._evaluate(even_if_stopped=done)
            if not done:
                self._save()
            self._checkpointer.wait()
            summary = self._program.summary(self.last_metrics, self.state) if done else []
            if summary:
                self.progress.close()  # so that the table comes last
                self.progress.print("\n".join(summary))
            if not done:
                self.progress.print(
                    f"{peers.stop_asked or 'stopped'}: saved at step {self.steps:,}; the same command goes on"
                )
            elif broken_off:
                self.progress.print(f"{peers.stop_asked}: no evaluation at the end; the same command makes up for it")
            peers.agree(None, lambda _: None)  # none leaves while another still saves
            self.finished = done and not broken_off
        return self.last_metrics

    def _stop(self) -> bool:
        """Whether the run was told to end."""
        return self._peers.stop_asked is not None

    # -- set up ----------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Builds the run's objects and restores what the folder holds; whatever is open is closed when `run` ends."""
        plan, resources = self.plan, self._resources
        make_env = env_factory(self.config)
        env = make_env(1)
        with contextlib.closing(env) if isinstance(env, HostEnv) else contextlib.nullcontext():
            self.spec = env.spec
        self.agent = build_agent(self.config, self.spec)
        self.source = plan.source
        self._program = make_program(plan, self.agent, self.spec, self.source)
        self.state: TrainState = self._program.init_state()
        self._key = run_key(plan.seed, "training")
        resources.callback(self.source.close)
        # One process's source cannot give up alone: the others' updates need its part of the batch.
        stop = self._stop if self._peers.count == 1 else lambda: False
        self.source.setup(Runtime(make_env, self.agent, plan.mesh, plan.seed, plan.progress, stop))
        self._checkpointer = Checkpointer(self.workdir / "checkpoints", plan.checkpoint.keep, plan.checkpoint.keep_best)
        resources.callback(self._checkpointer.close)
        self.data: Data = self._program.init_data(self.state)
        check_shared(self._folder, self._peers)
        self._restore()
        call = self._program.make_call(self.state, self.data)
        # Only now, so that a config that cannot be set up does not claim the folder.
        self._peers.from_first(self._claim)
        check_shared(self._folder, self._peers)
        self._writers = make_writers(plan.log.writers, self.workdir, self.steps)
        resources.callback(self._writers.close)
        self._writers.write_hparams(run_folder.flatten(run_folder.plain(self.config)))
        kind: Callable[..., Evaluator] = Evaluator
        if plan.seeds is not None:
            kind = functools.partial(SeedsEvaluator, plan.seeds)
        self._make_evaluator = lambda: kind(make_env, self.agent, plan.eval, self._stop)
        self._evaluator: Evaluator | None = None
        self._metrics = self._program.metrics()
        self._device_clock = DeviceClock()
        resources.callback(self._device_clock.close)
        self._run_call = self._device_clock.timed(call)
        self._log_seconds: float | None = None
        self.last_metrics: dict[str, float] = {}
        shown = contextlib.nullcontext(sys.stdout) if jax.process_index() == 0 else open(os.devnull, "w")  # noqa: SIM115
        file = resources.enter_context(shown)
        self.progress = Progress(plan.total_steps, self.spec.frame_skip, self.steps, file=file)
        resources.callback(self.progress.close)
        self._peers.on_end = self.progress.close
        self._announce()
        self._clock, self._clock_updates = time.perf_counter(), self.updates

    def _claim(self) -> None:
        """Makes the folder this run's; process 0 alone."""
        self._folder.match(self.config)
        self._folder.forget_evaluations_beyond(self.steps)

    def _restore(self) -> None:
        self.updates = 0
        restored = self._checkpointer.restore(self.state, self.source.snapshot(self.data))
        if restored is None:
            return
        self.state = restored.state
        if restored.snapshot is not None:
            self.data = self.source.restore(self.data, restored.snapshot)
        self.updates = int(restored.meta["updates"])

    def _announce(self) -> None:
        for line in announcement(self.plan, self.workdir, self.spec, self.state):
            self.progress.print(line)
        if self.updates:
            self.progress.print(f"resumed at step {self.steps:,} (update {self.updates:,})")
        if self.updates >= self.plan.total_updates:
            self.progress.print("nothing left to do: raise config.total_steps to go on")

    # -- one call --------------------------------------------------------------------------------------------------

    def _call(self) -> None:
        """One dispatch: `updates_per_call` iterates."""
        if self.source.traceable:
            self.state, self.data, metrics = self._run_call(self.state, self.data)
        else:
            key = fold_in(self._key, np.int32(self.updates))
            self.state, self.data, metrics = iterate(self.source, self._run_call, self.state, self.data, key)
        settle(self.state)
        self._metrics.add(metrics)
        self.updates += self.plan.updates_per_call
        self.progress.tick(self.steps)

    # -- between calls ---------------------------------------------------------------------------------------------

    def _log(self) -> None:
        """Reads the metrics (so waits for the device), writes and checks them."""
        metrics = self._metrics.read(self._peers.agree)
        now, updates = time.perf_counter(), self.updates - self._clock_updates
        rate = updates * self.plan.steps_per_update / max(now - self._clock, 1e-9)
        self._clock, self._clock_updates = now, self.updates
        metrics |= {
            "time/steps_per_second": rate,
            "time/frames_per_second": rate * self.spec.frame_skip,
            "time/updates": self.updates,
            "time/frames": self.steps * self.spec.frame_skip,
        }
        metrics |= self._time_metrics()
        self._write(metrics)
        self._writers.flush()
        self._log_seconds = time.perf_counter() - now
        self._program.check(self.data)
        self._program.check_skipped(metrics, updates, self.state, self.steps, self.progress.print)

    def _time_metrics(self) -> dict[str, float]:
        """What the device and the last log took; left out where nothing was timed."""
        seconds, calls = self._device_clock.read()
        metrics = {} if not calls else {"time/update_seconds": seconds / (calls * self.plan.updates_per_call)}
        return metrics if self._log_seconds is None else metrics | {"time/log_seconds": self._log_seconds}

    def _lacks_evaluation(self, done: bool) -> bool:
        """Whether a kill or a signal kept the start before from the evaluation that was due where this one begins."""
        due = self.updates > 0 and (done or self.plan.due(self.plan.eval.every, self.updates))
        return due and not self._peers.from_first(lambda: self._folder.evaluated(self.steps))

    def _evaluate(self, even_if_stopped: bool) -> bool:
        """Whole episodes on envs of its own, in process 0; keeps the parameters where they are the best so far.

        Returns:
            Whether it came to its end; a signal may break it off, or keep it from beginning.
        """
        started = time.perf_counter()
        model = held_here((self.state.params, self.state.variables), self.plan.mesh)
        metrics = self._peers.from_first(lambda: self._played(model) if even_if_stopped or not self._stop() else None)
        if metrics is None:
            return False
        seconds = time.perf_counter() - started
        self._write(metrics | {"time/evaluation_seconds": seconds})
        self._writers.flush()
        better = self._checkpointer.save_best(
            self.steps, self.state, self.source.snapshot(self.data), self._meta(), metrics["eval/return_mean"]
        )
        if better:
            self._checkpointer.wait()  # an evaluation is done once all that it leaves is on disk
        if self._peers.index == 0:
            self._folder.note_evaluated(self.steps)
        self._clock += time.perf_counter() - started
        return True

    def _played(self, model: tuple[PyTree, PyTree]) -> dict[str, float] | None:
        """The evaluation's metrics; None where a signal broke it off."""
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
            self._resources.callback(self._evaluator.close)
        try:
            metrics = self._evaluator.run(*model)
            self._evaluator.film(*model, self._writers, self.steps)
            return metrics
        except EvaluationStopped:
            return None

    def _save(self) -> None:
        self._checkpointer.save(self.steps, self.state, self.source.snapshot(self.data), self._meta())

    def _meta(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "steps": self.steps,
            "frames": self.steps * self.spec.frame_skip,
            "config": run_folder.plain(self.config),
            "versions": run_folder.versions(),
        }

    def _write(self, metrics: dict[str, float]) -> None:
        self._writers.write_scalars(self.steps, metrics)
        self.last_metrics = self.last_metrics | metrics | {"step": self.steps}
        self.progress.update(self.steps, metrics)

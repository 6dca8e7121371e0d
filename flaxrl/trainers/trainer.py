"""The Trainer: the only loop."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from clu import parameter_overview

from flaxrl import run_folder
from flaxrl.envs.base import HostEnv
from flaxrl.errors import TrainingError
from flaxrl.trainers.checkpoint import Checkpointer
from flaxrl.trainers.evaluate import Evaluator
from flaxrl.trainers.interrupt import Interrupt
from flaxrl.trainers.metrics import MetricsBuffer, as_pairs, summed
from flaxrl.trainers.plan import check
from flaxrl.trainers.progress import Progress
from flaxrl.trainers.setup import build_agent, env_factory, init_state
from flaxrl.trainers.sharding import bind_unroll
from flaxrl.trainers.source import Data, Runtime, iterate
from flaxrl.trainers.update import make_update
from flaxrl.trainers.writers import make_writers
from flaxrl.types import Array, Metrics, TrainState


class Trainer:
    """Trains what a config says, in a folder that a later Trainer with the same config goes on from.

    Args:
        config: as `flaxrl.run_config` makes it.
        workdir: the run's folder; made if absent.
        quiet: no progress line and no plan on stdout.

    Raises:
        ConfigError: a config that breaks a rule, or differs from the one stored in `workdir`.
    """

    def __init__(self, config: Any, workdir: str | Path, quiet: bool = False):
        self.plan = check(config)
        self.config, self.workdir, self._quiet = config, Path(workdir), quiet
        run_folder.RunFolder(workdir).match(config)
        self.updates = 0
        self.best = {}

    @property
    def steps(self) -> int:
        """Steps done, exact: rows inserted by the source."""
        return self.updates * self.plan.steps_per_update

    def run(self) -> dict[str, float]:
        """Trains to `total_steps`, or until SIGINT or SIGTERM; saves either way.

        Returns:
            The last log line's metrics, evaluation included.

        Raises:
            TrainingError: the run cannot go on; what was saved stays.
        """
        plan = self.plan
        with Interrupt() as interrupt:
            self._set_up()
            try:
                while self.updates < plan.total_updates and not interrupt.requested:
                    self._call()
                    done = self.updates >= plan.total_updates
                    if done or plan.due(plan.log.every, self.updates):
                        self._log()
                    if done or plan.due(plan.eval.every, self.updates):
                        self._evaluate()
                    if done or plan.due(plan.checkpoint.every, self.updates):
                        self._save()
                if interrupt.requested:
                    self._save()
                    self.progress.print(f"{interrupt.requested}: saved at step {self.steps:,}; the same command goes on")
                self._checkpointer.wait()
            finally:
                self._close()
        return self.last_metrics

    # -- set up ----------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Builds the run's objects and restores what the folder holds."""
        plan = self.plan
        make_env = env_factory(self.config)
        env = make_env(plan.source.batch_size)
        self.spec = env.spec
        if isinstance(env, HostEnv):
            env.close()
        self.agent = build_agent(self.config, self.spec)
        make_state = functools.partial(
            init_state,
            self.agent,
            self.spec,
            plan.optimizer,
            plan.mesh_settings,
            plan.mesh,
            plan.seed,
            plan.loss.uses_target,
        )
        self.state: TrainState = make_state()
        self._key = jax.random.key(plan.seed + 1)
        self.source = plan.source
        self.source.setup(Runtime(make_env, self.agent, plan.mesh, plan.seed, plan.progress))
        self._checkpointer = Checkpointer(
            self.workdir / "checkpoints", plan.checkpoint.keep, plan.checkpoint.keep_best
        )
        self.data: Data = self.source.init(self.state, jax.random.fold_in(self._key, 2**31 - 1))
        self._restore()
        self._writers = make_writers(plan.log.writers, self.workdir, self.steps)
        self._make_evaluator = functools.partial(Evaluator, make_env, self.agent, plan.eval)
        self._evaluator: Evaluator | None = None
        self._metrics = MetricsBuffer()
        self._run_call = self._make_call()
        self.last_metrics: dict[str, float] = {}
        self.progress = Progress(plan.total_steps, self.spec.frame_skip, self.steps)
        self._announce()
        self._clock, self._clock_steps = time.perf_counter(), self.steps

    def _restore(self) -> None:
        restored = self._checkpointer.restore(self.state, self.source.snapshot(self.data))
        if restored is None:
            return
        self.state = restored.state
        if restored.snapshot is not None:
            self.data = self.source.restore(self.data, restored.snapshot)
        self.updates = int(restored.meta["updates"])

    def _announce(self) -> None:
        self.progress.print(f"workdir       {self.workdir}")
        for line in self.plan.lines():
            self.progress.print(line)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state))
        self.progress.print(f"memory        {size / 2**20:,.1f} MiB of parameters and optimizer state a replica")
        if not self._quiet:
            self.progress.print(parameter_overview.get_parameter_overview(self.state.params, include_stats=False))
        if self.updates:
            self.progress.print(f"resumed at step {self.steps:,} (update {self.updates:,})")

    # -- one call --------------------------------------------------------------------------------------------------

    def _make_call(self) -> Any:
        """The jitted work of a call: all of `iterate` for a traceable source, else the update alone."""
        plan = self.plan
        agent, mesh = self.agent, plan.mesh
        update = make_update(
            plan.loss,
            lambda variables: bind_unroll(agent, variables, mesh),
            mesh,
            learning_rate=plan.optimizer.learning_rate_at,
            progress=plan.progress,
            epochs=plan.learner.epochs,
            minibatches=plan.learner.minibatches,
            target_period=plan.learner.target_period,
        )
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        if not self.source.traceable:
            return jax.jit(update, donate_argnums=(0,), out_shardings=(shardings, None))

        def one(carry: tuple[TrainState, Data], _: None) -> tuple[tuple[TrainState, Data], Metrics]:
            state, data = carry
            key = jax.random.fold_in(self._key, state.updates)
            state, data, metrics = iterate(self.source, update, state, data, key)
            return (state, data), as_pairs(metrics)

        def call(state: TrainState, data: Data) -> tuple[TrainState, Data, Metrics]:
            if plan.updates_per_call == 1:
                (state, data), metrics = one((state, data), None)
                return state, data, metrics
            (state, data), stacked = jax.lax.scan(one, (state, data), None, length=plan.updates_per_call)
            return state, data, summed(stacked)

        data_shardings = jax.tree.map(lambda x: x.sharding, self.data)
        return jax.jit(call, donate_argnums=(0, 1), out_shardings=(shardings, data_shardings, None))

    def _call(self) -> None:
        """One dispatch: `updates_per_call` iterates."""
        if self.source.traceable:
            self.state, self.data, metrics = self._run_call(self.state, self.data)
        else:
            key = _fold_in(self._key, self.updates)
            self.state, self.data, metrics = iterate(self.source, self._run_call, self.state, self.data, key)
        self._metrics.add(metrics)
        self.updates += self.plan.updates_per_call
        self.progress.tick(self.steps)

    # -- between calls ---------------------------------------------------------------------------------------------

    def _log(self) -> None:
        """Reads the metrics (the only point at which the host waits for the device), writes and checks them."""
        metrics = self._metrics.read()
        now = time.perf_counter()
        rate = (self.steps - self._clock_steps) / max(now - self._clock, 1e-9)
        self._clock, self._clock_steps = now, self.steps
        metrics |= {
            "time/steps_per_second": rate,
            "time/frames_per_second": rate * self.spec.frame_skip,
            "time/updates": self.updates,
            "time/frames": self.steps * self.spec.frame_skip,
        }
        self._write(metrics)
        self.source.check(self.data)
        skipped = int(self.state.skipped_in_row)
        if metrics.get("loss/skipped"):
            self.progress.print(
                f"warning: non-finite loss or gradient up to step {self.steps:,}: skipped {skipped} gradient steps in a row"
            )
        if skipped >= self.plan.learner.max_skipped:
            raise TrainingError(
                f"loss or gradient not finite in the last {skipped} gradient steps (step {self.steps:,}): "
                f"learner.max_skipped = {self.plan.learner.max_skipped}; the last good checkpoint stays"
            )

    def _evaluate(self) -> None:
        """Whole episodes on envs of its own; keeps the parameters where they are the best so far."""
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        started = time.perf_counter()
        metrics = self._evaluator.run(self.state.params, self.state.variables)
        seconds = time.perf_counter() - started
        self._write(metrics | {"time/evaluation_seconds": seconds})
        self._clock += seconds
        self._checkpointer.save_best(
            self.steps, self.state, self.source.snapshot(self.data), self._meta(), metrics["eval/return_mean"]
        )

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

    def _close(self) -> None:
        """Ends threads, envs and files, whatever happened."""
        self.source.close()
        if self._evaluator is not None:
            self._evaluator.close()
        self._writers.close()
        self._checkpointer.close()
        self.progress.close()


@jax.jit
def _fold_in(key: Array, updates: Any) -> Array:
    return jax.random.fold_in(key, jnp.asarray(updates, jnp.int32))

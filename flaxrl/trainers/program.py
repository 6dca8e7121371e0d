"""What a run computes on its devices: its first state and data, and the work of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from flaxrl.envs.spec import EnvSpec
from flaxrl.losses.base import Loss
from flaxrl.trainers.metrics import MetricsBuffer, Pairs, as_pairs, summed
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.plan import Plan
from flaxrl.trainers.setup import init_state, run_key
from flaxrl.trainers.sharding import bind_unroll
from flaxrl.trainers.skipped_steps import check_skipped
from flaxrl.trainers.source import Data, Source, iterate
from flaxrl.trainers.statistics import Statistics
from flaxrl.trainers.update import Update, make_update
from flaxrl.types import Array, Metrics, TrainState

INIT_DATA = 2**31 - 1
"""The number of updates, never reached, whose key makes the source's first data."""


class Program:
    """The program of one agent.

    Args:
        plan: of the run.
        agent: the Linen module.
        spec: of the env.
        source: set up already where data are asked for.
    """

    def __init__(self, plan: Plan, agent: Any, spec: EnvSpec, source: Source):
        self.plan, self.agent, self.spec, self.source = plan, agent, spec, source
        self.statistics = Statistics.of(agent, plan.learner)
        self.collections = self.statistics.start(plan.source.batch_size)

    def init_state(self) -> TrainState:
        """The first state."""
        plan = self.plan
        return init_state(
            self.agent,
            self.spec,
            plan.optimizer,
            plan.mesh_settings,
            plan.mesh,
            plan.seed,
            plan.loss.uses_target,
            collections=self.collections,
        )

    def init_data(self, state: TrainState) -> Data:
        """The source's first data."""
        return self.source.init(state, jax.random.fold_in(run_key(self.plan.seed, "training"), INIT_DATA))

    def make_call(self, state: TrainState, data: Data) -> Callable[..., Any]:
        """The jitted work of a call: all of `iterate` for a traceable source, else the update alone.

        Args:
            state: its arrays lie where the call's results will.
            data: likewise.
        """
        update = self.update(self.plan.loss, self.plan.optimizer)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        if not self.source.traceable:
            return jax.jit(update, donate_argnums=(0,), out_shardings=(shardings, None))
        key = run_key(self.plan.seed, "training")

        def call(state: TrainState, data: Data) -> tuple[TrainState, Data, Metrics]:
            return self.iterates(update, state, data, key)

        data_shardings = jax.tree.map(lambda x: x.sharding, data)
        return jax.jit(call, donate_argnums=(0, 1), out_shardings=(shardings, data_shardings, None))

    def metrics(self) -> MetricsBuffer:
        """Where the metrics of calls add up."""
        return MetricsBuffer()

    def check(self, data: Data) -> None:
        """Raises TrainingError for what went wrong in the envs since the last log."""
        self.source.check(data)

    def check_skipped(
        self, metrics: dict[str, float], updates: int, state: TrainState, step: int, tell: Callable[[str], None]
    ) -> None:
        """Tells of gradient steps that were skipped in the last `updates`, see `skipped_steps.check_skipped`."""
        learner = self.plan.learner
        # A loss that ends epochs early takes fewer steps than the settings say.
        taken = round(updates * metrics.get("loss/epochs", learner.epochs) * learner.minibatches)
        check_skipped(metrics.get("loss/skipped", 0.0), taken, state.skipped_in_row, learner, step, tell)

    def summary(self, metrics: dict[str, float], state: TrainState) -> list[str]:
        """What is said of the last metrics at the end of a run, line by line."""
        del metrics, state
        return []

    def update(self, loss: Loss, optimizer: Optimizer) -> Update:
        """The update, to be traced."""
        plan = self.plan
        agent, mesh = self.agent, plan.mesh
        return make_update(
            loss,
            lambda variables, pieces=1: bind_unroll(agent, variables, mesh, pieces),
            mesh,
            learning_rate=optimizer.learning_rate_at,
            progress=plan.progress,
            epochs=plan.learner.epochs,
            minibatches=plan.learner.minibatches,
            accumulation=plan.learner.accumulation,
            target_period=plan.learner.target_period,
            statistics=self.statistics,
        )

    def iterates(self, update: Update, state: TrainState, data: Data, key: Array) -> tuple[TrainState, Data, Pairs]:
        """A call's iterates of a traceable source, to be traced; `key` is the run's for 'training'."""

        def one(carry: tuple[TrainState, Data], _: None) -> tuple[tuple[TrainState, Data], Pairs]:
            state, data = carry
            folded = jax.random.fold_in(key, state.updates)
            state, data, metrics = iterate(self.source, update, state, data, folded)
            return (state, data), as_pairs(metrics)

        if self.plan.updates_per_call == 1:
            (state, data), metrics = one((state, data), None)
            return state, data, metrics
        (state, data), stacked = jax.lax.scan(one, (state, data), None, length=self.plan.updates_per_call)
        return state, data, summed(stacked)


def make_program(plan: Plan, agent: Any, spec: EnvSpec, source: Source) -> Program:
    """The program of a plan: of one agent, or of many seeds."""
    if plan.seeds is None:
        return Program(plan, agent, spec, source)
    from flaxrl.trainers.seeds_program import SeedsProgram

    return SeedsProgram(plan, agent, spec, source)

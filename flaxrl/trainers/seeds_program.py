"""The program of many seeds: `Program`'s, mapped over the runs; evaluation of all; seeds that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxrl.configuration import EvalSettings
from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.envs.spec import EnvSpec
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers.evaluate import Evaluator, scores
from flaxrl.trainers.plan import Plan
from flaxrl.trainers.program import INIT_DATA, Program
from flaxrl.trainers.seed_metrics import SeedMetrics, spread, table
from flaxrl.trainers.seeds import Member, Seeds, init_states
from flaxrl.trainers.setup import run_key
from flaxrl.trainers.source import Data, Source
from flaxrl.trainers.writers import Writer
from flaxrl.types import Metrics, PyTree, TrainState


class SeedsProgram(Program):
    """As Program; every array has a leading axis `[N]`, one entry a run."""

    def __init__(self, plan: Plan, agent: Any, spec: EnvSpec, source: Source):
        super().__init__(plan, agent, spec, source)
        assert plan.seeds is not None
        self.seeds = plan.seeds
        self._told: set[int] = set()

    def init_state(self) -> TrainState:
        """The first states."""
        with self._swept():
            plan = self.plan
            return init_states(
                self.agent, self.spec, plan.loss, plan.optimizer, self.seeds, collections=self.collections
            )

    def init_data(self, state: TrainState) -> Data:
        """The source's first data of each run."""

        def init(member: Member, state: TrainState) -> Data:
            return self.source.traced_init(state, jax.random.fold_in(run_key(member.seed, "training"), INIT_DATA))

        return jax.jit(self.seeds.over(init), out_shardings=self.seeds.sharding)(self.seeds.members(), state)

    def make_call(self, state: TrainState, data: Data) -> Callable[..., Any]:
        """The jitted work of a call, for all runs; a sweep is traced here, so that it is refused in time."""
        members, sharding = self.seeds.members(), self.seeds.sharding

        def one(member: Member, state: TrainState, data: Data) -> tuple[TrainState, Data, Metrics]:
            loss, optimizer = member.apply(self.plan.loss, self.plan.optimizer)
            own = state.replace(tx=optimizer.make()) if member.values else state
            update, key = self.update(loss, optimizer), run_key(member.seed, "training")
            new, data, metrics = self.iterates(update, own, data, key)
            return new.replace(tx=state.tx), data, metrics

        call = jax.jit(self.seeds.over(one), donate_argnums=(1, 2), out_shardings=sharding)
        if members.values:
            with self._swept():
                call.eval_shape(members, state, data)
        return lambda state, data: call(members, state, data)

    def metrics(self) -> SeedMetrics:
        """Where the metrics of calls add up."""
        return SeedMetrics(self.seeds)

    def check(self, data: Data) -> None:
        """As Program, naming the run whose env it was."""
        try:
            self.source.check(data)
        except TrainingError:
            for index in range(self.seeds.size):
                try:
                    self.source.check(jax.tree.map(lambda x, i=index: x[i], data))
                except TrainingError as error:
                    raise TrainingError(f"{self.seeds.name(index)}: {error}") from error
            raise

    def check_skipped(
        self, metrics: dict[str, float], updates: int, state: TrainState, step: int, tell: Callable[[str], None]
    ) -> None:
        """Tells of runs whose gradient steps are skipped; one that fails keeps its parameters, and the others go on.

        Raises:
            TrainingError: all have failed.
        """
        del updates
        if not metrics.get("loss/skipped"):
            return
        limit, in_row = self.plan.learner.max_skipped, np.asarray(state.skipped_in_row)
        failed = np.flatnonzero(in_row >= limit).tolist()
        if len(failed) == self.seeds.size:
            raise TrainingError(
                f"loss or gradient not finite in the last {limit} gradient steps or more of every seed (step {step:,}, "
                f"learner.max_skipped = {limit}); their last good parameters are in the last checkpoint"
            )
        new = [i for i in failed if i not in self._told]
        self._told |= set(new)
        for index in new:
            tell(
                f"warning: {self.seeds.name(index)} has failed: loss or gradient not finite in its last "
                f"{in_row[index]} gradient steps (step {step:,}); it keeps its last good parameters, and the other "
                f"{self.seeds.size - len(failed)} run(s) go on"
            )
        if not failed:
            worst = int(np.argmax(in_row))
            tell(
                f"warning: loss or gradient not finite: skipped {metrics['loss/skipped']:.2%} of the gradient steps "
                f"up to step {step:,}; most in a row just now: {in_row[worst]}, by {self.seeds.name(worst)}"
            )

    def summary(self, metrics: dict[str, float], state: TrainState) -> list[str]:
        """The table of last returns."""
        failed = np.asarray(state.skipped_in_row) >= self.plan.learner.max_skipped
        return table(self.seeds, metrics, failed) if metrics else []

    @contextlib.contextmanager
    def _swept(self) -> Iterator[None]:
        """Turns what Python says of a swept value that it cannot look at into one clear line."""
        try:
            yield
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            if not self.seeds.sweep.paths:
                raise
            raise ConfigError(
                f"config.sweep cannot have {' and '.join(self.seeds.sweep.paths)}: Python code needs the number of "
                "one of them while the program is made (an `if`, float() or numpy); start one run for each value of it"
            ) from error


class SeedsEvaluator(Evaluator):
    """Evaluates all runs at once, each on the same envs and keys as alone.

    Args:
        seeds: the runs.
        make_env: number of envs -> the JaxEnv.
        agent: the Linen module.
        settings: episodes of each run, greedy or sampled, seed.
        stop: unused by envs in JAX.
    """

    def __init__(
        self,
        seeds: Seeds,
        make_env: Callable[[int], HostEnv | JaxEnv],
        agent: Any,
        settings: EvalSettings,
        stop: Callable[[], bool] = lambda: False,
    ):
        super().__init__(make_env, agent, settings, stop)
        self._seeds = seeds
        self._play = jax.jit(seeds.over(self._play_jax, in_axes=(0, None)))

    def film(self, params: PyTree, variables: PyTree, writer: Writer, step: int) -> None:
        """As Evaluator, of the first run."""
        params, variables = jax.tree.map(lambda x: x[0], (params, variables))
        super().film(params, variables, writer, step)

    def run(self, params: PyTree, variables: PyTree) -> dict[str, float]:
        """Plays `settings.episodes` episodes of each run; parameters have a leading axis `[N]`.

        Returns:
            The metrics of Evaluator, spread as `seed_metrics.spread` says.
        """
        played = jax.device_get(self._play({"params": params, **variables}, jax.random.key(self._settings.seed)))
        each = [scores(*(x[i] for x in played)) for i in range(self._seeds.size)]
        metrics: dict[str, float] = {}
        for name in each[0]:
            metrics |= spread(self._seeds, name, [one[name] for one in each])
        return metrics

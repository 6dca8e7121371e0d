"""What a run with envs on the host reaches, and what each of its parts would reach alone.

    python -m benchmarks.atari [--config=configs/impala_atari.py:breakout] [--seconds=10] [--config.FIELD=VALUE ...]

One run, real parts: the Trainer of the config is set up and trains in windows; between them, while its actors stand
still, envs, inference and update are timed alone, with the same sizes, parameters and compiled programs. Three parts
that share the machine, one after another, would reach 1 / (1/env + 1/inference + 1/learner) steps a second: of the
whole this is `end_to_end_of_parts`, above 1 where parts overlap.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that the file runs as a script, too

from benchmarks.report import load_config, print_json, print_table, rate_of, short, trace
from flaxrl import config_for
from flaxrl.envs.base import HostEnv
from flaxrl.envs.spec import Discrete, env_action
from flaxrl.errors import ConfigError
from flaxrl.models.agent import agent_input
from flaxrl.trainers.actor import Act
from flaxrl.trainers.actors import ActorThreads
from flaxrl.trainers.source import SourceStopped, split
from flaxrl.trainers.trainer import Trainer

WARM_UPDATES = 3
NEVER = 2**40  # steps


class Bench(Trainer):
    """A Trainer that, once it runs, times itself in windows and its parts in between.

    Args:
        config: of a run with actor threads.
        workdir: its folder.
        seconds: of a window.
        repeats: rounds; each times every part and the whole.
        profile: folder for a trace of one more window, or None.
    """

    def __init__(self, config: Any, workdir: str, seconds: float, repeats: int, profile: str | None):
        super().__init__(config, workdir)
        if not isinstance(self.plan.source, ActorThreads):
            raise ConfigError("benchmarks.atari times envs on the host: config.source must be actor_threads")
        self._seconds, self._repeats, self._profile = seconds, repeats, profile
        self.rounds: dict[str, list[float]] = {"env": [], "inference": [], "learner": [], "whole": []}
        self.phases: dict[str, float] = {}

    @property
    def actors(self) -> ActorThreads:
        """The source."""
        assert isinstance(self.plan.source, ActorThreads)
        return self.plan.source

    def _call(self) -> None:
        super()._call()
        if self.updates < WARM_UPDATES:
            return
        parts = _Parts(self)
        for _ in range(self._repeats):
            self.rounds["whole"].append(self._window(self._seconds))
            self._rest()
            for name, rate in parts.measure(self._seconds).items():
                self.rounds[name].append(rate)
        if self._profile:
            with trace(self._profile):
                self._window(self._seconds)
        parts.close()
        raise SourceStopped

    def _window(self, seconds: float) -> float:
        """Steps a second of training, once the unrolls that lay ready are used up."""
        for _ in range(WARM_UPDATES + self.actors.queue_depth):
            super()._call()
        jax.block_until_ready(self.state.params)
        self._metrics.read()
        self._device_clock.read()
        began, first = time.perf_counter(), self.updates
        while time.perf_counter() - began < seconds or self.updates == first:
            super()._call()
        jax.block_until_ready(self.state.params)
        spent, updates = time.perf_counter() - began, self.updates - first
        means = self._metrics.read() | self._time_metrics()
        self.phases = {k: v for k, v in means.items() if k.startswith("time/")} | {"an update": spent / updates}
        return updates * self.plan.steps_per_update / spent

    def _rest(self) -> None:
        """Waits until every actor stands still: its queue is full, and the unroll that goes there next is done."""
        if self.actors.threads:
            while not all(q.full() for q in self.actors._queues):
                if self.actors._error is not None:  # a thread that has died fills no queue
                    raise self.actors._error
                time.sleep(0.05)
            time.sleep(2 * (self.phases["time/env_seconds"] + self.phases["time/inference_seconds"]))


class _Parts:
    """Env, inference and learner of a Trainer, each alone."""

    def __init__(self, trainer: Bench):
        self._trainer, plan = trainer, trainer.plan
        source = trainer.actors
        self._envs, self._length, self._acting_envs = source.batch_size, source.unroll_length, source.envs_per_actor
        env = source._runtime.make_env(self._envs)
        assert isinstance(env, HostEnv) and isinstance(env.spec.action, Discrete)
        self._actions = env.spec.action.n
        self._env, self._timestep = env, env.reset(0)
        self._random = np.random.default_rng(0)
        self._model = {"params": trainer.state.params, **trainer.state.variables}
        self._model = jax.tree.map(lambda x: x.addressable_shards[0].data + 0, self._model)
        self._act = Act(trainer.agent, env.spec, plan.progress, self._length)
        self._carry = self._act.initial_carry(self._model, self._acting_envs)
        self._key, _ = split(trainer._key)
        _, self._trajectory, _ = source.sample(None, trainer.state, self._key)

    def close(self) -> None:
        self._env.close()

    def measure(self, seconds: float) -> dict[str, float]:
        """Steps a second of each part."""
        return {
            "env": self._rate(self._steps, seconds),
            "inference": self._rate(self._choices, seconds),
            "learner": self._rate(self._update, seconds),
        }

    def _rate(self, work: Any, seconds: float) -> float:
        work()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds or not steps:
            steps += work()
        return steps / (time.perf_counter() - began)

    def _steps(self) -> int:
        """An unroll of all envs with random actions."""
        spec = self._env.spec.action
        for _ in range(self._length):
            action = self._random.integers(self._actions, size=self._envs, dtype=np.int32)
            self._timestep = self._env.step(env_action(spec, action))
        return self._length * self._envs

    def _choices(self) -> int:
        """Actions for an unroll of one actor's envs, one row after another."""
        count = self._acting_envs
        action = np.zeros((count, *self._env.spec.action.shape), self._env.spec.action.dtype)
        timestep = jax.tree.map(lambda x: x[:count], self._timestep)
        row = agent_input(self._trainer.agent, timestep, action, np)
        ids = np.arange(count, dtype=np.int32)
        acting, _ = self._act.begin(self._model, self._carry, ids, np.int32(0), self._key)
        for _ in range(self._length):
            action, acting = self._act.step(self._model, row, acting)
            np.asarray(action)
        return self._length * count

    def _update(self) -> int:
        """Learns from one batch of the actors, always the same."""
        trainer = self._trainer
        trainer.state, _ = trainer._run_call(trainer.state, self._trajectory, self._key)
        jax.block_until_ready(trainer.state.params)
        return trainer.plan.steps_per_update


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables and the JSON line, and returns what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/impala_atari.py", help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument("--seconds", type=float, default=10.0, help="a part and a repeat")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts")
    parser.add_argument("--profile", default=None, help="folder for a JAX trace of one more window of training")
    options, overrides = parser.parse_known_args(argv)
    config = load_config(options.config, overrides)
    config.log = config_for("log", every=NEVER, writers=("json_lines",))
    config.eval.every, config.checkpoint.every = NEVER, NEVER
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, f"{folder}/run", options.seconds, options.repeats, options.profile)
        bench.run()
    rounds, source = bench.rounds, bench.actors
    names = ("env", "inference", "learner")
    serial = [1 / sum(1 / rounds[name][i] for name in names) for i in range(options.repeats)]
    shares = [whole / part for whole, part in zip(rounds["whole"], serial, strict=True)]
    rates = {name: rate_of(values) for name, values in (rounds | {"parts": serial}).items()}
    labels = {"parts": "all three, one after another", "whole": "the run"}
    rows = [(labels.get(name, f"{name} alone"), rate, short(1e6 / rate.median)) for name, rate in rates.items()]
    print_table([("part", "steps/s", "us a step"), *rows])
    print_table([("phase, in the last window", "s"), *[(k, v) for k, v in bench.phases.items()]])
    result = {
        "end_to_end_of_parts": statistics.median(shares),
        **{name: rate.median for name, rate in rates.items()},
        "num_envs": source.batch_size,
        "unroll_length": source.unroll_length,
        "threads": source.threads,
    }
    print_json(result)
    return result


if __name__ == "__main__":
    main()

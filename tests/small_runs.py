"""Runs of a few updates of a few envs, for the tests of the Trainer and of what reads a run's folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flaxrl
from flaxrl import Trainer, config_for
from flaxrl.trainers.checkpoint_layout import Series, read_meta

STEPS = 8
"""Steps of an update of `small_config`: T 4 x B 2."""


def small_config(updates: int = 6, env: Any = None, source: Any = None, core: Any = None, **fields: Any) -> Any:
    """A run of `updates` updates of 8 steps on one device that logs, evaluates and saves only at its end."""
    defaults = {
        "mesh": config_for("mesh", data=1),
        "loss": config_for("vtrace"),
        "optimizer": config_for("optimizer", learning_rate=1e-2, schedule="linear"),
        "log": config_for("log", every=10**9, writers=("json_lines",)),
        "eval": config_for("eval", episodes=2),
        "checkpoint": config_for("checkpoint", every=None),
    }
    return flaxrl.run_config(
        seed=3,
        total_steps=updates * STEPS,
        env=config_for("scripted") if env is None else env,
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(8,)),
            core=config_for("feed_forward") if core is None else core,
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        source=config_for("jax_rollout", num_envs=2, unroll_length=4) if source is None else source,
        **(defaults | fields),
    )


def host_config(updates: int = 6, threads: int = 0, env: Any = None, **fields: Any) -> Any:
    """The same on an env on the host."""
    source = config_for("actor_threads", num_envs=2, unroll_length=4, threads=threads, stall_seconds=60)
    return small_config(updates, config_for("host_scripted") if env is None else env, source, **fields)


def every(updates: int, **fields: Any) -> dict[str, Any]:
    """Cadences of `updates` updates for log, evaluation and checkpoint."""
    steps = updates * STEPS
    return {
        "log": config_for("log", every=steps, writers=("json_lines",)),
        "eval": config_for("eval", every=steps, episodes=2),
        "checkpoint": config_for("checkpoint", every=steps, keep=20),
    } | fields


def train(config: Any, workdir: Path) -> Trainer:
    """A Trainer that has run."""
    trainer = Trainer(config, workdir)
    trainer.run()
    return trainer


class Stopped(Trainer):
    """Does something after its `at`-th update."""

    def __init__(self, config: Any, workdir: Path, at: int, act: Callable[[], None]):
        super().__init__(config, workdir)
        self.at, self.act = at, act

    def _call(self) -> None:
        super()._call()
        if self.updates == self.at:
            self.act()


def stop(config: Any, workdir: Path, at: int) -> None:
    """A run that SIGTERM ends after `at` updates."""
    trainer = Stopped(config, workdir, at, lambda: signal.raise_signal(signal.SIGTERM))
    trainer.run()
    assert not trainer.finished
    assert saved_steps(workdir)[-1] == trainer.steps == at * trainer.plan.steps_per_update


def rows(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def saved_steps(workdir: Path, series: str = "latest") -> list[int]:
    """Steps of complete checkpoints whose files are intact, ascending."""
    found = Series(workdir / "checkpoints", series)
    assert all(isinstance(found.verified_index(step), dict) for step in found.steps())
    return sorted(found.complete())


def saved_meta(workdir: Path, series: str = "latest") -> dict[str, Any]:
    """Meta of the checkpoint that would be restored."""
    return read_meta(workdir / "checkpoints", series)


def assert_same(x: Any, y: Any) -> None:
    """Two trees are equal bit for bit, typed keys too."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(tree) for tree in (x, y))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def all_finite(tree: Any) -> bool:
    """Whether every float of a tree is finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return all(bool(np.isfinite(x).all()) for x in floats)

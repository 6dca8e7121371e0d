"""Brax's rigid-body locomotion tasks as pure JAX envs."""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxrl import checks
from flaxrl.envs.base import JaxEnv
from flaxrl.envs.dtypes import strong
from flaxrl.envs.spec import ArraySpec, Box, EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.types import Array, PyTree

BACKENDS = ("generalized", "mjx", "positional", "spring")


class BraxState(struct.PyTreeNode):
    """Attributes: brax, the task's own state; time, int32, steps taken in this episode."""

    brax: Any
    time: Array


@dataclass
class Brax(JaxEnv):
    """One task of brax, under the episode rule: a fall terminates, the time limit truncates.

    Observations are float32, actions a vector in [-1, 1].

    Attributes:
        task: brax's name, e.g. 'ant', 'halfcheetah', 'inverted_pendulum'.
        backend: physics: 'generalized', 'mjx', 'positional' or 'spring'; None is the task's own choice.
        max_steps: steps before an episode is truncated.
        kwargs: arguments of the task's constructor.

    Raises:
        ConfigError: bad fields; on the first use of `spec`, `reset` or `step`, brax missing, an unknown task or
            argument.
    """

    task: str = "inverted_pendulum"
    backend: str | None = None
    max_steps: int = 1000
    kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.in_range(self, "max_steps", low=1)
        if self.backend is not None:
            checks.choice(self, "backend", BACKENDS)

    @functools.cached_property
    def _task(self) -> Any:
        try:
            with warnings.catch_warnings():
                # Of a package that brax imports.
                warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
                envs = importlib.import_module("brax.envs")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("brax"):
                raise
            raise ConfigError("env 'brax' needs the brax package: pip install 'flaxrl[brax]'") from error
        known = list(envs._envs)  # brax lists its tasks nowhere else
        if self.task not in known:
            raise ConfigError(f"Brax.task = {self.task!r} is unknown; {checks.nearest(self.task, known)}")
        kwargs = self.kwargs if self.backend is None else self.kwargs | {"backend": self.backend}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Brax System, piplines and environments are not", UserWarning)
                return envs.get_environment(self.task, **kwargs)
        except Exception as error:
            given = f" with kwargs {kwargs}" if kwargs else ""
            raise ConfigError(f"Brax: {self.task}{given} cannot be made: {type(error).__name__}: {error}") from error

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """What the task observes and accepts."""
        shapes = jax.eval_shape(self._task.reset, jax.random.key(0)).obs
        observation = jax.tree.map(lambda x: ArraySpec(tuple(x.shape), np.dtype(np.float32)), shapes)
        size = int(self._task.action_size)
        return EnvSpec(observation, Box((-1.0,) * size, (1.0,) * size))

    def reset(self, key: Array) -> tuple[BraxState, PyTree, None]:
        """Starts an episode: (state, observation, None)."""
        state = jax.tree.map(strong, self._task.reset(key))
        return BraxState(state, jnp.zeros((), jnp.int32)), state.obs, None

    def step(self, state: BraxState, action: Array, key: Array) -> tuple[BraxState, PyTree, Array, Array, Array, None]:
        """Takes one action: (state, observation, reward float32, terminated bool, truncated bool, None)."""
        del key  # what is random in a task, it keeps in its state
        stepped = self._task.step(state.brax, jnp.clip(action, -1.0, 1.0))
        stepped = jax.tree.map(lambda new, old: strong(new, old.dtype), stepped, state.brax)
        time = state.time + 1
        return (
            BraxState(stepped, time),
            stepped.obs,
            strong(stepped.reward, jnp.float32),
            stepped.done > 0,
            time >= self.max_steps,
            None,
        )

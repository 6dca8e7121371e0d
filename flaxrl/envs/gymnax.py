"""Gymnax's games (classic control, bsuite, MinAtar, ...) as pure JAX envs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl import checks
from flaxrl.envs.base import EnvState, JaxEnv
from flaxrl.envs.deferred import defer
from flaxrl.envs.dtypes import strong
from flaxrl.envs.gymnax_drawings import DRAWINGS, grid, is_grid
from flaxrl.envs.names import resolve_game
from flaxrl.envs.spec import ArraySpec, Box, Discrete, EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.types import Array, PyTree

_KINDS = {bool: "True or False", int: "an integer", float: "a number"}


@dataclass
class Gymnax(JaxEnv):
    """One game of gymnax, under the episode rule: a time limit truncates, and the env never resets itself.

    Discrete observations are given one-hot (float32); float64 becomes float32; the rest keeps its dtype.

    Attributes:
        game: gymnax's id in any spelling ('CartPole-v1', 'breakout-minatar'), or its first part where that is unique
            ('catch', 'breakout').
        max_steps: agent steps before an episode is truncated; None keeps the game's own limit.
        kwargs: constructor arguments of the game, e.g. `{'num_bits': 2}` for MemoryChain.
        params: fields of the game's EnvParams, e.g. `{'memory_length': 20}` for MemoryChain.
        observed: components of a vector observation that the agent sees, e.g. `(0, 2)` for CartPole without
            velocities; None for all.

    Raises:
        ConfigError: an unknown game, argument or parameter, on the first use of `spec`, `reset` or `step`: importing
            gymnax takes seconds, so constructing does not.
    """

    game: str = "CartPole-v1"
    max_steps: int | None = None
    kwargs: dict = field(default_factory=dict)
    params: dict = field(default_factory=dict)
    observed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.in_range(self, "max_steps", low=1)
        if self.observed is not None and (not self.observed or len(set(self.observed)) < len(self.observed)):
            raise ConfigError(f"Gymnax.observed = {self.observed} must name at least one component, none of them twice")

    @functools.cached_property
    def _made(self) -> tuple[Any, Any]:
        """Gymnax's env and its parameters."""
        registration = _import_registration()
        game = resolve_game(self.game, registration.registered_envs, "Gymnax.game")
        try:
            env, params = registration.make(game, **self.kwargs)
        except Exception as error:
            given = f" with kwargs {self.kwargs}" if self.kwargs else ""
            raise ConfigError(f"Gymnax: {game}{given} cannot be made: {type(error).__name__}: {error}") from error
        known = list(params.__dataclass_fields__)
        for name in self.params:
            if name not in known:
                raise ConfigError(f"Gymnax.params: {game} has no parameter {name!r}; {checks.nearest(name, known)}")
        changes = dict(self.params)
        if self.max_steps is not None:
            changes["max_steps_in_episode"] = self.max_steps
        for name, value in changes.items():
            changes[name] = _like(value, getattr(params, name), f"Gymnax.params.{name}")
        return env, params.replace(**changes)

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """What the game observes and accepts."""
        env, params = self._made
        action = _action_spec(env.action_space(params), self.game)
        whole = self._whole
        if self.observed is None:
            return EnvSpec(whole, action)
        if not isinstance(whole, ArraySpec) or len(whole.shape) != 1:
            raise ConfigError(f"Gymnax.observed is for vector observations; {self.game} has {whole}")
        if not all(0 <= i < whole.shape[0] for i in self.observed):
            raise ConfigError(
                f"Gymnax.observed = {self.observed}: {self.game} has components 0 to {whole.shape[0] - 1}"
            )
        return EnvSpec(ArraySpec((len(self.observed),), whole.dtype), action)

    @functools.cached_property
    def _whole(self) -> PyTree:
        """ArraySpecs of what the game itself observes."""
        env, params = self._made
        shapes = jax.eval_shape(env.reset_env, jax.random.key(0), params)[0]
        return _observation_spec(env.observation_space(params), shapes)

    def reset(self, key: Array) -> tuple[EnvState, PyTree, None]:
        """Starts an episode: (state, observation, None)."""
        env, params = self._made
        observation, state = env.reset_env(key, params)
        return jax.tree.map(strong, state), self._observation(observation), None

    def step(self, state: EnvState, action: Array, key: Array) -> tuple[EnvState, PyTree, Array, Array, Array, None]:
        """Takes one action: (state, observation, reward float32, terminated bool, truncated bool, None)."""
        env, params = self._made
        observation, new_state, reward, terminated, _ = env.step_env(key, state, action, params)
        truncated = env.is_truncated(new_state, params)
        return (
            jax.tree.map(lambda new, old: strong(new, old.dtype), new_state, state),
            self._observation(observation),
            strong(reward, jnp.float32),
            strong(terminated, jnp.bool_),
            strong(truncated, jnp.bool_),
            None,
        )

    @functools.cached_property
    def _observe(self) -> Callable[[EnvState], np.ndarray] | None:
        """State -> the observation, where that is a grid to look at."""
        env, params = self._made
        shown = self.spec.observation
        if not isinstance(shown, ArraySpec) or not is_grid(shown.shape):
            return None
        return jax.jit(lambda state: env.get_obs(state, params, jax.random.key(0)))

    def prepare_render(self) -> None:
        """Checks that this game is drawn: classic control, and those with a grid or a maze to look at.

        Raises:
            ConfigError: it is not.
        """
        name = self._made[0].name
        if name not in DRAWINGS and self._observe is None:
            raise ConfigError(
                f"Gymnax.game = {name!r} draws nothing; of those without a grid to look at, {', '.join(DRAWINGS)} do"
            )

    def render(self, state: EnvState) -> np.ndarray:
        """The picture of one state, uint8 `[H, W, 3]`; a grid has a pixel a cell."""
        env, params = self._made
        if env.name in DRAWINGS:
            return DRAWINGS[env.name](env, state, params)
        self.prepare_render()
        assert self._observe is not None
        return grid(np.asarray(self._observe(state)))

    def _observation(self, observation: PyTree) -> PyTree:
        def convert(spec: ArraySpec, x: Array) -> Array:
            # A Discrete observation is the one case where the spec has an axis that gymnax's array lacks.
            if np.ndim(x) < len(spec.shape):
                return jax.nn.one_hot(x, spec.shape[0], dtype=spec.dtype)
            return strong(x, spec.dtype)

        converted = jax.tree.map(convert, self._whole, observation)
        return converted if self.observed is None else converted[jnp.asarray(self.observed)]


def _like(value: Any, default: Any, where: str) -> Any:
    """A parameter of the type that its default has, since another one changes dtypes inside the game.

    Raises:
        ConfigError: it cannot be one.
    """
    kind = type(default)
    if kind not in _KINDS:  # an array
        return value
    whole = kind is int and isinstance(value, float) and value.is_integer()
    if checks.matches(value, kind) or whole:
        return kind(value)
    raise ConfigError(f"{where} = {value!r} must be {_KINDS[kind]}, as its default {default!r} is")


def _import_registration() -> ModuleType:
    # Gymnax imports them to draw games, which no run does; with what they import they are most of its import time.
    defer("seaborn", "matplotlib.pyplot")
    try:
        from gymnax import registration
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("gymnax"):
            raise
        raise ConfigError("env 'gymnax' needs the gymnax package: pip install 'flaxrl[gymnax]'") from error
    return registration


def _observation_spec(space: Any, shapes: PyTree) -> PyTree:
    """ArraySpecs of a gymnax observation space.

    Args:
        space: gymnax space (Box, Discrete, Dict, Tuple).
        shapes: what the game really answers, as ShapeDtypeStructs: some games' spaces name another dtype, and the
            wider of the two loses nothing.
    """
    if hasattr(space, "spaces"):
        inner = space.spaces
        if isinstance(inner, dict):
            return {k: _observation_spec(inner[k], shapes[k]) for k in inner}
        return tuple(_observation_spec(s, x) for s, x in zip(inner, shapes, strict=True))
    if hasattr(space, "n"):
        return ArraySpec((int(space.n),), np.dtype(np.float32))
    dtype = np.dtype(jnp.promote_types(space.dtype, shapes.dtype))
    return ArraySpec(tuple(shapes.shape), np.dtype(np.float32) if dtype == np.float64 else dtype)


def _action_spec(space: Any, game: str) -> Discrete | Box:
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if hasattr(space, "low") and len(space.shape) == 1:
        low, high = (np.broadcast_to(np.asarray(x, np.float32), space.shape) for x in (space.low, space.high))
        return Box(tuple(low.tolist()), tuple(high.tolist()))
    raise ConfigError(f"Gymnax.game = {game!r}: action space {space} is neither discrete nor a vector")

"""Jumanji's games (mazes, packing, routing, puzzles) as pure JAX envs with action masks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxrl import build, checks
from flaxrl.envs import observations
from flaxrl.envs.action_layout import ActionLayout, layout_of
from flaxrl.envs.base import JaxEnv
from flaxrl.envs.dtypes import strong
from flaxrl.envs.jumanji_pictures import painter
from flaxrl.envs.names import resolve_game
from flaxrl.envs.spec import ArraySpec, EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.types import Array, PyTree

_HORIZON_IS_THE_TASK = ("SearchAndRescue",)
"""Classes whose rewards fall to 0 at the time limit: nothing is worth anything after it, so it terminates."""

_NO_LIMIT = 2**31 - 1


class JumanjiState(struct.PyTreeNode):
    """One running game.

    Attributes:
        game: Jumanji's own state, e.g. for its renderers.
        steps: agent steps of this episode, int32.
    """

    game: Any
    steps: Array


@dataclass(frozen=True)
class _Made:
    """A built game: Jumanji's env without its time limit, that limit, and the two translations."""

    env: Any
    limit: int | None
    layout: ActionLayout
    observe: Callable[[Any], PyTree]


@dataclass
class Jumanji(JaxEnv):
    """One game of Jumanji, under the episode rule: a time limit truncates, and the env never resets itself.

    Jumanji ends most games at their time limit with discount 0, as if the state there were worth nothing; here such an
    end is a truncation, unless the game is also over by its own rules on that step. What a game ends for another reason
    (an illegal action, no legal one left) is terminated. Rewards of several agents are summed. The game's action mask
    is the timestep's: flat where it is joint, one component after another where each has its own.

    Attributes:
        game: Jumanji's id in any spelling ('Snake-v1', 'snake', 'game_2048'), or 'maze-empty' or 'maze-fixed': mazes of
            10 x 10 cells whose walls stay (`kwargs`: `size`, and `pairs`, 9 or 4, of start and goal).
        max_steps: agent steps before an episode is truncated; None keeps the game's own limit.
        observation: what the agent sees: 'flatten', 'maze_grid', 'maze_positions', 'maze_vector', 'snake_grid',
            'game_2048_one_hot', or a function 'package.module:function' of Jumanji's observation; None: the game's own
            of these, else 'flatten'.
        kwargs: constructor arguments of the game, e.g. `{'num_rows': 6}` for Snake; one with a `name` is built first:
            `{'generator': {'name': 'package.module:Class', 'num_rows': 5}}`.

    Raises:
        ConfigError: an unknown game, argument or function, on the first use of `spec`, `reset` or `step`: importing
            Jumanji takes seconds, so constructing does not.
    """

    game: str = "Maze-v0"
    max_steps: int | None = None
    observation: str | None = None
    kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.in_range(self, "max_steps", low=1)
        observations.check_name(self.observation, "Jumanji.observation")
        if self.max_steps is not None and "time_limit" in self.kwargs:
            raise ConfigError(
                f"Jumanji: max_steps = {self.max_steps} and kwargs.time_limit = {self.kwargs['time_limit']} are the "
                "same limit; give one of them"
            )

    @functools.cached_property
    def _made(self) -> _Made:
        # The first use may be under a trace, and what a game computes as it is built is kept.
        with jax.ensure_compile_time_eval():
            game, env = _make(self.game, self.kwargs, self.max_steps)
        kind = type(env).__name__
        limit = getattr(env, "time_limit", None)
        if limit is not None and kind not in _HORIZON_IS_THE_TASK:
            # Its own end at the limit has discount 0. Without it, what ends is over by the game's rules. Arrays and
            # specs that are sized by the limit exist already.
            env = copy.copy(env)
            env.time_limit = _NO_LIMIT
        timestep = jax.eval_shape(env.reset, _raw_shape())[1]
        mask = getattr(timestep.observation, "action_mask", None)
        return _Made(
            env=env,
            limit=self.max_steps if limit is None else int(limit),
            layout=layout_of(env.action_spec, None if mask is None else tuple(mask.shape), game),
            observe=observations.function_for(self.observation, kind, "Jumanji.observation"),
        )

    @property
    def suite_env(self) -> Any:
        """Jumanji's own env, whose states are those in `JumanjiState.game`; it ends no episode at a time limit."""
        return self._made.env

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """What the game observes and accepts."""
        made = self._made
        timestep = jax.eval_shape(made.env.reset, _raw_shape())[1]
        try:
            shapes = jax.eval_shape(made.observe, timestep.observation)
            specs = jax.tree.map(lambda x: ArraySpec(tuple(x.shape), _at_most_float32(x.dtype)), shapes)
        except Exception as error:
            raise ConfigError(
                f"Jumanji.observation = {self.observation!r} fails on {self.game!r}: {_first_line(error)}"
            ) from error
        return EnvSpec(observation=specs, action=made.layout.spec, action_mask=made.layout.masked)

    def reset(self, key: Array) -> tuple[JumanjiState, PyTree, Array | None]:
        """Starts an episode: (state, observation, action mask bool or None)."""
        game, timestep = self._made.env.reset(jax.random.key_data(key) if _is_typed(key) else key)
        state = JumanjiState(jax.tree.map(strong, game), jnp.zeros((), jnp.int32))
        return state, *self._seen(timestep.observation)

    def step(
        self, state: JumanjiState, action: Array, key: Array
    ) -> tuple[JumanjiState, PyTree, Array, Array, Array, Array | None]:
        """Takes one action: (state, observation, reward float32, terminated bool, truncated bool, action mask).

        The game draws from the key that its state carries since `reset`; `key` is not used.
        """
        made = self._made
        game, timestep = made.env.step(state.game, made.layout.to_game(action))
        steps = state.steps + 1
        # Games of several agents give each a reward and a discount.
        over, lives_on = timestep.last(), jnp.any(timestep.discount > 0)
        truncated = jnp.logical_and(over, lives_on)
        if made.limit is not None:
            truncated = jnp.logical_or(truncated, steps >= made.limit)
        observation, mask = self._seen(timestep.observation)
        return (
            JumanjiState(jax.tree.map(lambda new, old: strong(new, old.dtype), game, state.game), steps),
            observation,
            strong(jnp.sum(timestep.reward), jnp.float32),
            strong(jnp.logical_and(over, jnp.logical_not(lives_on)), jnp.bool_),
            strong(truncated, jnp.bool_),
            mask,
        )

    def prepare_render(self) -> None:
        """Checks that Jumanji draws this game, by drawing a first state of it.

        Raises:
            ConfigError: it does not.
        """
        try:
            self.render(jax.jit(self.reset)(jax.random.key(0))[0])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"Jumanji.game = {self.game!r} cannot be drawn: {_first_line(error)}") from error

    def render(self, state: JumanjiState) -> np.ndarray:
        """Jumanji's own picture of one state, uint8 `[H, W, 3]`."""
        return self._paint(state.game)

    @functools.cached_property
    def _paint(self) -> Callable[[Any], np.ndarray]:
        return painter(self._made.env)

    def _seen(self, observation: Any) -> tuple[PyTree, Array | None]:
        made = self._made
        seen = jax.tree.map(lambda x: strong(x, _at_most_float32(jnp.result_type(x))), made.observe(observation))
        return seen, made.layout.to_agent(observation.action_mask) if made.layout.masked else None


def _make(name: str, kwargs: dict, max_steps: int | None) -> tuple[str, Any]:
    """(id, Jumanji env); a game that has a time limit is built with `max_steps` as its limit."""
    try:
        import jumanji

        from flaxrl.envs.mazes import MAZES
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("jumanji"):
            raise
        raise ConfigError("env 'jumanji' needs the jumanji package: pip install 'flaxrl[jumanji]'") from error
    game = resolve_game(name, [*jumanji.registered_environments(), *MAZES], "Jumanji.game")
    make = MAZES.get(game) or functools.partial(jumanji.make, game)
    try:
        kwargs = {k: _built(v) for k, v in kwargs.items()}
        env = make(**kwargs)
        if max_steps is not None and hasattr(env, "time_limit"):
            env = make(**kwargs, time_limit=max_steps)
    except ConfigError:
        raise
    except Exception as error:
        given = f" with kwargs {kwargs}" if kwargs else ""
        raise ConfigError(f"Jumanji: {game}{given} cannot be made: {_first_line(error)}") from error
    return game, env


def _built(value: Any) -> Any:
    """An argument of a game, where it is a mapping with a name the object that this stands for."""
    if not build.is_block(value):
        return value
    return build.resolve(value["name"])(**{k: _built(v) for k, v in value.items() if k != "name"})


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _is_typed(key: Array) -> bool:
    return jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)


def _raw_shape() -> Any:
    """Jumanji's generators take raw keys."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))


def _at_most_float32(dtype: Any) -> np.dtype:
    return np.dtype(np.float32) if dtype == np.float64 else np.dtype(dtype)

"""Scripted envs with known answers: for tests, for trying a setup, and for measuring it without a simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxrl import checks
from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.envs.next_step import NextStepRows
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.types import Array, Timestep

MASKS = ("none", "partial", "empty_on_last", "empty")
REWARDS = ("match", "count")


class ScriptedState(struct.PyTreeNode):
    """Attributes: time, int32, actions taken in this episode; offset, int32, the episode's secret."""

    time: Array
    offset: Array


@dataclass
class Scripted(JaxEnv):
    """Name the action that is shown: reward 1 for the right one, else 0.

    The right action of step t is `(t + offset) % num_actions`, offset drawn anew each episode. The observation is
    float32 `[1 + num_actions]`: t, then the right action one-hot. So the best return is `episode_length` and a
    uniformly random policy's is `episode_length / num_actions`.

    Attributes:
        episode_length: actions an episode.
        time_limit: episodes end by truncation (discount 1) instead of termination (discount 0).
        num_actions: at least 2.
        mask: 'none'; 'partial' (the action after the right one is illegal, and costs 1 if taken); 'empty_on_last' (no
            legal action on the final row, all elsewhere); 'empty' (no legal action anywhere).
    """

    episode_length: int = 5
    time_limit: bool = False
    num_actions: int = 3
    mask: str = "none"

    def __post_init__(self) -> None:
        checks.in_range(self, "episode_length", low=1)
        checks.in_range(self, "num_actions", low=2)
        checks.choice(self, "mask", MASKS)
        self.spec = EnvSpec(
            ArraySpec((1 + self.num_actions,)), Discrete(self.num_actions), action_mask=self.mask != "none"
        )

    def reset(self, key: Array) -> tuple[ScriptedState, Array, Array | None]:
        """Starts an episode: (state, observation, action_mask or None)."""
        state = ScriptedState(jnp.zeros((), jnp.int32), jax.random.randint(key, (), 0, self.num_actions, jnp.int32))
        return state, self._observe(state), self._mask(state)

    def step(
        self, state: ScriptedState, action: Array, key: Array
    ) -> tuple[ScriptedState, Array, Array, Array, Array, Array | None]:
        """Takes one action: (state, observation, reward, terminated, truncated, action_mask or None)."""
        target = self._target(state)
        reward = (action == target).astype(jnp.float32)
        if self.mask == "partial":
            reward -= (action == (target + 1) % self.num_actions).astype(jnp.float32)
        state = state.replace(time=state.time + 1)
        over, never = state.time >= self.episode_length, jnp.zeros((), bool)
        terminated, truncated = (never, over) if self.time_limit else (over, never)
        return state, self._observe(state), reward, terminated, truncated, self._mask(state)

    def _target(self, state: ScriptedState) -> Array:
        return (state.time + state.offset) % self.num_actions

    def _observe(self, state: ScriptedState) -> Array:
        shown = jax.nn.one_hot(self._target(state), self.num_actions, dtype=jnp.float32)
        return jnp.concatenate([state.time.astype(jnp.float32)[None], shown])

    def _mask(self, state: ScriptedState) -> Array | None:
        return _script_mask(self, self._target(state), state.time >= self.episode_length, jnp)


@dataclass
class Counting(JaxEnv):
    """The reward of an episode's step i (from 0) is i, whatever the action; the observation is `[i]`, float32.

    Attributes:
        episode_length: actions an episode, which then terminates; None: it never ends.
        num_actions: at least 2.
    """

    episode_length: int | None = None
    num_actions: int = 2

    def __post_init__(self) -> None:
        checks.in_range(self, "episode_length", low=1)
        checks.in_range(self, "num_actions", low=2)
        self.spec = EnvSpec(ArraySpec((1,)), Discrete(self.num_actions))

    def reset(self, key: Array) -> tuple[Array, Array, None]:
        """Starts an episode: (state, observation, None)."""
        return jnp.zeros((), jnp.int32), jnp.zeros((1,), jnp.float32), None

    def step(self, state: Array, action: Array, key: Array) -> tuple[Array, Array, Array, Array, Array, None]:
        """Takes one action: (state, observation, reward, terminated, truncated, None)."""
        never = jnp.zeros((), bool)
        over = never if self.episode_length is None else state + 1 >= self.episode_length
        return state + 1, (state + 1).astype(jnp.float32)[None], state.astype(jnp.float32), over, never, None


@dataclass
class Memory(JaxEnv):
    """A cue is shown on the first row only, and asked for `length` steps later: +1 for the right answer, else -1.

    The observation is float32 `[3]`: the cue one-hot (zeros after the first row), then 1 on the row that asks. An
    episode has `length + 1` actions, of which the last alone counts. Without memory the mean return is 0, with it 1.

    Attributes:
        length: steps between the cue and the question, at least 1.
    """

    length: int = 5

    def __post_init__(self) -> None:
        checks.in_range(self, "length", low=1)
        self.spec = EnvSpec(ArraySpec((3,)), Discrete(2))

    def reset(self, key: Array) -> tuple[ScriptedState, Array, None]:
        """Starts an episode: (state, observation, None)."""
        state = ScriptedState(jnp.zeros((), jnp.int32), jax.random.randint(key, (), 0, 2, jnp.int32))
        return state, self._observe(state), None

    def step(
        self, state: ScriptedState, action: Array, key: Array
    ) -> tuple[ScriptedState, Array, Array, Array, Array, None]:
        """Takes one action: (state, observation, reward, terminated, truncated, None)."""
        asked = state.time == self.length
        reward = jnp.where(asked, jnp.where(action == state.offset, 1.0, -1.0), 0.0)
        state = state.replace(time=state.time + 1)
        return state, self._observe(state), reward, asked, jnp.zeros((), bool), None

    def _observe(self, state: ScriptedState) -> Array:
        cue = jax.nn.one_hot(state.offset, 2) * (state.time == 0)
        return jnp.append(cue, (state.time == self.length).astype(jnp.float32))


@dataclass(kw_only=True)
class HostScripted(HostEnv):
    """Scripted's game as a numpy batch, with faults to order.

    Attributes:
        num_envs: games played at once.
        episode_length: actions an episode.
        time_limit: episodes end by truncation instead of termination.
        num_actions: at least 2.
        mask: as Scripted's.
        reward: 'match' (Scripted's), or 'count' (an env's i-th executed action since `reset`, over all episodes, pays
            i: 0, 1, 2, ...).
        image: uint8 observations `[4, 84, 84]`: column band `a` of `num_actions` bright where action a is right, and
            row t grey.
        float64: the simulator computes observations in float64; rows carry float32, as everywhere.
        fail_at: the `step` call since `reset` (from 1) that raises RuntimeError.
        nan_at: the `step` call since `reset` (from 1) whose reward is NaN in env 0.
        step_seconds: time that each `step` call sleeps.
    """

    num_envs: int
    episode_length: int = 5
    time_limit: bool = False
    num_actions: int = 3
    mask: str = "none"
    reward: str = "match"
    image: bool = False
    float64: bool = False
    fail_at: int | None = None
    nan_at: int | None = None
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        checks.in_range(self, "num_envs", "episode_length", "fail_at", "nan_at", low=1)
        checks.in_range(self, "num_actions", low=2)
        checks.non_negative(self, "step_seconds")
        checks.choice(self, "mask", MASKS)
        checks.choice(self, "reward", REWARDS)
        if self.image and self.float64:
            raise ConfigError("HostScripted: image = True gives uint8, so float64 = True has no meaning; drop one")
        shape = ArraySpec((4, 84, 84), np.uint8) if self.image else ArraySpec((1 + self.num_actions,))
        self.spec = EnvSpec(shape, Discrete(self.num_actions), action_mask=self.mask != "none")
        self._rows: NextStepRows | None = None

    def reset(self, seed: int) -> Timestep:
        """Restarts every env, env i from `seed + i`; answers FIRST rows."""
        self._random = [np.random.default_rng(seed + i) for i in range(self.num_envs)]
        self._calls = 0
        self._time = np.zeros(self.num_envs, np.int32)
        self._executed = np.zeros(self.num_envs, np.int32)
        self._offset = np.zeros(self.num_envs, np.int32)
        self._restart(np.ones(self.num_envs, bool))
        self._rows = NextStepRows(self.spec, self.num_envs)
        return self._rows.first(self._observe(), self._mask())

    def step(self, action: np.ndarray) -> Timestep:
        """One action an env, `[B]` integers; where the last answer was LAST it is ignored and FIRST answers.

        Raises:
            RuntimeError: before `reset`, and at call `fail_at`.
        """
        if self._rows is None:
            raise RuntimeError("HostScripted.step before HostScripted.reset")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._calls += 1
        if self._calls == self.fail_at:
            raise RuntimeError(f"HostScripted fails at step {self.fail_at}, as ordered by fail_at")
        action, over = np.asarray(action), self._rows.over
        reward = self._reward(action)
        if self._calls == self.nan_at:
            reward[0] = np.nan
        self._time = self._time + 1
        self._executed = self._executed + ~over
        self._restart(over)
        done, never = self._time >= self.episode_length, np.zeros(self.num_envs, bool)
        ends = (never, done) if self.time_limit else (done, never)
        return self._rows.next(self._observe(), reward, *ends, self._mask())

    def close(self) -> None:
        """Nothing to free; `step` raises until the next `reset`."""
        self._rows = None

    def _reward(self, action: np.ndarray) -> np.ndarray:
        if self.reward == "count":
            return self._executed.astype(np.float32)
        reward = (action == self._target()).astype(np.float32)
        if self.mask == "partial":
            reward -= action == (self._target() + 1) % self.num_actions
        return reward

    def _restart(self, where: np.ndarray) -> None:
        for i in np.flatnonzero(where):
            self._time[i] = 0
            self._offset[i] = self._random[i].integers(self.num_actions)

    def _target(self) -> np.ndarray:
        return (self._time + self._offset) % self.num_actions

    def _observe(self) -> np.ndarray:
        shown = np.arange(self.num_actions) == self._target()[:, None]
        if not self.image:
            return np.column_stack([self._time, shown]).astype(np.float64 if self.float64 else np.float32)
        band = np.arange(84) * self.num_actions // 84
        columns = np.take_along_axis(shown, np.broadcast_to(band, (self.num_envs, 84)), axis=1)
        image = np.zeros((self.num_envs, 4, 84, 84), np.uint8)
        image[:] = 255 * columns[:, None, None, :].astype(np.uint8)
        image[np.arange(self.num_envs), :, self._time % 84] = 128
        return image

    def _mask(self) -> np.ndarray | None:
        return _script_mask(self, self._target(), self._time >= self.episode_length, np)


def _script_mask(env: Scripted | HostScripted, target: Any, last: Any, xp: Any) -> Any:
    """The script's action mask, bool `[..., A]`, or None.

    Args:
        env: whose `mask` and `num_actions` count.
        target: right action, int32 `[...]`.
        last: whether this is an episode's final row, bool `[...]`.
        xp: numpy or jax.numpy.
    """
    actions = xp.arange(env.num_actions)
    every = xp.broadcast_to(xp.ones((), bool), (*target.shape, env.num_actions))
    if env.mask == "none":
        return None
    if env.mask == "partial":
        return actions != (target[..., None] + 1) % env.num_actions
    if env.mask == "empty_on_last":
        return every & ~last[..., None]
    if env.mask == "empty":
        return ~every
    raise ValueError(f"mask = {env.mask!r}, expected one of {MASKS}")

"""A corridor: an env of one's own, in JAX."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct

import flaxrl
from flaxrl import checks
from flaxrl.types import Array


class CorridorState(struct.PyTreeNode):
    """Attributes: position and time, int32."""

    position: Array
    time: Array


@dataclass
class Corridor(flaxrl.JaxEnv):
    """Walk right: each action costs 0.1, the door at the right end pays 1 and ends the episode.

    Actions are 0, left, and 1, right; the observation is float32 `[length]`, the position one-hot. The best return is
    `1 - 0.1 * (length - 1)`.

    Attributes:
        length: cells; the walk starts in the first, the door is in the last.
        max_steps: actions before the episode is truncated.
    """

    length: int = 6
    max_steps: int = 50

    def __post_init__(self) -> None:
        checks.in_range(self, "length", low=2)
        checks.in_range(self, "max_steps", low=1)
        self.spec = flaxrl.EnvSpec(flaxrl.ArraySpec((self.length,)), flaxrl.Discrete(2))

    def reset(self, key: Array) -> tuple[CorridorState, Array, None]:
        """Starts an episode: (state, observation, no action mask)."""
        state = CorridorState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        return state, self._observe(state), None

    def step(
        self, state: CorridorState, action: Array, key: Array
    ) -> tuple[CorridorState, Array, Array, Array, Array, None]:
        """Takes one action: (state, observation, reward, terminated, truncated, no action mask)."""
        position = jnp.clip(state.position + 2 * action - 1, 0, self.length - 1)
        state = CorridorState(position, state.time + 1)
        reached = position == self.length - 1
        reward = jnp.where(reached, 1.0, 0.0) - 0.1
        return state, self._observe(state), reward, reached, ~reached & (state.time >= self.max_steps), None

    def _observe(self, state: CorridorState) -> Array:
        return (jnp.arange(self.length) == state.position).astype(jnp.float32)

"""The episode rule, written once: two interfaces, and AutoReset, which turns one pure env into a batch."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxrl.envs.spec import EnvSpec, env_action
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID, Array, PyTree, Timestep

EnvState = Any


class JaxEnv(abc.ABC):
    """ONE env, pure JAX, that never resets itself. AutoReset owns batching, step types, totals and the reset."""

    spec: EnvSpec

    @abc.abstractmethod
    def reset(self, key: Array) -> tuple[EnvState, PyTree, Array | None]:
        """Starts an episode: (state, observation, action_mask or None)."""

    @abc.abstractmethod
    def step(
        self, state: EnvState, action: Array, key: Array
    ) -> tuple[EnvState, PyTree, Array, Array, Array, Array | None]:
        """Takes one action, numbered as `spec` says.

        Returns:
            (state, observation, reward, terminated, truncated, action_mask or None)
        """

    def prepare_render(self) -> None:
        """Told before the first `reset` of an env that `render` will be asked of; most have nothing to do.

        Raises:
            ConfigError: nothing is drawn here.
        """
        if type(self).render is JaxEnv.render:
            raise _draws_nothing(self)

    def render(self, state: EnvState) -> np.ndarray:
        """The picture of one state, uint8 `[H, W, 3]`, always of one size; on the host, so it may be slow."""
        raise _draws_nothing(self)


class HostEnv(abc.ABC):
    """A batch of envs, stateful, numpy, already speaking the episode rule.

    The constructor takes `num_envs` besides its config fields and does nothing costly; heavy imports and processes wait
    for the first use of `spec` or `reset`. Every call answers new arrays: rows are kept for a whole unroll.
    """

    num_envs: int
    spec: EnvSpec

    @abc.abstractmethod
    def reset(self, seed: int) -> Timestep:
        """Restarts every env; answers FIRST rows.

        Env i starts from `seed + i`, save where a simulator draws for the whole batch from one generator: there an
        env's episodes depend on the batch too.
        """

    @abc.abstractmethod
    def step(self, action: np.ndarray) -> Timestep:
        """One action an env, numbered as `spec` says; after a LAST row it is ignored and FIRST answers."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees threads, processes and emulators; may be called twice."""

    def prepare_render(self) -> None:
        """Told before the first `reset` of an env that `render` will be asked of: a simulator may have to know.

        Raises:
            ConfigError: nothing is drawn here.
        """
        if type(self).render is HostEnv.render:
            raise _draws_nothing(self)

    def render(self) -> np.ndarray:
        """The picture of env 0 as it last answered, uint8 `[H, W, 3]`, always of one size."""
        raise _draws_nothing(self)


def _draws_nothing(env: Any) -> ConfigError:
    return ConfigError(
        f"{type(env).__name__} draws nothing: it has no method `render`; a video needs an env that draws "
        "(atari, gymnasium, gymnax, jumanji, or one of your own)"
    )


class AutoResetState(struct.PyTreeNode):
    """A batch of running envs: their own states and the timestep each last answered, leaves `[B, ...]`."""

    env: EnvState
    timestep: Timestep


class AutoReset:
    """A batch of `env`s under the episode rule; pure, so it may be jitted, scanned and sharded over B.

    Each env has a key of its own: what it does depends neither on the batch it runs in nor on the device.
    """

    def __init__(self, env: JaxEnv):
        self.env = env
        self.spec = env.spec

    def reset(self, keys: Array) -> AutoResetState:
        """Starts an episode in every env.

        Args:
            keys: PRNG keys `[B]`.
        """
        state, observation, mask = jax.vmap(self.env.reset)(keys)
        batch = keys.shape[0]
        timestep = Timestep(
            observation=observation,
            reward=jnp.zeros((batch,), jnp.float32),
            discount=jnp.ones((batch,), jnp.float32),
            step_type=jnp.full((batch,), FIRST, jnp.int8),
            action_mask=mask,
            episode_return=jnp.zeros((batch,), jnp.float32),
            episode_length=jnp.zeros((batch,), jnp.int32),
        )
        return AutoResetState(state, timestep)

    def step(self, state: AutoResetState, action: Array, keys: Array) -> AutoResetState:
        """One action an env; where the last answer was LAST the action is ignored and the env starts anew.

        Args:
            state: the running envs.
            action: `[B, ...]`, 0-based.
            keys: PRNG keys `[B]`.
        """
        previous = state.timestep
        over = jnp.equal(previous.step_type, LAST)
        env_state, observation, reward, terminated, truncated, mask = jax.vmap(self.env.step)(
            state.env, env_action(self.spec.action, action), keys
        )
        reward = reward.astype(jnp.float32)
        stepped = AutoResetState(
            env_state,
            Timestep(
                observation=observation,
                reward=reward,
                discount=1.0 - terminated.astype(jnp.float32),
                step_type=jnp.where(jnp.logical_or(terminated, truncated), LAST, MID).astype(jnp.int8),
                action_mask=mask,
                episode_return=previous.episode_return + reward,
                episode_length=previous.episode_length + 1,
            ),
        )

        def restart(stepped: AutoResetState) -> AutoResetState:
            fresh = self.reset(jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys))
            return jax.tree.map(lambda f, s: _where(over, f, s), fresh, stepped)

        # Outside the vmap, so that a step on which no env is over pays nothing for resets.
        return jax.lax.cond(anywhere(over), restart, lambda s: s, stepped)


@jax.custom_batching.custom_vmap
def anywhere(condition: Array) -> Array:
    """Whether `condition` (bool) holds anywhere; under `jax.vmap`, anywhere in all that is mapped.

    So a branch or a loop on it stays one where many seeds run side by side: with a predicate of each, both branches
    would run at every step.
    """
    return jnp.any(condition)


@anywhere.def_vmap
def _anywhere_mapped(axis_size: int, in_batched: list[bool], condition: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return anywhere(condition), False


def _where(condition: Array, x: Array, y: Array) -> Array:
    """`jnp.where` over the leading axis; PRNG keys too."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _where(condition, jax.random.key_data(x), jax.random.key_data(y))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.where(jnp.asarray(condition).reshape(condition.shape + (1,) * (x.ndim - 1)), x.astype(y.dtype), y)

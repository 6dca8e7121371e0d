"""The agent: torso -> core -> head, and a policy that samples."""

from __future__ import annotations

import inspect
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxrl import checks
from flaxrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.models.chunking import apply_in_chunks
from flaxrl.models.cores import FeedForward
from flaxrl.models.normalization import Normalizer
from flaxrl.models.torsos import DTYPES, computing_in
from flaxrl.types import FIRST, ActContext, AgentInput, Array, Carry, Output, PyTree


class Agent(nn.Module):
    """A Linen module with two ways in: `__call__` unrolls over time for the loss, `act` answers one row of envs.

    Randomness is asked for by stream name: `rngs={'sample': key}` makes `act` sample; without it, it is greedy.

    Attributes:
        torso: observation `[N, ...]` -> features `[N, F]`.
        core: memory over time (FeedForward, LSTM, GRU).
        head: features -> Output.
        policy: Output -> action.
        action_spec: of the env.
        value_torso: gives the value a network of its own: this torso, and a core like `core` with parameters and a
            state of its own (the carry is then a pair, the policy's first); the head joins the two. None: policy and
            value share torso and core.
        use_last_action: also feeds the previous action (one-hot; that of a Box as it is) to the core.
        use_last_reward: also feeds the previous reward, clipped to [-1, 1] (Espeholt et al., 2018), to the core.
        normalize_observations: float observations are taken relative to their running mean and deviation over all rows
            ever learned from; acting, learning and evaluation see the same.
        observation_clip: normalised observations are clipped to +- this; None leaves them.
        torso_chunk: rows that the torso takes at once; None chooses (on for the convolutional torsos on a CPU, where
            it keeps them in cache), 0 never chunks.
        torso_recompute: each chunk is computed again in the backward pass: a third more time, a fraction of the memory.
        dtype: computation dtype of torso and core, in place of their own ('bfloat16'); None leaves each its own.
            Parameters, the recurrent state and all outputs are float32 whatever is chosen, and the head computes in
            float32: it is small, and values and logits would lose most.
    """

    torso: nn.Module
    core: nn.Module
    head: nn.Module
    policy: nn.Module
    action_spec: ActionSpec
    value_torso: nn.Module | None = None
    use_last_action: bool = False
    use_last_reward: bool = False
    normalize_observations: bool = False
    observation_clip: float | None = 10.0
    torso_chunk: int | None = None
    torso_recompute: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        checks.non_negative(self, "torso_chunk")
        checks.positive(self, "observation_clip")
        if self.value_torso is not None:
            _check_takes_value_features(self.head)
        if self.dtype is not None:
            checks.choice(self, "dtype", DTYPES)
            for name in ("torso", "core", "value_torso"):
                # A module is frozen; flax does the same in its own __post_init__.
                object.__setattr__(self, name, _computing_in(getattr(self, name), self.dtype))
        super().__post_init__()

    def setup(self) -> None:
        """The parts that are no fields."""
        if self.normalize_observations:
            self.normalizer = Normalizer(self.observation_clip)
        if self.value_torso is not None:
            # Modules that the core has as fields are bound already: cloned along, they get parameters of their own.
            self.value_core = self.core.clone(name=None, _deep_clone=True, _reset_names=True)

    def __call__(self, inputs: AgentInput, carry: Carry) -> tuple[Output, Carry]:
        """Unrolls.

        Args:
            inputs: `[T, B, ...]`.
            carry: recurrent state before the first row, leaves `[B, ...]`; None starts an episode.

        Returns:
            Output `[T, B, ...]` and the state after the last row.
        """
        chex.assert_rank(inputs.step_type, 2)
        time, batch = inputs.step_type.shape
        rows = jax.tree.map(lambda x: x.reshape(time * batch, *x.shape[2:]), inputs.observation)
        if self.normalize_observations:
            rows = self.normalizer(rows)
        if carry is None:
            carry = self.initial_carry(batch)
        x, first, mask = self._features(self.torso, rows, inputs), inputs.first, inputs.action_mask
        if self.value_torso is None:
            x, carry = self.core(x, first, carry)  # type: ignore[operator]
            return self.head(x, mask), carry  # type: ignore[operator]
        x, policy_carry = self.core(x, first, carry[0])  # type: ignore[operator]
        v, value_carry = self.value_core(self._features(self.value_torso, rows, inputs), first, carry[1])
        return self.head(x, mask, value_features=v), (policy_carry, value_carry)  # type: ignore[operator]

    def _features(self, torso: nn.Module, rows: PyTree, inputs: AgentInput) -> Array:
        """What a core sees, `[T, B, F]`, of observations `[T * B, ...]`."""
        x: Array = apply_in_chunks(torso, rows, self._chunk(torso, rows), self.torso_recompute)
        parts = [x.reshape(*inputs.step_type.shape, -1)]
        if self.use_last_action:
            parts.append(encode_action(inputs.last_action, self.action_spec))
        if self.use_last_reward:
            parts.append(jnp.clip(inputs.last_reward, -1.0, 1.0)[..., None])
        return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def act(self, inputs: AgentInput, carry: Carry, context: ActContext) -> tuple[Array, Array | None, Output, Carry]:
        """One action an env.

        Args:
            inputs: `[B, ...]`.
            carry: leaves `[B, ...]`; None starts an episode.
            context: env ids and progress, for exploration.

        Returns:
            Actions `[B, ...]`, log-probabilities `[B]` (None for policies without one), Output `[B, ...]`, new carry.
        """
        chex.assert_rank(inputs.step_type, 1)
        output, carry = self(jax.tree.map(lambda x: x[None], inputs), carry)
        output = output[0]
        action, log_prob = self.policy(output, context)  # type: ignore[operator]
        return action, log_prob, output, carry

    def observe(self, inputs: AgentInput) -> None:
        """Takes rows `[T, B, ...]` into the running statistics, in a call of `apply` where they are mutable."""
        if self.normalize_observations:
            self.normalizer.observe(inputs.observation)

    def initial_carry(self, batch_size: int) -> Carry:
        """The recurrent state at an episode's start, leaves `[B, ...]`; needs parameters where it is learned."""
        carry = self.core.initial_carry(batch_size)  # type: ignore[attr-defined]
        return carry if self.value_torso is None else (carry, self.value_core.initial_carry(batch_size))

    def _chunk(self, torso: Any, rows: PyTree) -> int | None:
        if self.torso_chunk is not None:
            return self.torso_chunk or None
        chunk: Any = getattr(torso, "cpu_chunk", None) if jax.default_backend() == "cpu" else None
        size: Any = chunk(rows) if callable(chunk) else chunk
        return size


def _computing_in(module: Any, dtype: str) -> Any:
    """A torso or core with `dtype`; one that computes nothing stays as it is."""
    return module if module is None or isinstance(module, FeedForward) else computing_in(module, dtype, "Agent")


def _check_takes_value_features(head: Any) -> None:
    if "value_features" not in inspect.signature(type(head).__call__).parameters:
        raise ConfigError(
            f"Agent.value_torso needs a head that takes value_features, such as policy_value: {type(head).__name__} "
            "does not"
        )


def encode_action(action: Array, spec: ActionSpec) -> Array:
    """Actions as float features: one-hot (each component of a MultiDiscrete); a Box's as the policy drew them.

    Args:
        action: `[T, B, ...]`, 0-based where discrete.
        spec: of the env.

    Returns:
        float32 `[T, B, F]`.
    """
    if isinstance(spec, Discrete):
        return jax.nn.one_hot(action, spec.n)
    if isinstance(spec, MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(action[..., i], n) for i, n in enumerate(spec.nvec)], axis=-1)
    if isinstance(spec, Box):
        return action.astype(jnp.float32)
    raise ValueError(f"action spec {spec!r} is unknown; expected Discrete, MultiDiscrete or Box")


def wants(agent: Any, extra: str) -> bool:
    """Whether an agent takes 'last_action' or 'last_reward'; one without such a field does not."""
    return getattr(agent, f"use_{extra}", False)


def agent_input(agent: Any, timestep: Any, last_action: Array, xp: Any = jnp) -> AgentInput:
    """What `agent` sees of a timestep `[B, ...]`, in actors and evaluation alike.

    Args:
        agent: tells by `use_last_action` and `use_last_reward`, where it has them, what it needs.
        timestep: answer of a batch of envs.
        last_action: `[B, ...]`, the action that led to it.
        xp: jax.numpy, or numpy on the host.
    """
    action = None
    if wants(agent, "last_action"):
        first = (timestep.step_type == FIRST).reshape((-1,) + (1,) * (last_action.ndim - 1))
        action = xp.where(first, xp.zeros_like(last_action), last_action)
    return AgentInput(
        observation=timestep.observation,
        step_type=timestep.step_type,
        action_mask=timestep.action_mask,
        last_action=action,
        last_reward=timestep.reward if wants(agent, "last_reward") else None,
    )

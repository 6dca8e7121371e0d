"""JaxRollout: envs in JAX, acting and learning in one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxrl import checks
from flaxrl.envs.base import AutoReset, AutoResetState, JaxEnv
from flaxrl.envs.spec import ActionSpec, any_legal
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.models.agent import agent_input
from flaxrl.models.policies import row_keys
from flaxrl.trainers.sharding import AXES, batch_spec, over_batch, replicated
from flaxrl.trainers.source import Runtime, Source
from flaxrl.types import LAST, ActContext, AgentInput, Array, Carry, Metrics, Timestep, TrainState, Trajectory


class RolloutData(struct.PyTreeNode):
    """The running envs, what the agent remembers of them (leaves `[B, ...]`), and the first fault seen.

    Attributes:
        envs: states and last timesteps.
        carry: recurrent state before the next row.
        last_action: action that led to the next row.
        fault: int32 `[B, 2]`, (updates, t) of the first row without a legal action, or (-1, -1).
    """

    envs: AutoResetState
    carry: Carry
    last_action: Array
    fault: Array


class _Row(struct.PyTreeNode):
    """One step of the scan, leaves `[B, ...]`."""

    inputs: AgentInput
    action: Array
    log_prob: Array | None
    value: Array | None
    answer: Timestep


@dataclass
class JaxRollout(Source):
    """Rolls the current policy out in `num_envs` JAX envs for `unroll_length` steps an iterate.

    Attributes:
        num_envs: B, over all devices and processes.
        unroll_length: T.
        updates_per_call: iterates in one dispatch; logs and checkpoints fall between calls.
    """

    num_envs: int = 32
    unroll_length: int = 20
    updates_per_call: int = 1

    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.positive(self, "num_envs", "unroll_length", "updates_per_call")

    @property
    def batch_size(self) -> int:
        """B."""
        return self.num_envs

    @property
    def steps_per_update(self) -> int:
        """T x B."""
        return self.unroll_length * self.num_envs

    @property
    def iterates_per_call(self) -> int:
        """Iterates in one dispatch."""
        return self.updates_per_call

    def setup(self, runtime: Runtime) -> None:
        """See Source."""
        env = runtime.make_env(self.num_envs)
        if not isinstance(env, JaxEnv):
            raise ConfigError(
                f"jax_rollout needs an env in JAX and {type(env).__name__} runs on the host: "
                "use config_for('actor_threads')"
            )
        self._envs, self._agent, self._mesh = AutoReset(env), runtime.agent, runtime.mesh
        self._progress = runtime.progress
        self._gather = jax.jit(jnp.copy, out_shardings=replicated(runtime.mesh))

    def init(self, state: TrainState, key: Array) -> RolloutData:
        """Fresh envs, sharded over B."""
        sharding = NamedSharding(self._mesh, batch_spec(time_first=False))
        make = jax.jit(self._fresh, out_shardings=sharding)
        return make({"params": state.params, **state.variables}, key)

    def traced_init(self, state: TrainState, key: Array) -> RolloutData:
        """See Source."""
        return self._fresh({"params": state.params, **state.variables}, key)

    def _fresh(self, model: Any, key: Array) -> RolloutData:
        envs = self._envs.reset(row_keys(key, jnp.arange(self.num_envs)))
        action = self._envs.spec.action
        return RolloutData(
            envs=envs,
            carry=self._agent.apply(model, self.num_envs, method="initial_carry"),
            last_action=jnp.zeros((self.num_envs, *action.shape), action.dtype),
            fault=jnp.full((self.num_envs, 2), -1, jnp.int32),
        )

    def sample(self, data: RolloutData, state: TrainState, key: Array) -> tuple[RolloutData, Trajectory, Metrics]:
        """One unroll of every env; each shard runs its own."""
        key_env, key_act = jax.random.split(key)
        ids = jnp.arange(self.num_envs, dtype=jnp.int32)
        env_keys = jax.vmap(row_keys, in_axes=(0, None))(jax.random.split(key_env, self.unroll_length), ids)
        act_keys = jax.random.split(key_act, self.unroll_length)
        row, batch = P(AXES), batch_spec()
        run = over_batch(self._scan, self._mesh, (P(), row, row, batch, P(), P()), (row, batch, batch))
        model = {"params": state.params, **state.variables}
        data, trajectory, answers = run(model, data, ids, env_keys, act_keys, state.updates)
        ended = answers.step_type == LAST
        count = jnp.sum(ended)
        metrics = {
            "actor/episode_return": (jnp.sum(jnp.where(ended, answers.episode_return, 0.0)), count),
            "actor/episode_length": (jnp.sum(jnp.where(ended, answers.episode_length, 0)), count),
            "actor/episodes": (count, 1.0),
        }
        return data, trajectory, metrics

    def _scan(
        self, model: Any, data: RolloutData, ids: Array, env_keys: Array, act_keys: Array, updates: Array
    ) -> tuple[RolloutData, Trajectory, Timestep]:
        """T steps of this shard's envs: new data, the trajectory, and what the envs answered (without observations)."""
        context = ActContext(env_ids=ids, progress=self._progress(updates))

        def step(data: RolloutData, keys: tuple[Array, Array]) -> tuple[RolloutData, _Row]:
            inputs = agent_input(self._agent, data.envs.timestep, data.last_action)
            action, log_prob, output, carry = self._agent.apply(
                model, inputs, data.carry, context, rngs={"sample": keys[1]}, method="act"
            )
            envs = self._envs.step(data.envs, action, keys[0])
            answer = envs.timestep.replace(observation=None, action_mask=None)
            row = _Row(inputs, action, log_prob, output.value, answer)
            return data.replace(envs=envs, carry=carry, last_action=action), row

        new, rows = jax.lax.scan(step, data, (env_keys, act_keys))
        last = agent_input(self._agent, new.envs.timestep, new.last_action)
        inputs = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), rows.inputs, last)
        trajectory = Trajectory(
            inputs=inputs,
            action=rows.action,
            reward=rows.answer.reward,
            discount=rows.answer.discount,
            log_prob=rows.log_prob,
            value=rows.value,
            carry=jax.tree.map(lambda x: x[None], data.carry),
        )
        fault = _first_fault(data.fault, self._envs.spec.action, inputs, updates)
        return new.replace(fault=fault), trajectory, rows.answer

    def check(self, data: RolloutData) -> None:
        """Raises TrainingError where an env had no legal action although its episode went on."""
        if not self._envs.spec.action_mask:
            return
        # Every process reads the faults of all, so that all end of the same one.
        several = jax.process_count() > 1
        fault = jax.device_get(self._gather(data.fault) if several else data.fault)  # of many seeds [N, B, 2]
        bad = np.argwhere(fault[..., 0] >= 0)
        if len(bad):
            updates, t, env = min((*fault[tuple(where)].tolist(), int(where[-1])) for where in bad)  # the first in time
            raise TrainingError(no_legal_action(env, updates * self.steps_per_update + t * self.num_envs + env))


def no_legal_action(env: int, step: int) -> str:
    """The message for an action mask that leaves nothing to do on a row that is not LAST."""
    return (
        f"env {env} gave an action mask without a legal action at step {step}, before its episode's end: "
        "at least one action (of MultiDiscrete ones, of each component) must be legal on every row that is not LAST"
    )


def _first_fault(fault: Array, spec: ActionSpec, inputs: AgentInput, updates: Array) -> Array:
    """`fault` with the first row of each env that has no legal action and is not LAST."""
    if inputs.action_mask is None:
        return fault
    bad = ~any_legal(spec, inputs.action_mask) & (inputs.step_type != LAST)
    found = jnp.stack([jnp.full(bad.shape[1:], updates, jnp.int32), jnp.argmax(bad, axis=0).astype(jnp.int32)], axis=-1)
    new = jnp.any(bad, axis=0) & (fault[:, 0] < 0)
    return jnp.where(new[:, None], found, fault)

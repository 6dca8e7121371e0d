"""One actor: a batch of host envs, stepped with an agent's actions, unroll by unroll."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxrl.envs.base import HostEnv
from flaxrl.envs.spec import EnvSpec, any_legal, env_action
from flaxrl.errors import TrainingError
from flaxrl.models.agent import agent_input
from flaxrl.trainers.blocks import InputBlocks
from flaxrl.trainers.rollout import no_legal_action
from flaxrl.trainers.setup import act_context, example_input
from flaxrl.types import LAST, ActContext, AgentInput, Array, Carry, PyTree, Timestep, Trajectory


class Unrolled(NamedTuple):
    """What an actor hands over.

    Attributes:
        trajectory: numpy leaves `[T, b, ...]` of this actor's envs.
        block: inputs of the whole batch, `[T+1, B, ...]`; `trajectory.inputs` are columns of it.
        metrics: totals and counts of the episodes that ended, and seconds spent per phase.
        updates: of the parameters that acted.
    """

    trajectory: Trajectory
    block: AgentInput
    metrics: dict[str, tuple[float, float]]
    updates: int


class Acting(struct.PyTreeNode):
    """What stays on the actor's device during an unroll, so that a step moves one row in and one action out.

    Attributes:
        context: env ids and progress.
        key: of the unroll.
        t: int32, steps done.
        carry: recurrent state before the next row, leaves `[b, ...]`.
        log_prob: float32 `[T, b]`, filled up to t; None for policies without one.
        value: float32 `[T, b]`, filled up to t; None where no head gives one.
    """

    context: ActContext
    key: Array
    t: Array
    carry: Carry
    log_prob: Array | None
    value: Array | None


class Act:
    """The jitted act of an agent, shared by all actors of a run.

    Args:
        agent: the Linen module.
        spec: of the envs.
        progress: of the number of updates, the fraction of the run done.
        unroll_length: T.
    """

    def __init__(self, agent: Any, spec: EnvSpec, progress: Any, unroll_length: int):
        self.agent = agent
        self._spec, self._progress, self._length = spec, progress, unroll_length
        self.initial_carry = jax.jit(self._initial_carry, static_argnums=1)
        self.begin = jax.jit(self._begin)
        self.step = jax.jit(self._step)

    def _begin(self, model: PyTree, carry: Carry, ids: Array, updates: Array, key: Array) -> tuple[Acting, Carry]:
        """An unroll's start: what stays on the device, and the carry `[1, b, ...]` as the trajectory keeps it."""
        context = act_context(ids, self._progress(updates))
        row = jax.eval_shape(functools.partial(example_input, self.agent, self._spec, len(ids)))
        _, log_prob, value, _ = jax.eval_shape(self._choose, model, row, carry, context, key)
        columns = jax.tree.map(lambda x: jnp.zeros((self._length, *x.shape), x.dtype), (log_prob, value))
        start = jax.tree.map(lambda x: x[None], carry)
        return Acting(context, key, jnp.int32(0), carry, *columns), start

    def _step(self, model: PyTree, inputs: AgentInput, acting: Acting) -> tuple[Array, Acting]:
        """Actions `[b, ...]` for one row."""
        key = jax.random.fold_in(acting.key, acting.t)
        action, log_prob, value, carry = self._choose(model, inputs, acting.carry, acting.context, key)
        columns = (acting.log_prob, acting.value)
        log_probs, values = jax.tree.map(lambda xs, x: xs.at[acting.t].set(x), columns, (log_prob, value))
        return action, acting.replace(t=acting.t + 1, carry=carry, log_prob=log_probs, value=values)

    def _choose(
        self, model: PyTree, inputs: AgentInput, carry: Carry, context: ActContext, key: Array
    ) -> tuple[Array, Array | None, Array | None, Carry]:
        action, log_prob, output, carry = self.agent.apply(
            model, inputs, carry, context, rngs={"sample": key}, method="act"
        )
        return action, log_prob, output.value, carry

    def _initial_carry(self, model: PyTree, batch: int) -> Carry:
        return self.agent.apply(model, batch, method="initial_carry")


class Actor:
    """Steps its envs with whatever parameters it is given; remembers timestep, carry and last action in between.

    Args:
        env: already made; this actor closes it.
        act: jitted act of the agent.
        env_ids: global ids of its envs, int32 `[b]`.
        seed: of the envs' `reset`.
        unroll_length: T.
        blocks: memory for the inputs.
        part: this actor's part of a block.
        device: that it acts on.
        num_envs: B, the run's envs.
        first_step: of the run, where this actor begins.
    """

    def __init__(
        self,
        env: HostEnv,
        act: Act,
        env_ids: np.ndarray,
        seed: int,
        *,
        unroll_length: int,
        blocks: InputBlocks,
        part: int,
        device: Any,
        num_envs: int,
        first_step: int,
    ):
        self._env, self._act, self._env_ids = env, act, env_ids
        self._length, self._blocks, self._part = unroll_length, blocks, part
        self._ids = jax.device_put(env_ids, device)
        self._timestep: Timestep = env.reset(seed)
        action = env.spec.action
        self._last_action = np.zeros((len(env_ids), *action.shape), action.dtype)
        self._carry: Carry = None
        self._num_envs, self._first_step = num_envs, first_step
        self._rows = 0

    def unroll(self, model: PyTree, updates: int, key: Array) -> Unrolled:
        """T steps of every env; the next unroll starts with the row that this one ends with.

        Args:
            model: Linen variables, on this actor's device.
            updates: of those parameters.
            key: of this unroll.
        """
        seconds = {"env": 0.0, "inference": 0.0}
        clock = time.perf_counter()
        if self._carry is None:
            self._carry = self._act.initial_carry(model, len(self._env_ids))
        acting, start = self._act.begin(model, self._carry, self._ids, np.int32(updates), key)
        row = self._input()
        block, inputs = self._blocks.take(self._part, row)
        actions, answers = [], []
        for t in range(self._length):
            action, acting = self._act.step(model, _write(inputs, t, row), acting)
            self._last_action = np.asarray(action)  # the one wait for the device in a step
            acted = time.perf_counter()
            self._timestep = self._env.step(env_action(self._env.spec.action, self._last_action))
            stepped = time.perf_counter()
            seconds["inference"] += acted - clock
            seconds["env"] += stepped - acted
            clock = stepped
            self._rows += 1
            actions.append(self._last_action)
            answers.append(self._timestep.replace(observation=None, action_mask=None))
            row = self._input()
        _write(inputs, self._length, row)
        self._carry = acting.carry
        log_prob, value, start = jax.device_get((acting.log_prob, acting.value, start))
        answer = jax.tree.map(lambda *x: np.stack(x), *answers)
        trajectory = Trajectory(
            inputs=inputs,
            action=np.stack(actions),
            reward=answer.reward,
            discount=answer.discount,
            log_prob=log_prob,
            value=value,
            carry=start,
        )
        return Unrolled(trajectory, block, self._metrics(answer, seconds), updates)

    def _input(self) -> AgentInput:
        """What the agent sees of the last timestep; raises where no action is legal."""
        timestep = self._timestep
        if timestep.action_mask is not None:
            bad = ~any_legal(self._env.spec.action, timestep.action_mask) & (timestep.step_type != LAST)
            if bad.any():
                env = int(self._env_ids[np.argmax(bad)])
                raise TrainingError(no_legal_action(env, self._first_step + self._rows * self._num_envs + env))
        return agent_input(self._act.agent, timestep, self._last_action, np)

    def _metrics(self, answer: Timestep, seconds: dict[str, float]) -> dict[str, tuple[float, float]]:
        ended = answer.step_type == LAST
        count = float(ended.sum())
        metrics = {
            "actor/episode_return": (float(answer.episode_return[ended].sum(dtype=np.float64)), count),
            "actor/episode_length": (float(answer.episode_length[ended].sum()), count),
            "actor/episodes": (count, 1.0),
        }
        return metrics | {f"time/{phase}_seconds": (spent, 1.0) for phase, spent in seconds.items()}

    def close(self) -> None:
        """Closes the envs."""
        self._env.close()


def _write(inputs: AgentInput, t: int, row: AgentInput) -> AgentInput:
    """Copies `row` `[b, ...]` to row t of `inputs` `[T+1, b, ...]`; returns that row of `inputs`."""
    to = jax.tree.map(lambda x: x[t], inputs)
    jax.tree.map(np.copyto, to, row)
    return to

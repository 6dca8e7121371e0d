"""One actor: a batch of host envs, stepped with an agent's actions, unroll by unroll."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxrl.envs.base import HostEnv
from flaxrl.envs.spec import env_action
from flaxrl.errors import TrainingError
from flaxrl.models.agent import agent_input
from flaxrl.trainers.rollout import no_legal_action
from flaxrl.trainers.setup import act_context
from flaxrl.types import LAST, AgentInput, Array, PyTree, Timestep, Trajectory


class Unrolled(NamedTuple):
    """What an actor hands over.

    Attributes:
        trajectory: numpy leaves `[T, b, ...]` of this actor's envs.
        metrics: totals and counts of the episodes that ended, and seconds spent per phase.
        updates: of the parameters that acted.
    """

    trajectory: Trajectory
    metrics: dict[str, tuple[float, float]]
    updates: int


class Act:
    """The jitted act of an agent, shared by all actors of a run."""

    def __init__(self, agent: Any, progress: Any):
        self.agent = agent
        self._progress = progress
        self.step = jax.jit(self._step)
        self.initial_carry = jax.jit(self._initial_carry, static_argnums=1)

    def _step(
        self, model: PyTree, inputs: AgentInput, carry: Any, ids: Array, updates: Array, key: Array, t: Array
    ) -> tuple[Array, Array | None, Array | None, Any]:
        context = act_context(ids, self._progress(updates))
        rngs = {"sample": jax.random.fold_in(key, t)}
        action, log_prob, output, carry = self.agent.apply(model, inputs, carry, context, rngs=rngs, method="act")
        return action, log_prob, output.value, carry

    def _initial_carry(self, model: PyTree, batch: int) -> Any:
        return self.agent.apply(model, batch, method="initial_carry")


class Actor:
    """Steps its envs with whatever parameters it is given; remembers timestep, carry and last action in between.

    Args:
        env: already made; this actor closes it.
        act: jitted act of the agent.
        env_ids: global ids of its envs, int32 `[b]`.
        unroll_length: T.
        seed: env i starts from `seed + i`.
    """

    def __init__(self, env: HostEnv, act: Act, env_ids: np.ndarray, unroll_length: int, seed: int):
        self._env, self._act, self._ids, self._length = env, act, env_ids, unroll_length
        self._timestep: Timestep = env.reset(seed)
        action = env.spec.action
        self._last_action = np.zeros((len(env_ids), *action.shape), action.dtype)
        self._carry: Any = None
        self._steps = 0

    def unroll(self, model: PyTree, updates: int, key: Array) -> Unrolled:
        """T steps of every env; the next unroll starts with the row that this one ends with.

        Args:
            model: Linen variables, on this actor's device.
            updates: of those parameters.
            key: of this unroll.
        """
        if self._carry is None:
            self._carry = self._act.initial_carry(model, len(self._ids))
        start = jax.tree.map(lambda x: np.array(x)[None], self._carry)
        inputs, answers, outs = [], [], []
        seconds = {"env": 0.0, "inference": 0.0}
        now = np.int32(updates)
        for t in range(self._length):
            began = time.perf_counter()
            row = self._input()
            action, log_prob, value, self._carry = self._act.step(
                model, row, self._carry, self._ids, now, key, np.int32(t)
            )
            self._last_action = np.asarray(action)  # the one wait for the device in a step
            acted = time.perf_counter()
            self._timestep = self._env.step(env_action(self._env.spec.action, self._last_action))
            self._steps += len(self._ids)
            seconds["inference"] += acted - began
            seconds["env"] += time.perf_counter() - acted
            inputs.append(row)
            outs.append((self._last_action, log_prob, value))
            answers.append(self._timestep.replace(observation=None, action_mask=None))
        inputs.append(self._input())
        actions, log_probs, values = zip(*jax.device_get(outs), strict=True)
        answer = jax.tree.map(lambda *x: np.stack(x), *answers)
        trajectory = Trajectory(
            inputs=jax.tree.map(lambda *x: np.stack(x), *inputs),
            action=np.stack(actions),
            reward=answer.reward,
            discount=answer.discount,
            log_prob=None if log_probs[0] is None else np.stack(log_probs),
            value=None if values[0] is None else np.stack(values),
            carry=start,
        )
        return Unrolled(trajectory, self._metrics(answer, seconds), updates)

    def _input(self) -> AgentInput:
        """What the agent sees of the last timestep; raises where no action is legal."""
        timestep = self._timestep
        if timestep.action_mask is not None:
            bad = ~np.any(timestep.action_mask, axis=-1) & (timestep.step_type != LAST)
            if bad.any():
                raise TrainingError(no_legal_action(int(self._ids[np.argmax(bad)]), self._steps))
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

"""What of a state's `variables` changes while a run learns: running statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flaxrl.configuration import LearnerSettings
from flaxrl.models.normalization import STATISTICS, Moments
from flaxrl.trainers.sharding import PER_ENV
from flaxrl.types import AgentInput, Array, Metrics, PyTree, TrainState, Trajectory

RETURNS = "returns"
"""Collection with the Moments of the discounted return."""


@dataclass(frozen=True)
class RewardScaling:
    """Rewards over the running deviation of the discounted return, so that targets have about the same size anywhere.

    Each env has a running G_t = r_t + discount * d_{t-1} * G_{t-1}, 0 before an episode's first reward, that goes on
    from trajectory to trajectory: row b has to be the same env each time. Rewards are not centred: that would change
    what is best. Engstrom et al., 2020, "Implementation Matters in Deep Policy Gradients", appendix A.1.

    The statistics see a trajectory before it is scaled (observations are learned from first, but no ratio of policies
    depends on rewards): the first trajectory is scaled by its own deviation. While all returns are equal nothing is.

    Attributes:
        discount: gamma of G.
        clip: scaled rewards are clipped to +- this; None leaves them.
    """

    discount: float
    clip: float | None

    def start(self, batch_size: int) -> PyTree:
        """The collections at the start of a run."""
        return {RETURNS: {"moments": Moments.start()}, PER_ENV: {"return": jnp.zeros(batch_size, jnp.float32)}}

    def __call__(self, variables: PyTree, trajectory: Trajectory) -> tuple[PyTree, Trajectory, Array]:
        """New variables, the trajectory with scaled rewards, the deviation; rewards that are not finite are left out.

        Args:
            variables: with the collections of `start`.
            trajectory: sanitized, `[T, B, ...]`.
        """
        finite = jnp.isfinite(trajectory.reward)

        def step(before: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            reward, discount, first = row
            here = reward + self.discount * jnp.where(first, 0.0, before)
            return discount * here, here

        rows = (jnp.where(finite, trajectory.reward, 0.0), trajectory.discount, trajectory.inputs.first[:-1])
        running, returns = jax.lax.scan(step, variables[PER_ENV]["return"], rows)
        moments = variables[RETURNS]["moments"].merged(returns, trajectory.mask & finite)
        deviation = _deviation(moments)
        reward = trajectory.reward / deviation
        if self.clip is not None:
            reward = jnp.clip(reward, -self.clip, self.clip)
        variables = {**variables, RETURNS: {"moments": moments}, PER_ENV: {"return": running}}
        return variables, trajectory.replace(reward=reward), deviation


def _deviation(moments: Moments) -> Array:
    """Deviation of the returns; 1 while they are all equal, which leaves rewards as they are."""
    # Equal numbers have a variance of rounding errors, about 1e-14 of their square.
    differ = moments.variance > 1e-10 * jnp.square(moments.mean)
    return jnp.where(differ, moments.deviation, 1.0)


@dataclass(frozen=True)
class Statistics:
    """The statistics of a run; without agent and scaling nothing changes.

    Attributes:
        agent: takes observations into its collection STATISTICS by `observe(inputs)`, where it has that collection.
        reward_scaling: None leaves rewards as they are.
    """

    agent: Any = None
    reward_scaling: RewardScaling | None = None

    @classmethod
    def of(cls, agent: Any, learner: LearnerSettings) -> Statistics:
        """Those of a run."""
        if learner.reward_scaling is None:
            return cls(agent)
        return cls(agent, RewardScaling(learner.reward_scaling, learner.reward_clip))

    def start(self, batch_size: int) -> PyTree:
        """Collections of a first state beside those of the agent."""
        return {} if self.reward_scaling is None else self.reward_scaling.start(batch_size)

    def scaled(self, state: TrainState, trajectory: Trajectory) -> tuple[TrainState, Trajectory, Metrics]:
        """Before an update: the state, the trajectory as the loss sees it, and metrics."""
        if self.reward_scaling is None:
            return state, trajectory, {}
        variables, trajectory, deviation = self.reward_scaling(state.variables, trajectory)
        return state.replace(variables=variables), trajectory, {"loss/return_deviation": deviation}

    def observed(self, state: TrainState, inputs: AgentInput) -> TrainState:
        """After an update's last minibatch: the state that has seen `inputs` `[T+1, B, ...]`.

        The last row is left out: the next trajectory begins with it.
        """
        if self.agent is None or STATISTICS not in state.variables:
            return state
        rows = jax.tree.map(lambda x: x[:-1], inputs)
        _, changed = self.agent.apply(state.variables, rows, method="observe", mutable=[STATISTICS])
        return state.replace(variables={**state.variables, **changed})

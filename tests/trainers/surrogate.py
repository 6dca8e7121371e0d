"""Two losses that a split of the loss itself would get wrong; one shuffles single steps, one gives priorities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from flaxrl.losses.base import Loss
from flaxrl.losses.returns import discounted_returns
from flaxrl.types import AgentInput, LossOutput, Trajectory, masked_mean


class Steps(struct.PyTreeNode):
    """What `Surrogate` learns from, leaves `[T, B, ...]`."""

    inputs: AgentInput
    action: Any
    log_prob: Any
    advantage: Any
    mask: Any
    carry: Any = ()


def normalized(x: Any, mask: Any) -> Any:
    """Mean 0 and variance 1 over the valid rows of the minibatch."""
    centred = x - masked_mean(x, mask)
    return centred / jnp.sqrt(masked_mean(jnp.square(centred), mask) + 1e-3)


@dataclass(frozen=True)
class Surrogate(Loss):
    """A clipped probability ratio times an advantage that is normalised over the minibatch; a value of the returns."""

    minibatch: ClassVar[str] = "steps"

    def prepare(self, unroll: Any, state: Any, trajectory: Trajectory) -> Steps:
        value = unroll(state.params, trajectory).value
        advantage = discounted_returns(trajectory, 0.9, value) - value[:-1]
        inputs = jax.tree.map(lambda x: x[:-1], trajectory.inputs)
        return Steps(inputs, trajectory.action, trajectory.log_prob, advantage, trajectory.mask)

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Steps, rngs: Any) -> Any:
        output = unroll(params, batch, rngs)
        log_rho = jnp.where(batch.mask, output.policy.log_prob(batch.action) - batch.log_prob, 0.0)
        ratio, advantage = jnp.exp(log_rho), normalized(batch.advantage, batch.mask)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        value = masked_mean(
            jnp.square(output.value - jax.lax.stop_gradient(output.value) - batch.advantage), batch.mask
        )
        return value - masked_mean(gain, batch.mask), LossOutput({"value": value, "valid": jnp.sum(batch.mask)})


@dataclass(frozen=True)
class Spread(Loss):
    """No mean over rows: the variance of the values over the whole minibatch; priorities of each sequence."""

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Trajectory, rngs: Any) -> Any:
        value = unroll(params, batch, rngs).value[:-1]
        spread = jnp.sqrt(masked_mean(jnp.square(value - masked_mean(value, batch.mask)), batch.mask) + 1e-3)
        errors = jnp.where(batch.mask, jnp.abs(value - batch.reward), 0.0)
        return spread + masked_mean(jnp.square(value - batch.reward), batch.mask), LossOutput(
            {"spread": spread}, jnp.max(errors, axis=0)
        )

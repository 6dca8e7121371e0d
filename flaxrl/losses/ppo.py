"""Clipped proximal policy optimisation (Schulman et al., 2017, https://arxiv.org/abs/1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from flaxrl import checks
from flaxrl.errors import ConfigError
from flaxrl.losses.base import MINIBATCHES, Loss, Unroll, with_values
from flaxrl.losses.returns import explained_variance, generalized_advantages
from flaxrl.types import AgentInput, Array, Carry, LossOutput, Metrics, Params, TrainState, Trajectory, masked_mean


class PPOBatch(struct.PyTreeNode):
    """What PPO learns from; every leaf but `carry` is `[T, B, ...]`, without the bootstrap row.

    Attributes:
        inputs: as the acting policy saw them.
        action: as sampled, not as an env clipped it.
        log_prob: float32, of the acting policy.
        value: float32, before the update.
        advantage: float32, generalized advantage, not normalised.
        mask: bool, False on LAST rows.
        carry: recurrent state before `inputs[0]`, leaves `[1, B, ...]`.
    """

    inputs: AgentInput
    action: Array
    log_prob: Array
    value: Array
    advantage: Array
    mask: Array
    carry: Carry = ()


@dataclass(frozen=True)
class PPO(Loss):
    """Clipped surrogate, squared error of the value, entropy bonus.

    policy + value_cost * value - entropy_cost * entropy + kl_cost * kl, every mean over the valid rows of the whole
    minibatch:

        policy = -mean(min(ratio * A, clip(ratio, 1 - clip, 1 + clip) * A))        (equation 7)
        value  = 0.5 * mean(max((v - R)^2, (V + clip(v - V, -value_clip, value_clip) - R)^2))
        kl     = mean(ratio - 1 - log ratio)                                       (of the acting policy from this one)

    with ratio = pi(a) / mu(a), A the generalized advantage, V the value before the update, R = V + A.

    Attributes:
        discount: gamma.
        lambda_: mixes towards one-step advantages below 1.
        clip: bound of |ratio - 1| beyond which the surrogate is flat.
        clip_final: `clip` at the run's end, linear in between; None keeps it.
        value_clip: bound of a value's change that the value loss pays for; None for the plain squared error.
        value_cost: weight of the value loss (which has a factor 0.5 of its own).
        entropy_cost: weight of the entropy bonus.
        entropy_cost_final: `entropy_cost` at the run's end, linear in between; None keeps it.
        kl_cost: weight of the penalty on the KL divergence.
        target_kl: once an epoch's mean KL divergence exceeds it, the trajectory's remaining epochs are skipped; None
            never skips.
        normalize_advantage: to mean 0 and deviation 1 over the minibatch; equal advantages (or one) are left alone.
        max_abs_reward: rewards are clipped to +- this; None leaves them.
        minibatch: 'steps' shuffles single rows; 'sequences' whole unrolls, which recurrent agents need.
    """

    discount: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    clip_final: float | None = None
    value_clip: float | None = 0.2
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    entropy_cost_final: float | None = None
    kl_cost: float = 0.0
    target_kl: float | None = None
    normalize_advantage: bool = True
    max_abs_reward: float | None = None
    minibatch: str = "steps"  # type: ignore[misc]  # fixed for other losses, a choice here

    def __post_init__(self) -> None:
        checks.in_range(self, "discount", "lambda_", low=0, high=1)
        checks.positive(self, "clip", "clip_final", "value_clip", "target_kl", "max_abs_reward")
        checks.non_negative(self, "value_cost", "entropy_cost", "entropy_cost_final", "kl_cost")
        checks.choice(self, "minibatch", MINIBATCHES)

    def at(self, progress: Array) -> PPO:
        """See Loss."""
        moving = {
            name: getattr(self, name) + (final - getattr(self, name)) * jnp.clip(progress, 0.0, 1.0)
            for name in ("clip", "entropy_cost")
            if (final := getattr(self, f"{name}_final")) is not None
        }
        return with_values(self, **moving)

    def stop(self, metrics: Metrics) -> Array | None:
        """See Loss."""
        return None if self.target_kl is None else metrics["kl_behaviour"] > self.target_kl

    def check_epochs(self, epochs: int) -> None:
        """See Loss."""
        if self.target_kl is not None and epochs == 1:
            raise ConfigError(
                f"PPO.target_kl = {self.target_kl} ends a trajectory's remaining epochs, and learner.epochs = 1 leaves "
                "none; nearest: learner.epochs = 2, or target_kl = None"
            )

    def prepare(self, unroll: Unroll, state: TrainState, trajectory: Trajectory) -> PPOBatch:
        """Advantages by the values from acting; rows that nobody acted on (LAST, the bootstrap row) are valued now."""
        values = unroll(state.params, trajectory).value
        if trajectory.log_prob is None or values is None:
            raise ConfigError("PPO needs the acting policy's log_prob and a head with a value: use policy_value")
        mask = trajectory.mask
        if trajectory.value is not None:
            values = values.at[:-1].set(jnp.where(mask, trajectory.value, values[:-1]))
        reward = trajectory.reward
        if self.max_abs_reward is not None:
            reward = jnp.clip(reward, -self.max_abs_reward, self.max_abs_reward)
        advantage = generalized_advantages(
            reward, self.discount * trajectory.discount, trajectory.continues, values, self.lambda_
        )
        return PPOBatch(
            inputs=jax.tree.map(lambda x: x[:-1], trajectory.inputs),
            action=trajectory.action,
            log_prob=trajectory.log_prob,
            value=values[:-1],
            advantage=advantage,
            mask=mask,
            carry=trajectory.carry,
        )

    def __call__(
        self, unroll: Unroll, params: Params, target_params: Params | None, batch: PPOBatch, rngs: dict[str, Array]
    ) -> tuple[Array, LossOutput]:
        """See Loss."""
        del target_params
        output, mask = unroll(params, batch, rngs), batch.mask
        assert output.value is not None  # `prepare` refuses a head without one
        policy = output.policy
        log_ratio = jnp.where(mask, policy.log_prob(batch.action) - batch.log_prob, 0.0)
        # Bounded by e^20, far beyond any clip, so that it stays finite (inf * 0 is NaN).
        ratio = jnp.exp(jnp.minimum(log_ratio, 20.0))
        advantage = normalized(batch.advantage, mask) if self.normalize_advantage else batch.advantage
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - self.clip, 1 + self.clip) * advantage)
        policy_loss = -masked_mean(surrogate, mask)
        value_loss = masked_mean(self._value_error(output.value, batch), mask)
        entropy = masked_mean(policy.entropy(), mask)
        kl = masked_mean(ratio - 1 - log_ratio, mask)
        bonus = self.entropy_cost * entropy
        total = policy_loss + self.value_cost * value_loss - bonus + self.kl_cost * kl
        deviation = jnp.abs(ratio - 1)
        metrics = {
            "total": total,
            "policy": policy_loss,
            "value": self.value_cost * value_loss,
            "entropy_bonus": -bonus,
            "entropy": entropy,
            "explained_variance": explained_variance(batch.value + batch.advantage, batch.value, mask),
            "clip_fraction": masked_mean((deviation > self.clip).astype(jnp.float32), mask),
            "clip_range": self.clip,
            "kl_behaviour": kl,
            "first_ratio_deviation": jnp.max(jnp.where(mask, deviation, 0.0)),
        }
        return total, LossOutput(metrics)

    def _value_error(self, value: Array, batch: PPOBatch) -> Array:
        """Half the squared error of each row, or of its clipped value where that is larger."""
        target = batch.value + batch.advantage
        error = jnp.square(value - target)
        if self.value_clip is not None:
            near = batch.value + jnp.clip(value - batch.value, -self.value_clip, self.value_clip)
            error = jnp.maximum(error, jnp.square(near - target))
        return 0.5 * error


def normalized(advantage: Array, mask: Array) -> Array:
    """(A - mean) / deviation over valid rows of the whole batch; as it is where they are all equal (or one).

    Args:
        advantage: float `[T, B]`.
        mask: bool `[T, B]`.
    """
    mean = masked_mean(advantage, mask)
    variance = masked_mean(jnp.square(advantage - mean), mask)
    # Equal numbers have a variance of rounding errors, about 1e-14 of their square.
    differ = variance > 1e-10 * jnp.square(mean)
    return jnp.where(differ, (advantage - mean) / (jnp.sqrt(variance) + 1e-8), advantage)

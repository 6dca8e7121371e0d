"""V-trace actor-critic, the loss of IMPALA (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from flaxrl import checks
from flaxrl.errors import ConfigError
from flaxrl.losses.base import Loss, Unroll
from flaxrl.losses.returns import explained_variance
from flaxrl.types import Array, LossOutput, Params, Trajectory, masked_mean


class VTraceReturns(NamedTuple):
    """`target` and `advantage`, float32 `[T, B]`; rows that the episode rule masks hold unused numbers."""

    target: Array
    advantage: Array


def vtrace_returns(
    log_rho: Array,
    reward: Array,
    discount: Array,
    continues: Array,
    value: Array,
    *,
    lambda_: float = 1.0,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
) -> VTraceReturns:
    """V-trace targets and policy-gradient advantages over a batch that may hold several episodes back to back.

    v_t = V_t + delta_t + gamma_t c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + gamma_t V_{t+1} - V_t), the last term
    cut where row t+1 ends an episode; advantage rho'_t (r_t + gamma_t v_{t+1} - V_t) with V_{t+1} for v_{t+1} at a cut.

    Espeholt et al., 2018, equation 1 and section 4.2; lambda enters c alone (remark 2).

    Args:
        log_rho: float `[T, B]`, log of pi(a|x) / mu(a|x); 0 on masked rows.
        reward: float `[T, B]`.
        discount: float `[T, B]`, gamma times the env's discount.
        continues: float `[T, B]`, 0 where row t+1 is LAST.
        value: float `[T+1, B]`, V of every row.
        lambda_: mixes towards one-step targets below 1.
        clip_rho: bound of rho in delta; None for none.
        clip_c: bound of c; None for none.
        clip_pg_rho: bound of rho in the advantage; None for none.

    Returns:
        VTraceReturns; no gradient flows through them.
    """
    chex.assert_rank([log_rho, reward, discount, continues, value], 2)
    chex.assert_equal_shape([log_rho, reward, discount, continues, value[1:]])

    def clipped(x: Array, bound: float | None) -> Array:
        return x if bound is None else jnp.minimum(x, bound)

    ratio = _ratio(log_rho)
    c = lambda_ * clipped(ratio, clip_c)
    delta = clipped(ratio, clip_rho) * (reward + discount * value[1:] - value[:-1])

    def step(error_t: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta_t, decay_t = row
        error = delta_t + decay_t * error_t
        return error, error

    rows = (delta, discount * continues * c)
    errors = jax.lax.scan(step, jnp.zeros_like(delta[0]), rows, reverse=True)[1]
    error_next = jnp.concatenate([errors[1:], jnp.zeros_like(errors[:1])])
    target_next = value[1:] + continues * error_next
    advantage = clipped(ratio, clip_pg_rho) * (reward + discount * target_next - value[:-1])
    return VTraceReturns(*jax.lax.stop_gradient((value[:-1] + errors, advantage)))


def _ratio(log_rho: Array) -> Array:
    """exp(log_rho), bounded by e^20 so that it stays finite where it is not clipped (inf * 0 is NaN)."""
    return jnp.exp(jnp.minimum(log_rho, 20.0))


@dataclass(frozen=True)
class VTrace(Loss):
    """Policy gradient with V-trace advantages, squared error to V-trace targets, entropy bonus.

    policy + baseline_cost * 0.5 * mean((v - V)^2) - entropy_cost * entropy; every mean is over valid rows of the whole
    batch (the paper sums: multiply its learning rate by T x B to compare).

    Attributes:
        discount: gamma.
        baseline_cost: weight of the value loss.
        entropy_cost: weight of the entropy bonus.
        max_abs_reward: rewards are clipped to +- this; None leaves them.
        lambda_: mixes towards one-step targets below 1.
        clip_rho: bound of the importance weight in the value error; None for none.
        clip_c: bound of the trace coefficient; None for none.
        clip_pg_rho: bound of the importance weight in the policy gradient; None for none.
    """

    discount: float = 0.99
    baseline_cost: float = 0.5
    entropy_cost: float = 0.01
    max_abs_reward: float | None = None
    lambda_: float = 1.0
    clip_rho: float | None = 1.0
    clip_c: float | None = 1.0
    clip_pg_rho: float | None = 1.0

    def __post_init__(self) -> None:
        checks.in_range(self, "discount", "lambda_", low=0, high=1)
        checks.non_negative(self, "baseline_cost", "entropy_cost")
        checks.positive(self, "max_abs_reward", "clip_rho", "clip_c", "clip_pg_rho")
        if (self.clip_rho or math.inf) < (self.clip_c or math.inf):
            raise ConfigError(
                f"VTrace.clip_c = {self.clip_c} must be <= clip_rho = {self.clip_rho} (Espeholt et al., 2018, section "
                f"4.1); nearest: clip_c = {self.clip_rho}"
            )

    def __call__(
        self, unroll: Unroll, params: Params, target_params: Params | None, batch: Trajectory, rngs: dict[str, Array]
    ) -> tuple[Array, LossOutput]:
        """See Loss. The batch is a Trajectory with `log_prob` of the acting policy."""
        del target_params
        output = unroll(params, batch, rngs)
        if batch.log_prob is None or output.value is None:
            raise ConfigError("V-trace needs the acting policy's log_prob and a head with a value: use policy_value")
        policy, mask = output[:-1].policy, batch.mask
        log_prob = policy.log_prob(batch.action)
        log_rho = jnp.where(mask, log_prob - batch.log_prob, 0.0)
        reward = batch.reward
        if self.max_abs_reward is not None:
            reward = jnp.clip(reward, -self.max_abs_reward, self.max_abs_reward)
        value = output.value
        returns = vtrace_returns(
            jax.lax.stop_gradient(log_rho),
            reward,
            self.discount * batch.discount,
            batch.continues,
            jax.lax.stop_gradient(value),
            lambda_=self.lambda_,
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            clip_pg_rho=self.clip_pg_rho,
        )
        policy_loss = -masked_mean(log_prob * returns.advantage, mask)
        baseline_loss = 0.5 * masked_mean(jnp.square(returns.target - value[:-1]), mask)
        entropy = masked_mean(policy.entropy(), mask)
        total = policy_loss + self.baseline_cost * baseline_loss - self.entropy_cost * entropy
        metrics = {
            "total": total,
            "policy": policy_loss,
            "baseline": self.baseline_cost * baseline_loss,
            "entropy_bonus": -self.entropy_cost * entropy,
            "entropy": entropy,
            "explained_variance": explained_variance(returns.target, value[:-1], mask),
        }
        return total, LossOutput(metrics | self._off_policy_metrics(log_rho, mask))

    def _off_policy_metrics(self, log_rho: Array, mask: Array) -> dict[str, Array]:
        """How far the acting policy is from the current one; KL by the estimator E_mu[rho - 1 - log rho] >= 0."""
        rho = _ratio(log_rho)
        bound = jnp.inf if self.clip_rho is None else self.clip_rho
        return {
            "rho_mean": masked_mean(rho, mask),
            "rho_clipped": masked_mean((rho > bound).astype(jnp.float32), mask),
            "kl_behaviour": masked_mean(rho - 1 - log_rho, mask),
        }

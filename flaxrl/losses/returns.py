"""Targets that several losses share; all read the episode rule from `trajectory`."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from flaxrl.types import Array, Trajectory, masked_mean


def discounted_returns(trajectory: Trajectory, discount: float, bootstrap: Array | None = None) -> Array:
    """Sum of discounted rewards to the end of the episode or of the unroll.

    G_t = r_t + gamma * d_t * (G_{t+1} inside an episode, b_{t+1} where it is cut).

    Args:
        trajectory: rewards `[T, B]`; sanitized, as losses get it (0 * NaN is NaN).
        discount: gamma.
        bootstrap: float `[T+1, B]` values that stand in for what comes after a cut (a truncation, the unroll's end);
            None takes 0, so the returns are those of the rewards seen.

    Returns:
        float32 `[T, B]`.
    """
    reward = jnp.asarray(trajectory.reward, jnp.float32)
    chex.assert_rank(reward, 2)
    cut = jnp.zeros((reward.shape[0] + 1, reward.shape[1])) if bootstrap is None else bootstrap

    def step(after: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        r, d, c, b = row
        here = r + discount * d * (c * after + (1 - c) * b)
        return here, here

    rows = (reward, trajectory.discount, trajectory.continues, cut[1:])
    return jax.lax.scan(step, cut[-1], rows, reverse=True)[1]


def generalized_advantages(reward: Array, discount: Array, continues: Array, value: Array, lambda_: float) -> Array:
    """Generalized advantage estimation over a batch that may hold several episodes back to back.

    A_t = delta_t + lambda gamma_t A_{t+1}, delta_t = r_t + gamma_t V_{t+1} - V_t, the first term cut where row t+1 ends
    an episode, whose V_{t+1} is that of the final observation: 0 by `discount` where it terminated.

    Schulman et al., 2016 (https://arxiv.org/abs/1506.02438), equations 11 to 16.

    Args:
        reward: float `[T, B]`.
        discount: float `[T, B]`, gamma times the env's discount.
        continues: float `[T, B]`, 0 where row t+1 is LAST.
        value: float `[T+1, B]`, V of every row.
        lambda_: mixes towards one-step advantages below 1.

    Returns:
        float32 `[T, B]`; rows that the episode rule masks hold unused numbers.
    """
    chex.assert_rank([reward, discount, continues, value], 2)
    chex.assert_equal_shape([reward, discount, continues, value[1:]])
    delta = reward + discount * value[1:] - value[:-1]

    def step(after: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta_t, decay_t = row
        advantage = delta_t + decay_t * after
        return advantage, advantage

    rows = (delta, lambda_ * discount * continues)
    return jax.lax.scan(step, jnp.zeros_like(delta[0]), rows, reverse=True)[1]


def explained_variance(target: Array, value: Array, mask: Array) -> Array:
    """1 - Var(target - value) / Var(target) over valid rows: 1 perfect, 0 no better than a constant; 0 if no variance.

    Args:
        target: float `[T, B]`.
        value: float `[T, B]`.
        mask: bool `[T, B]`.
    """

    chex.assert_equal_shape([target, value, mask])

    def variance(x: Array) -> Array:
        return masked_mean(jnp.square(x - masked_mean(x, mask)), mask)

    total = variance(target)
    return jnp.where(total > 1e-8, 1 - variance(target - value) / jnp.maximum(total, 1e-8), 0.0)

"""REINFORCE: a loss of one's own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

import flaxrl
from flaxrl import checks
from flaxrl.types import Array, Params


@dataclasses.dataclass(frozen=True)
class Reinforce(flaxrl.Loss):
    """Policy gradient with the returns seen (Williams, 1992, https://doi.org/10.1007/BF00992696).

    -mean(log pi(a|x) (G - mean(G))) - entropy_cost * entropy, G the discounted return to the end of the episode or of
    the unroll; its mean over the batch is the baseline.

    Attributes:
        discount: gamma.
        entropy_cost: weight of the entropy bonus.
    """

    discount: float = 0.99
    entropy_cost: float = 0.01

    def __post_init__(self) -> None:
        checks.in_range(self, "discount", low=0, high=1)
        checks.non_negative(self, "entropy_cost")

    def __call__(
        self,
        unroll: flaxrl.Unroll,
        params: Params,
        target_params: Params | None,
        batch: flaxrl.Trajectory,
        rngs: dict[str, Array],
    ) -> tuple[Array, flaxrl.LossOutput]:
        """See flaxrl.Loss; the batch is a Trajectory `[T, B, ...]`."""
        policy = unroll(params, batch, rngs)[:-1].policy
        returns = flaxrl.losses.discounted_returns(batch, self.discount)
        advantage = returns - flaxrl.masked_mean(returns, batch.mask)
        policy_loss = -flaxrl.masked_mean(policy.log_prob(batch.action) * advantage, batch.mask)
        entropy = flaxrl.masked_mean(policy.entropy(), batch.mask)
        metrics = {"policy": policy_loss, "entropy": entropy, "return": flaxrl.masked_mean(returns, batch.mask)}
        return jnp.asarray(policy_loss - self.entropy_cost * entropy), flaxrl.LossOutput(metrics)

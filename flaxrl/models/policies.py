"""Policies: how an agent explores. Each is a small Linen module: Output -> action; greedy where no key is given."""

from __future__ import annotations

import flax.linen as nn
import jax

from flaxrl.types import ActContext, Array, Output


def row_keys(key: Array, env_ids: Array) -> Array:
    """One key an env, `[B]`: what an env draws depends neither on its batch nor on its device."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, env_ids)


class Sampled(nn.Module):
    """Samples from the head's distribution where `rngs={'sample': key}` is given, else takes its mode."""

    def __call__(self, output: Output, context: ActContext) -> tuple[Array, Array]:
        """Chooses actions.

        Args:
            output: of `[B, ...]` rows, with a policy.
            context: env ids `[B]`.

        Returns:
            Actions `[B, ...]` and their float32 log-probabilities `[B]`.
        """
        policy = output.policy
        if self.has_rng("sample"):
            make_policy = output.make_policy
            assert make_policy is not None
            keys = row_keys(self.make_rng("sample"), context.env_ids)
            action = jax.vmap(lambda p, k: make_policy(p).sample(seed=k))(output.policy_params, keys)
        else:
            action = policy.mode()
        # Else a compiler may take the density of an action that it has not yet rounded to what is stored.
        action = jax.lax.optimization_barrier(action)
        return action, policy.log_prob(action)

"""A torso of one's own: any Linen module that maps observations `[N, ...]` to features `[N, F]`."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from flaxrl.types import Array


class WideAndDeep(nn.Module):
    """The observation itself beside a hidden layer of it (Cheng et al., 2016, https://arxiv.org/abs/1606.07792).

    Attributes:
        hidden: size of the layer.
    """

    hidden: int = 16

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, F + hidden]` of vectors `[N, F]`."""
        deep = nn.relu(nn.Dense(self.hidden)(observation))
        return jnp.concatenate([observation, deep], axis=-1)

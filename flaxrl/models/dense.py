"""A dense layer whose gradients add up in float32 whatever it computes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from flaxrl.types import Array


def add_bias(y: Array, bias: Array) -> Array:
    """y + bias over the last axis, of y's dtype.

    The bias's gradient is a sum over all rows, which half precision would stop adding to after some hundred of them:
    it is taken in float32.

    Args:
        y: `[..., F]`.
        bias: float32 `[F]`.
    """
    return (y.astype(jnp.float32) + bias.reshape((1,) * (y.ndim - 1) + (-1,))).astype(y.dtype)


class Dense(nn.Module):
    """`nn.Dense` with the same parameters (`kernel` `[C, F]`, `bias` `[F]`) and values.

    Attributes:
        features: output features F.
        kernel_init: initialiser of the kernel.
        bias_init: initialiser of the bias.
        dtype: computation dtype; parameters are float32.
    """

    features: int
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Array] = nn.initializers.zeros_init()
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """`[..., F]` of the computation dtype, for `x` `[..., C]`."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        return add_bias(x.astype(self.dtype) @ kernel.astype(self.dtype), bias)

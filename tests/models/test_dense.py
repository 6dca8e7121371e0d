"""Dense against flax's own, and the sums of its gradient in half precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from flaxrl.models.dense import Dense

KEY = jax.random.key(0)


def gradient(module: Any, variables: Any, x: Any) -> Any:
    return jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, x).astype(jnp.float32) ** 2)))(variables)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3)])
def test_it_is_that_of_flax(shape: tuple[int, ...]) -> None:
    x = jax.random.normal(KEY, shape)
    ours, flax = (layer(4, bias_init=nn.initializers.normal()) for layer in (Dense, nn.Dense))
    variables = flax.init(KEY, x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(KEY, x), variables)
    np.testing.assert_array_equal(ours.apply(variables, x), flax.apply(variables, x))
    jax.tree.map(np.testing.assert_array_equal, gradient(ours, variables, x), gradient(flax, variables, x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_its_gradient_is_added_up_in_float32(dtype: str) -> None:
    x = jnp.ones((5000, 1))
    layer = Dense(1, dtype=dtype)
    variables = {"params": {"kernel": jnp.ones((1, 1)), "bias": jnp.zeros(1)}}
    grads = jax.jit(jax.grad(lambda v: jnp.sum(jnp.asarray(layer.apply(v, x), jnp.float32))))(variables)
    assert grads["params"]["bias"].tolist() == [5000]  # bfloat16 stays at 256
    assert abs(grads["params"]["kernel"].item() - 5000) < 20

"""Dtypes of what a pure env carries from step to step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxrl.types import Array


def strong(x: Any, dtype: Any = None) -> Array:
    """An array of one dtype, never weakly typed: a carry that changes type between calls compiles anew.

    Args:
        x: array or Python number.
        dtype: what it becomes; None keeps its own, and PRNG keys stay what they are.
    """
    x = jnp.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.convert_element_type(x, x.dtype if dtype is None else dtype)

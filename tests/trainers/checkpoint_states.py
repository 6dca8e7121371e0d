"""Small train states for the checkpoint tests; their parameters all hold one number, the step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxrl.trainers.checkpoint import Checkpointer
from flaxrl.types import TrainState

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_state(
    fill: float = 1.0,
    hidden: tuple[int, ...] = (8, 8),
    tx: optax.GradientTransformation = ADAM,
    dtype: Any = jnp.float32,
    target: bool = True,
) -> TrainState:
    sizes = (4, *hidden, 2)
    params = {
        f"Dense_{i}": {"kernel": jnp.full((n, m), fill, dtype), "bias": jnp.full((m,), fill, dtype)}
        for i, (n, m) in enumerate(itertools.pairwise(sizes))
    }
    return TrainState.init(apply_fn, {"params": params}, tx, target)


def apply_fn() -> None: ...


def save_steps(directory: Path, *steps: int, keep: int = 10) -> None:
    """Saves states whose parameters all hold the step number."""
    checkpointer = Checkpointer(directory, keep=keep)
    for step in steps:
        checkpointer.save(step, make_state(step), None, {"steps": step})
    checkpointer.close()


def restored_step(directory: Path, which: str = "latest") -> int | None:
    """Restores, checks that values and meta are those of the step, and returns it."""
    checkpointer = Checkpointer(directory, keep=10)
    try:
        restored = checkpointer.restore(make_state(), None, which)
    finally:
        checkpointer.close()
    if restored is None:
        return None
    assert_equal(restored.state, make_state(restored.step))
    assert restored.meta == {"steps": restored.step}
    return restored.step


def assert_equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)

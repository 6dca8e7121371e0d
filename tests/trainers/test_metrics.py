"""Metrics between logs: pairs, weights, means; nothing compiles anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from learner_setups import compilations

from flaxrl.trainers import metrics as module
from flaxrl.trainers.metrics import MetricsBuffer, as_pairs, summed, weighted


def test_pairs_weigh_by_what_was_seen():
    buffer = MetricsBuffer()
    buffer.add({"r": (jnp.float32(10.0), jnp.int32(1)), "x": jnp.float32(1.0)})
    buffer.add({"r": (jnp.float32(2.0), jnp.int32(3)), "x": jnp.float32(2.0)})
    assert buffer.read() == {"r": 3.0, "x": 1.5}  # (10 + 2) / 4, not (10 + 2 / 3) / 2


def test_what_counted_nothing_is_left_out():
    buffer = MetricsBuffer()
    buffer.add({"r": (jnp.float32(0.0), jnp.int32(0)), "host": (0.0, 0.0), "x": 1.0})
    assert buffer.read() == {"x": 1.0}


def test_read_starts_anew():
    buffer = MetricsBuffer()
    buffer.add({"x": jnp.float32(5.0), "host": 7.0})
    assert buffer.read() == {"host": 7.0, "x": 5.0}
    assert buffer.read() == {}
    buffer.add({"x": jnp.float32(1.0)})
    assert buffer.read() == {"x": 1.0}


def test_host_numbers_stay_exact_and_off_the_device():
    buffer = MetricsBuffer()
    with jax.transfer_guard("disallow"):
        buffer.add({"seconds": 2.0**25 + 1.0, "n": (3, 2), "numpy": np.float64(0.5)})
        buffer.add({"seconds": 2.0**25 + 1.0, "n": (1, 2), "numpy": np.float64(1.5)})
    assert buffer.read() == {"seconds": 2.0**25 + 1.0, "n": 1.0, "numpy": 1.0}


def test_weighted_drops_what_is_not_finite():
    got = weighted({"a": (jnp.float32(jnp.nan), 4.0), "b": jnp.float32(jnp.inf)}, jnp.float32(0.0))
    assert jax.tree.map(float, got) == {"a": (0.0, 0.0), "b": (0.0, 0.0)}
    kept = weighted({"a": (jnp.float32(6.0), 4.0)}, jnp.float32(1.0))
    assert jax.tree.map(float, kept) == {"a": (6.0, 4.0)}


def test_summed_adds_the_leading_axis():
    pairs = as_pairs({"a": (jnp.array([1.0, 2.0]), jnp.array([1, 3]))})
    assert jax.tree.map(float, summed(pairs)) == {"a": (3.0, 4.0)}


def test_pairs_are_strong_float32():
    pairs = as_pairs({"a": 1, "b": (jnp.bfloat16(2.0), jnp.int32(3)), "c": jnp.float32(1.0) * 2})
    for leaf in jax.tree.leaves(pairs):
        assert leaf.dtype == jnp.float32 and not leaf.weak_type


def test_nothing_compiles_after_the_second_add():
    buffer = MetricsBuffer()
    step = jax.jit(lambda x: {"a": (x, x + 1), "b": x})
    sizes = []
    for i in range(6):
        buffer.add(as_pairs(step(jnp.float32(i))) | {"host": float(i)})
        sizes.append(compilations(module._add))
        if i == 3:
            assert buffer.read()["b"] == 1.5
    assert sizes[2:] == [sizes[2]] * 4

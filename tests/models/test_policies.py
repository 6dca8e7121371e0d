"""Sampling: its frequencies, masks, and each env's own randomness."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.models.heads import categorical, mask_logits
from flaxrl.models.policies import Sampled, row_keys
from flaxrl.types import ActContext, Output


def act(logits: Any, env_ids: Any, key: Any = None) -> Any:
    output = Output(policy_params=logits, make_policy=categorical)
    context = ActContext(env_ids=jnp.asarray(env_ids, jnp.int32), progress=jnp.float32(0))
    rngs = None if key is None else {"sample": key}
    return jax.jit(lambda o: Sampled().apply({}, o, context, rngs=rngs))(output)


def test_sampled_frequencies_and_masks():
    """10,000 rows that differ in nothing but their env: the distribution's frequencies, and nothing illegal."""
    logits = mask_logits(jnp.log(jnp.array([0.1, 0.2, 0.5, 0.7])), jnp.array([True, True, False, True]))
    action, log_prob = act(jnp.broadcast_to(logits, (10_000, 4)), np.arange(10_000), jax.random.key(1))
    frequency = np.bincount(action, minlength=4) / 10_000
    assert frequency[2] == 0
    np.testing.assert_allclose(frequency, [0.1, 0.2, 0, 0.7], atol=0.02)  # four standard deviations
    np.testing.assert_allclose(np.exp(log_prob), np.array([0.1, 0.2, 0, 0.7])[action], rtol=1e-5)


def test_greedy_without_a_key():
    action, log_prob = act(jnp.log(jnp.array([[0.2, 0.8], [0.6, 0.4]])), [0, 1])
    assert action.tolist() == [1, 0]
    np.testing.assert_allclose(np.exp(log_prob), [0.8, 0.6], rtol=1e-6)


def test_an_envs_draw_depends_on_its_id_alone():
    """Neither on the batch it is in, nor on its place there."""
    logits = jnp.zeros((64, 50))
    ids = np.arange(64) + 7
    whole, _ = act(logits, ids, jax.random.key(2))
    half, _ = act(logits[:32], ids[16:48], jax.random.key(2))
    np.testing.assert_array_equal(half, whole[16:48])
    backwards, _ = act(logits, ids[::-1], jax.random.key(2))
    np.testing.assert_array_equal(backwards, whole[::-1])
    assert len(set(whole.tolist())) > 16  # envs differ: 64 draws of 50 numbers
    other, _ = act(logits, ids, jax.random.key(3))
    assert (other != whole).mean() > 0.5


def test_row_keys():
    keys = row_keys(jax.random.key(0), jnp.array([3, 1, 3]))
    data = jax.random.key_data(keys)
    assert keys.shape == (3,)
    np.testing.assert_array_equal(data[0], data[2])
    np.testing.assert_array_equal(data[1], jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1)))

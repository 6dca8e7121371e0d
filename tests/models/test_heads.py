"""Masked categorical policies (values and gradients) and the policy-value head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import close, vector, vectors

from flaxrl.envs.spec import Box, Discrete
from flaxrl.errors import ConfigError
from flaxrl.models.heads import PolicyValue, categorical, mask_logits


def policy_of(logits: Any, mask: Any) -> Any:
    return categorical(mask_logits(jnp.asarray(logits, jnp.float32), None if mask is None else jnp.asarray(mask)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("v", vectors("masked_categorical"))
def test_golden_values_and_gradients(v, jit):
    mask, action, expected = v["inputs"]["mask"], v["inputs"]["action"], v["expected"]
    wrap = jax.jit if jit else lambda f: f

    def entropy(x: Any) -> Any:
        return policy_of(x, mask).entropy()

    def log_prob(x: Any) -> Any:
        return policy_of(x, mask).log_prob(action)

    logits = jnp.asarray(v["inputs"]["logits"])
    close(wrap(lambda x: policy_of(x, mask).probs)(logits), expected["probs"], v)
    for f, name in ((entropy, "entropy"), (log_prob, "log_prob")):
        value, grad = wrap(jax.value_and_grad(f))(logits)
        close(value, expected[name], v)
        close(grad, expected[f"grad_{name}"], v)
    assert wrap(lambda x: policy_of(x, mask).mode())(logits) == expected["greedy_action"]


def test_one_legal_action_is_certain():
    """Exactly: entropy 0, log-probability 0, no gradient."""
    logits, mask = jnp.array([-3.0, 8.0, 8.0]), [1, 0, 0]
    f = jax.value_and_grad(lambda x: policy_of(x, mask).entropy() + policy_of(x, mask).log_prob(0))
    value, grad = f(logits)
    assert value == 0 and grad.tolist() == [0, 0, 0]


def test_golden_kl():
    v = vector("kl_masked")
    p, q, mask = (v["inputs"][k] for k in ("logits_p", "logits_q", "mask"))

    def kl(p: Any, q: Any) -> Any:
        return policy_of(p, mask).kl_divergence(policy_of(q, mask))

    p, q = jnp.asarray(p), jnp.asarray(q)
    value, grads = jax.value_and_grad(kl, argnums=(0, 1))(p, q)
    close(value, v["expected"]["kl_p_q"], v)
    close(kl(p, p), v["expected"]["kl_p_p"], v)
    assert np.isfinite(grads).all() and grads[0][2] == grads[1][2] == 0


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32])
def test_a_row_without_a_legal_action_counts_as_all_legal(dtype):
    logits = jnp.array([[1.0, 2.0, 0.5]] * 2)
    mask = np.array([[0, 0, 0], [1, 1, 0]], dtype)

    def f(x: Any) -> Any:
        policy = policy_of(x, mask)
        return jnp.sum(policy.entropy()) + jnp.sum(policy.log_prob(jnp.array([2, 1])))

    np.testing.assert_array_equal(policy_of(logits, mask).probs[0], policy_of(logits, None).probs[0])
    assert policy_of(logits, mask).probs[1, 2] == 0
    value, grad = jax.jit(jax.value_and_grad(f))(logits)
    assert np.isfinite(value) and np.isfinite(grad).all() and grad[0, 2] != 0 and grad[1, 2] == 0


def test_illegal_actions_are_never_sampled():
    policy = policy_of([1.0, 50.0, 2.0, 50.0], [1, 0, 1, 0])
    drawn = policy.sample(seed=jax.random.key(0), sample_shape=(10_000,))
    counts = np.bincount(drawn, minlength=4)
    assert counts[1] == counts[3] == 0
    np.testing.assert_allclose(counts[0] / 10_000, 1 / (1 + np.e), atol=0.02)


def test_any_legal_logit_beats_an_illegal_one():
    """A large negative number in place of -inf would lose to this one."""
    policy = policy_of([-1e30, 5.0], [1, 0])
    assert policy.mode() == 0 and policy.log_prob(0) == 0 and policy.probs.tolist() == [1, 0]
    assert not policy.sample(seed=jax.random.key(0), sample_shape=(1000,)).any()


def head_output(mask: Any = None, dtype: Any = jnp.float32, **fields: Any) -> Any:
    x = jax.random.normal(jax.random.key(1), (3, 2, 16), dtype)
    return PolicyValue(Discrete(4), **fields).init_with_output(jax.random.key(0), x, mask)


def test_shapes_and_dtypes():
    output, variables = head_output(dtype=jnp.bfloat16)
    assert output.policy_params.shape == (3, 2, 4) and output.value.shape == (3, 2) and output.q is None
    assert output.policy_params.dtype == output.value.dtype == jnp.float32
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "policy": {"kernel": (16, 4), "bias": (4,)},
        "value": {"kernel": (16, 1), "bias": (1,)},
    }


def test_the_head_masks():
    mask = jnp.zeros((3, 2, 4), bool).at[0, 0, 1].set(True)
    output, _ = head_output(mask)
    assert output.policy_params[0, 0].tolist()[0] == -np.inf and output.policy.mode()[0, 0] == 1
    np.testing.assert_array_equal(output.policy_params[1:], head_output()[0].policy_params[1:])


def test_scales_of_the_initialisers():
    _, variables = head_output(policy_scale=0.5, value_scale=3.0)
    for name, scale in (("policy", 0.5), ("value", 3.0)):
        kernel = variables["params"][name]["kernel"]
        np.testing.assert_allclose(kernel.T @ kernel, scale**2 * np.eye(kernel.shape[1]), atol=1e-5)
        assert not variables["params"][name]["bias"].any()


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (Box((-1.0,), (1.0,)), {}, "policy_value is for Discrete actions"),
        (Discrete(2), {"policy_scale": -1.0}, "PolicyValue.policy_scale = -1.0 must be >= 0"),
        (Discrete(2), {"value_scale": float("nan")}, "PolicyValue.value_scale"),
    ],
)
def test_bad_fields(spec, fields, message):
    with pytest.raises(ConfigError, match=message):
        PolicyValue(spec, **fields)

"""Action distributions against golden vectors, closed forms and integrals; values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import close, vector, vectors

from flaxrl.models.distributions import (
    Gaussian,
    MakeMultiCategorical,
    MakeTanhGaussian,
    bounded_dimensions,
    categorical,
    mask_logits,
)

INF = float("inf")


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


def normal(mean: Any, std: Any) -> dict[str, Any]:
    """Parameters of a Gaussian."""
    mean, std = jnp.broadcast_arrays(jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))
    return {"mean": mean, "log_std": jnp.log(std)}


def test_golden_multidiscrete():
    v = vector("multidiscrete")
    sizes = tuple(v["inputs"]["nvec"])
    policy = MakeMultiCategorical(sizes)(jnp.asarray(v["inputs"]["flat_logits"], jnp.float32))
    close(policy.log_prob(jnp.asarray(v["inputs"]["action"])), v["expected"]["log_prob"], v)
    close(policy.entropy(), v["expected"]["entropy"], v)
    assert policy.mode().tolist() == [1, 0, 0]


def test_components_are_independent():
    """Gradients, KL and draws are those of the components; one number a row."""
    sizes, rng = (2, 3, 2), np.random.default_rng(0)
    p, q = (jnp.asarray(rng.normal(size=(4, 5, 7)), jnp.float32) for _ in range(2))
    action = jnp.stack([jnp.full((4, 5), a) for a in (1, 2, 0)], axis=-1)
    make = MakeMultiCategorical(sizes)

    def parts(x: Any) -> Any:
        return [categorical(y) for y in (x[..., :2], x[..., 2:5], x[..., 5:])]

    assert make(p).log_prob(action).shape == make(p).entropy().shape == make(p).kl_divergence(make(q)).shape == (4, 5)
    grads = jax.grad(lambda x: jnp.sum(make(x).log_prob(action) + make(x).entropy()))(p)
    expected = jax.grad(
        lambda x: jnp.sum(sum(d.log_prob(action[..., i]) + d.entropy() for i, d in enumerate(parts(x))))
    )(p)
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)
    kl = sum(a.kl_divergence(b) for a, b in zip(parts(p), parts(q), strict=True))
    np.testing.assert_allclose(make(p).kl_divergence(make(q)), kl, rtol=1e-5, atol=1e-6)
    even = MakeMultiCategorical((2, 2))(jnp.zeros((20_000, 4)))
    drawn = even.sample(seed=jax.random.key(0))
    assert drawn.dtype == even.mode().dtype == jnp.int32 and drawn.shape == (20_000, 2)
    pairs = np.bincount(np.asarray(drawn[:, 0] * 2 + drawn[:, 1]), minlength=4) / 20_000
    np.testing.assert_allclose(pairs, 0.25, atol=0.015)  # the components do not share their key


def test_masks_of_components():
    """Illegal ones are never drawn and have no gradient; a component without a legal action counts as all-legal."""
    sizes = (2, 3, 2)
    logits = jnp.tile(jnp.array([0.0, 9.0, 9.0, 0.0, 0.0, 1.0, -1e30]), (500, 1))
    mask = jnp.tile(jnp.array([True, False, False, True, True, False, False]), (500, 1))

    def policy(x: Any) -> Any:
        return MakeMultiCategorical(sizes)(mask_logits(x, mask, sizes))

    drawn = np.asarray(policy(logits).sample(seed=jax.random.key(0)))
    assert (drawn[:, 0] == 0).all() and set(drawn[:, 1]) == {1, 2} and (drawn[:, 2] == 0).all()
    value, grad = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(policy(x).entropy() + policy(x).log_prob(jnp.asarray(drawn))))
    )(logits)
    assert np.isfinite(value) and np.isfinite(grad).all() and not grad[:, [0, 1, 2]].any() and grad[:, 3:5].any()
    # alone legal, it wins although it is below any fill constant
    only = mask_logits(logits, jnp.zeros_like(mask).at[:, 6].set(True), sizes)
    assert (MakeMultiCategorical(sizes)(only).mode()[:, 2] == 1).all()


def test_golden_gaussian():
    v = vector("gaussian")
    x, mean, std = (jnp.asarray(v["inputs"][k]) for k in ("x", "mean", "std"))
    policy = Gaussian(normal(mean, std))
    close(policy.log_prob(x), v["expected"]["log_prob"], v)
    close(policy.entropy(), v["expected"]["entropy"], v)
    grads = jax.grad(lambda p: Gaussian(p).log_prob(x))(normal(mean, std))
    close(grads["mean"], (x - mean) / std**2, v)
    close(grads["log_std"], ((x - mean) / std) ** 2 - 1, v)
    assert jax.grad(lambda p: Gaussian(p).entropy())(normal(mean, std))["log_std"].tolist() == [1, 1]


def test_gaussian_kl_and_samples():
    p, q = Gaussian(normal([0.0, 1.0], [1.0, 0.5])), Gaussian(normal([1.0, 1.0], [2.0, 0.5]))
    # one dimension: log(2 / 1) + (1 + 1) / (2 * 4) - 1 / 2; the other is the same in both
    np.testing.assert_allclose(p.kl_divergence(q), np.log(2) + 0.25 - 0.5, rtol=1e-6)
    assert p.kl_divergence(p) == 0
    drawn = q.sample(seed=jax.random.key(0), sample_shape=(20_000,))
    assert drawn.shape == (20_000, 2) and drawn.dtype == jnp.float32
    np.testing.assert_allclose(drawn.mean(0), [1, 1], atol=0.06)
    np.testing.assert_allclose(drawn.std(0), [2, 0.5], rtol=0.02)


def test_one_log_probability_a_row():
    """`[T, B]` for actions `[T, B, D]`; an action of another rank is refused rather than broadcast."""
    params = normal(jnp.zeros((4, 3, 2)), 1.0)
    logits = jnp.zeros((4, 3, 4))
    for policy in (Gaussian(params), MakeTanhGaussian((-1.0, -1.0), (1.0, 1.0))(params)):
        assert policy.log_prob(policy.mode()).shape == policy.entropy().shape == (4, 3)
        with pytest.raises(AssertionError):
            policy.log_prob(jnp.zeros((4, 3)))
    multi = MakeMultiCategorical((2, 2))(logits)
    assert multi.log_prob(multi.mode()).shape == (4, 3)
    for wrong in (jnp.zeros((4, 3), int), jnp.zeros((4, 3, 1), int)):
        with pytest.raises(AssertionError):
            multi.log_prob(wrong)


def test_golden_tanh_gaussian():
    v = vector("tanh_gaussian")
    u, mean, std = (jnp.asarray(v["inputs"][k]) for k in ("pre_tanh", "mean", "std"))
    action, make = jnp.tanh(u), MakeTanhGaussian((-1.0, -1.0), (1.0, 1.0))
    close(action, v["expected"]["action"], v)
    close(make(normal(mean, std)).log_prob(action), v["expected"]["log_prob"], v)
    grads = jax.grad(lambda p: make(p).log_prob(action))(normal(mean, std))
    close(grads["mean"], (u - mean) / std**2, v)
    close(grads["log_std"], ((u - mean) / std) ** 2 - 1, v)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 3.0), (-INF, INF), (-1.0, INF)])
@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.5), (0.7, 1.0), (-2.0, 0.3)])
def test_tanh_gaussian_is_a_density(low, high, mean, std):
    """It integrates to 1; its entropy is -E[log density], and its KL E[log p - log q], both as integrals."""
    make = MakeTanhGaussian((low,), (high,))
    p, q = make(normal([mean], [std])), make(normal([0.3], [0.9]))
    u = np.linspace(mean - 9 * std, mean + 9 * std, 20_001)
    squashed = np.isfinite(low) and np.isfinite(high)
    x = (low + high) / 2 + (high - low) / 2 * np.tanh(u) if squashed else u

    def log_density(policy: Any) -> Any:
        return np.asarray(jax.vmap(policy.log_prob)(jnp.asarray(x, jnp.float32)[:, None]), np.float64)

    log_p, log_q = log_density(p), log_density(q)
    np.testing.assert_allclose(np.trapezoid(np.exp(log_p), x), 1, rtol=2e-4)
    entropy = np.trapezoid(-np.exp(log_p) * log_p, x)
    np.testing.assert_allclose(p.entropy(), entropy, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(p.kl_divergence(q), np.trapezoid(np.exp(log_p) * (log_p - log_q), x), rtol=2e-3)
    drawn = np.asarray(p.sample(seed=jax.random.key(0), sample_shape=(20_000,)))[:, 0]
    np.testing.assert_allclose(drawn.mean(), np.trapezoid(np.exp(log_p) * x, x), atol=0.05)
    if squashed:
        assert low <= drawn.min() and drawn.max() <= high
    np.testing.assert_allclose(np.mean(drawn <= p.mode()[0]), 0.5, atol=0.015)  # the median


def exact_log_slope(mean: float, std: float) -> float:
    """E[log(1 - tanh(u)^2)] by a fine sum over u."""
    z = np.linspace(-12, 12, 200_001)
    weight = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    u = np.abs(mean + std * z)
    return float(np.trapezoid(weight * 2 * (np.log(2) - u - np.log1p(np.exp(-2 * u))), z))


@pytest.mark.parametrize(("std", "error"), [(0.1, 1e-5), (1.0, 1e-5), (2.0, 1e-3), (7.389, 0.1)])
def test_entropy_of_tanh_gaussian(std, error):
    """The accuracy that its docstring promises, and a gradient that sees the squashing."""
    make = MakeTanhGaussian((-2.0,), (2.0,))
    for mean in (0.0, 0.5, 2.0, 10.0):
        exact = np.log(std) + 0.5 * np.log(2 * np.pi * np.e) + np.log(2) + exact_log_slope(mean, std)
        np.testing.assert_allclose(make(normal([mean], [std])).entropy(), exact, rtol=2e-6, atol=error)
    step = 1e-3
    slope = (exact_log_slope(0.5 + step, 1.0) - exact_log_slope(0.5 - step, 1.0)) / (2 * step)
    grad = jax.grad(lambda p: make(p).entropy())(normal([0.5], [1.0]))["mean"]
    np.testing.assert_allclose(grad, [slope], rtol=1e-3)


@pytest.mark.parametrize("mean", [20.0, -20.0, 1e4])
def test_saturated_actions_are_finite(mean):
    make = MakeTanhGaussian((-1.0, -2.0), (1.0, 3.0))
    params = normal([mean, mean], [1.0, 0.01])
    action = make(params).sample(seed=jax.random.key(0))
    assert action.tolist() == ([1, 3] if mean > 0 else [-1, -2])

    def f(params: Any) -> Any:
        return make(params).log_prob(action) + make(params).entropy()

    value, grads = jax.jit(jax.value_and_grad(f))(params)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    # beyond the bounds too, and for every action that float32 has near them
    near = 1 - np.arange(50, dtype=np.float32) * np.finfo(np.float32).eps / 2
    log_prob = jax.vmap(make(normal([0.0, 0.0], 1.0)).log_prob)(jnp.stack([near, near * 3.5], axis=-1))
    assert np.isfinite(log_prob).all()


def test_unbounded_dimensions_are_not_squashed():
    low, high = (-INF, -1.0, -1.0, -3.4028235e38), (INF, INF, 1.0, 3.4028235e38)
    assert bounded_dimensions(low, high).tolist() == [False, False, True, False]
    policy = MakeTanhGaussian(low, high)(normal(jnp.full((5, 4), 3.0), 1.0))
    np.testing.assert_allclose(policy.mode(), np.tile([3, 3, np.tanh(3), 3], (5, 1)), rtol=1e-6)
    drawn = policy.sample(seed=jax.random.key(0))
    assert np.isfinite(drawn).all() and np.isfinite(policy.log_prob(drawn)).all()
    assert np.isfinite(policy.entropy()).all()


def test_kl_needs_the_same_bounds():
    params = normal([0.0], [1.0])
    with pytest.raises(ValueError, match="different bounds"):
        MakeTanhGaussian((-1.0,), (1.0,))(params).kl_divergence(MakeTanhGaussian((-2.0,), (1.0,))(params))

"""The V-trace loss: golden vectors, masks, each term, metrics, fields."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import Expanded, close, expand, vector, vectors

from flaxrl.errors import ConfigError
from flaxrl.losses.vtrace import VTrace
from flaxrl.models.heads import categorical
from flaxrl.types import FIRST, MID, AgentInput, Output, Trajectory

CLIPS = ("clip_rho", "clip_c", "clip_pg_rho")
EAGER = vector("vtrace_trunc_inside")
GOLDEN = [pytest.param(*p.values, True, id=str(p.id)) for p in vectors("vtrace")] + [
    pytest.param(EAGER, False, id="eager")  # one alone: op by op takes long
]


def fake_unroll(params: Any, batch: Any, rngs: Any = None) -> Output:
    """A model whose parameters are its output."""
    del batch, rngs
    return Output(policy_params=params["logits"], value=params["value"], make_policy=categorical)


def golden_trajectory(inputs: dict[str, Any], rows: Expanded, garbage: float) -> tuple[dict[str, Any], Trajectory]:
    """Parameters and off-policy data whose ratios are the vector's; masked rows hold `garbage`."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(*rows.value.shape, 3)), jnp.float32)
    action = jnp.asarray(np.where(rows.source[:, None] >= 0, rng.integers(0, 3, rows.discount.shape), 7), jnp.int32)
    log_prob = jax.nn.log_softmax(logits[:-1])[np.arange(len(action)), 0, np.minimum(action[:, 0], 2)][:, None]
    masked = rows.source[:, None] < 0
    trajectory = Trajectory(
        inputs=AgentInput(observation=jnp.zeros((*rows.value.shape, 1)), step_type=jnp.asarray(rows.step_type)),
        action=action,
        reward=jnp.asarray(rows.rows(inputs["r"], garbage)),
        discount=jnp.where(masked, garbage, rows.discount),
        log_prob=jnp.where(masked, garbage, log_prob - np.log(rows.rows(inputs["ratio_pi_over_mu"], 1.0))),
        value=jnp.full(rows.discount.shape, garbage),
    )
    return {"logits": logits, "value": jnp.asarray(rows.value)}, trajectory


def golden_loss(inputs: dict[str, Any], **fields: Any) -> VTrace:
    clips = {name: inputs[name] for name in CLIPS}
    return VTrace(discount=inputs["gamma"], lambda_=inputs["lam"], **clips, **fields)


def loss_and_gradient(loss: VTrace, params: Any, trajectory: Trajectory, jit: bool = True) -> Any:
    def f(params: Any, trajectory: Trajectory) -> Any:
        return loss(fake_unroll, params, None, trajectory.sanitized(), {})

    g = jax.value_and_grad(f, has_aux=True)
    return (jax.jit(g) if jit else g)(params, trajectory)


@pytest.mark.parametrize(("v", "jit"), GOLDEN)
def test_golden_loss(v, jit):
    """Value and gradient of the whole loss from the vector's advantages and errors; NaN on masked rows."""
    rows = expand(v["inputs"])
    params, trajectory = golden_trajectory(v["inputs"], rows, np.nan)
    loss = golden_loss(v["inputs"], baseline_cost=0.25, entropy_cost=0.0)
    (value, out), grads = loss_and_gradient(loss, params, trajectory, jit)

    advantage, errors = (np.asarray(v["expected"][k]) for k in ("pg_advantage", "errors"))
    n = len(errors)
    taken = jax.nn.one_hot(rows.transitions(trajectory.action), 3)
    probs = rows.transitions(jax.nn.softmax(params["logits"][:-1]))
    policy = -np.mean(np.log(np.sum(probs * taken, -1)) * advantage)
    baseline = 0.25 * 0.5 * np.mean(errors**2)  # baseline_cost * 0.5 * mean((v - V)^2)
    close(value, policy + baseline, v)
    close(out.metrics["policy"], policy, v)
    close(out.metrics["baseline"], baseline, v)
    # d(-log pi(a) * adv)/d logits = -adv * (onehot - p); dV of half the squared error = -(v - V).
    close(rows.transitions(grads["logits"][:-1]), -advantage[:, None] * (taken - probs) / n, v)
    close(rows.transitions(grads["value"][:-1]), -0.25 * errors / n, v)
    unused = np.append(rows.source < 0, True)
    np.testing.assert_array_equal(grads["logits"][unused], 0)
    np.testing.assert_array_equal(grads["value"][unused], 0)


def test_masked_rows_do_not_matter():
    """NaN and zeros on masked rows give the same loss, metrics and gradient, to the last bit."""
    inputs = vector("vtrace_trunc_inside")["inputs"]
    rows, loss = expand(inputs), golden_loss(inputs, max_abs_reward=1.0)
    f = jax.jit(functools.partial(loss_and_gradient, loss, jit=False))
    clean, dirty = (f(*golden_trajectory(inputs, rows, x)) for x in (0.0, np.nan))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(dirty))


def one_row(reward: float, entropy_cost: float = 0.0, **fields: Any) -> Any:
    """Loss and gradient of one step of one env: V = 0, 0; logits (0, log 3); action 1; on-policy."""
    params = {"logits": jnp.array([[[0.0, np.log(3.0)]]] * 2), "value": jnp.zeros((2, 1))}
    trajectory = Trajectory(
        inputs=AgentInput(observation=jnp.zeros((2, 1)), step_type=jnp.array([[FIRST], [MID]], jnp.int8)),
        action=jnp.ones((1, 1), jnp.int32),
        reward=jnp.full((1, 1), reward),
        discount=jnp.ones((1, 1)),
        log_prob=jnp.full((1, 1), np.log(0.75)),
        value=None,
    )
    return loss_and_gradient(VTrace(entropy_cost=entropy_cost, **fields), params, trajectory)


def test_rewards_are_clipped():
    (_, out), grads = one_row(-7.0, max_abs_reward=2.0, baseline_cost=0.5)
    np.testing.assert_allclose(out.metrics["policy"], -np.log(0.75) * -2.0, rtol=1e-6)  # -log pi(a) * (-2 - 0)
    np.testing.assert_allclose(grads["value"][0, 0], 0.5 * 2.0)  # -(v - V) * baseline_cost
    (_, out), _ = one_row(-7.0)
    np.testing.assert_allclose(out.metrics["policy"], -np.log(0.75) * -7.0, rtol=1e-6)


def test_entropy_is_a_bonus():
    (value, out), grads = one_row(0.0, entropy_cost=0.1)
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(value, -0.1 * entropy, rtol=1e-6)
    np.testing.assert_allclose(out.metrics["entropy"], entropy, rtol=1e-6)
    np.testing.assert_allclose(out.metrics["entropy_bonus"], -0.1 * entropy, rtol=1e-6)
    assert grads["logits"][0, 0, 0] < 0 < grads["logits"][0, 0, 1]  # descent raises the rarer action


def test_off_policy_metrics():
    v = vector("vtrace_clipped")
    params, trajectory = golden_trajectory(v["inputs"], expand(v["inputs"]), np.nan)
    (_, out), _ = loss_and_gradient(golden_loss(v["inputs"]), params, trajectory)
    ratio = np.array([0.5, 2.0, 1.0, 3.0, 0.1])
    np.testing.assert_allclose(out.metrics["rho_mean"], ratio.mean(), rtol=1e-5)
    np.testing.assert_allclose(out.metrics["rho_clipped"], 2 / 5, rtol=1e-6)
    np.testing.assert_allclose(out.metrics["kl_behaviour"], (ratio - 1 - np.log(ratio)).mean(), rtol=1e-4)


def test_illegal_filler_action():
    """A sanitized LAST row answers with action 0 even where 0 is illegal: -inf must not reach the loss or gradient."""
    v = vector("vtrace_trunc_inside")
    rows = expand(v["inputs"])
    params, trajectory = golden_trajectory(v["inputs"], rows, np.nan)
    last = int(np.argmax(rows.source < 0))
    params["logits"] = params["logits"].at[last, 0, 0].set(-jnp.inf)
    (value, _), grads = loss_and_gradient(golden_loss(v["inputs"]), params, trajectory)
    assert categorical(params["logits"][last, 0]).log_prob(0) == -np.inf
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"discount": 1.5}, "VTrace.discount = 1.5 must be >= 0 and <= 1"),
        ({"lambda_": -0.1}, "VTrace.lambda_"),
        ({"entropy_cost": -1.0}, "VTrace.entropy_cost"),
        ({"baseline_cost": float("nan")}, "VTrace.baseline_cost"),
        ({"clip_rho": 0.0}, "VTrace.clip_rho"),
        ({"clip_c": -1.0}, "VTrace.clip_c"),
        ({"max_abs_reward": 0.0}, "VTrace.max_abs_reward"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        VTrace(**fields)


def test_needs_a_value():
    def no_value(params: Any, batch: Any, rngs: Any = None) -> Output:
        return fake_unroll(params, batch, rngs).replace(value=None)

    v = vector("vtrace_onpolicy")
    params, trajectory = golden_trajectory(v["inputs"], expand(v["inputs"]), 0.0)
    with pytest.raises(ConfigError, match="a head with a value"):
        VTrace()(no_value, params, None, trajectory, {})

"""The policy-value head: its parameters, and the policy that each action space gets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.envs.spec import Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.models.distributions import MakeMultiCategorical, bounded
from flaxrl.models.heads import PolicyValue


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
        (
            Box((-1.0,), (1.0,)),
            {"distribution": "categorical"},
            "distribution = 'categorical' does not fit actions Box; set it to 'gaussian' or 'tanh_gaussian', or None",
        ),
        (Discrete(2), {"distribution": "gaussian"}, r"does not fit actions Discrete\(n=2.*; set it to 'categorical'"),
        (
            MultiDiscrete((2, 3)),
            {"distribution": "tanh_gaussian"},
            r"does not fit actions MultiDiscrete\(nvec=\(2, 3\)",
        ),
        (None, {"distribution": "gausian"}, "PolicyValue.distribution = 'gausian' is unknown; did you mean 'gaussian'"),
        (Box((-1.0, 2.0), (1.0, 2.0)), {"distribution": "tanh_gaussian"}, r"dimension 1 of the action has \[2, 2\]"),
        (None, {"log_std_init": 3.0}, r"PolicyValue.log_std_init = 3.0 must be >= -10 and <= 2"),
        (None, {"log_std_min": float("nan")}, r"PolicyValue.log_std_min = nan must be >= -40 and <= 40"),
        (
            None,
            {"log_std_min": 1.0, "log_std_max": 0.0},
            r"PolicyValue.log_std_min = 1 must be <= log_std_max = 0",
        ),
        (Discrete(2), {"policy_scale": -1.0}, "PolicyValue.policy_scale = -1.0 must be >= 0"),
        (Discrete(2), {"value_scale": float("nan")}, "PolicyValue.value_scale"),
    ],
)
def test_bad_fields(spec, fields, message):
    with pytest.raises(ConfigError, match=message):
        PolicyValue(spec, **fields)


X = np.random.default_rng(2).normal(size=(3, 2, 16)).astype(np.float32)
BOX = Box((-1.0, -2.0), (1.0, np.inf))


def outputs(spec: Any, mask: Any = None, **fields: Any) -> Any:
    return PolicyValue(spec, **fields).init_with_output(jax.random.key(0), X, mask)


def test_joined_masks_of_components():
    """Each component by itself: one without a legal action counts as all-legal, beside one that is masked."""
    spec = MultiDiscrete((2, 3))
    free, _ = outputs(spec)
    masked, _ = outputs(spec, jnp.broadcast_to(jnp.array([False, False, True, False, True]), (3, 2, 5)))
    assert free.policy_params.shape == (3, 2, 5) and free.make_policy == MakeMultiCategorical((2, 3))
    np.testing.assert_array_equal(masked.policy_params[..., [0, 1, 2, 4]], free.policy_params[..., [0, 1, 2, 4]])
    assert (masked.policy_params[..., 3] == -np.inf).all()


def test_a_free_deviation_is_a_parameter():
    output, variables = outputs(BOX, log_std_init=-0.5)
    assert variables["params"]["log_std"].tolist() == [-0.5, -0.5]
    assert output.policy_params["log_std"].shape == output.policy_params["mean"].shape == (3, 2, 2)
    assert (output.policy_params["log_std"] == -0.5).all()
    assert output.policy.log_prob(output.policy.mode()).shape == (3, 2)


def test_a_deviation_of_the_state():
    output, variables = outputs(BOX, log_std_init=-0.5, state_dependent_std=True, policy_scale=0.1)
    layer = variables["params"]["log_std"]
    assert layer["kernel"].shape == (16, 2) and layer["bias"].tolist() == [-0.5, -0.5]
    np.testing.assert_allclose(layer["kernel"].T @ layer["kernel"], 0.01 * np.eye(2), atol=1e-6)
    spread = np.asarray(output.policy_params["log_std"])
    assert 0 < np.abs(spread + 0.5).max() < 1 and np.ptp(spread) > 0


def test_bounds_of_the_deviation():
    """Out of bounds the deviation is the bound's, and only a step that leads back has a gradient."""
    head = PolicyValue(BOX, log_std_min=-1.0, log_std_max=1.0)
    _, variables = head.init_with_output(jax.random.key(0), X, None)
    variables["params"]["log_std"] = jnp.array([3.0, -3.0])
    output: Any = head.apply(variables, X, None)
    np.testing.assert_array_equal(output.policy_params["log_std"][0, 0], [1.0, -1.0])

    def gradient(x: Any, sign: float) -> Any:
        return jax.grad(lambda x: sign * jnp.sum(bounded(x, -1.0, 1.0)))(jnp.array(x)).tolist()

    assert gradient([3.0, -3.0, 0.5, 1.0], 1.0) == [1, 0, 1, 1]  # descent lowers x
    assert gradient([3.0, -3.0, 0.5, 1.0], -1.0) == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("spec", "distribution"), [(BOX, None), (BOX, "tanh_gaussian"), (MultiDiscrete((2, 3)), None), (Discrete(2), None)]
)
def test_outputs_made_twice_compile_once(spec, distribution):
    """The builder of a new trace equals that of the one before."""
    traces = 0

    @jax.jit
    def ask(output: Any) -> Any:
        nonlocal traces
        traces += 1
        return output.policy.entropy()

    for scale in (0.1, 0.2):
        ask(outputs(spec, policy_scale=scale, distribution=distribution)[0])
    assert traces == 1


def test_the_value_may_have_features_of_its_own():
    head = PolicyValue(Discrete(4))
    v = np.ones((3, 2, 5), np.float32)
    output, variables = head.init_with_output(jax.random.key(0), X, None, value_features=v)
    kernel: Any = variables["params"]["value"]["kernel"]
    assert kernel.shape == (5, 1)
    np.testing.assert_allclose(output.value, np.full((3, 2), kernel.sum()), rtol=1e-5)

"""Targets that losses share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.losses import discounted_returns, explained_variance
from flaxrl.types import FIRST, LAST, MID, AgentInput, Trajectory

# x0 x1 | terminated, x2 LAST | x3 | truncated, x4 LAST | x5, x6 bootstrap; NaN on masked rows
STEP_TYPE = np.array([[FIRST, MID, LAST, FIRST, LAST, FIRST, MID]], np.int8).T
REWARD = np.array([[1.0, 3.0, np.nan, 2.0, np.nan, -1.0]], np.float32).T
DISCOUNT = np.array([[1.0, 0.0, np.nan, 1.0, np.nan, 1.0]], np.float32).T
VALUE = np.array([[7.0, 7.0, 100.0, 7.0, 8.0, 7.0, 10.0]], np.float32).T
VALID = STEP_TYPE[:-1] != LAST


def trajectory(step_type: np.ndarray = STEP_TYPE, reward: np.ndarray = REWARD, discount: np.ndarray = DISCOUNT) -> Any:
    inputs = AgentInput(observation=jnp.zeros((*step_type.shape, 1)), step_type=jnp.asarray(step_type))
    action = jnp.zeros(reward.shape, jnp.int32)
    return Trajectory(inputs, action, jnp.asarray(reward), jnp.asarray(discount), None, None).sanitized()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_discounted_returns_by_hand(jit):
    f = jax.jit(discounted_returns, static_argnums=1) if jit else discounted_returns
    # with bootstrap: x5: -1 + .5*10 = 4; x3: 2 + .5*8 = 6; x1: 3, terminated; x0: 1 + .5*3 = 2.5
    np.testing.assert_allclose(np.asarray(f(trajectory(), 0.5, jnp.asarray(VALUE)))[VALID], [2.5, 3.0, 6.0, 4.0])
    # without: what was seen
    np.testing.assert_allclose(np.asarray(f(trajectory(), 0.5, None))[VALID], [2.5, 3.0, 2.0, -1.0])


def test_discounted_returns_of_columns_and_of_an_end_at_the_unrolls_end():
    step_type = np.array([[FIRST, MID, LAST], [FIRST, MID, LAST]], np.int8).T
    reward, discount = np.ones((2, 2), np.float32), np.array([[1, 0], [1, 1]], np.float32).T
    value = jnp.full((3, 2), 4.0)
    # terminated: 1, 1 + .5; truncated: 1 + .5*4 = 3, 1 + .5*3 = 2.5
    got = discounted_returns(trajectory(step_type, reward, discount), 0.5, value)
    np.testing.assert_allclose(got, [[1.5, 2.5], [1.0, 3.0]])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1.0, 2.0, 3.0], 1.0),
        ([11.0, 12.0, 13.0], 1.0),  # a constant offset does not count
        ([5.0, 5.0, 5.0], 0.0),
        ([2.0, 2.0, 2.0 + 1.5], 0.75),  # residuals -1, 0, -.5: var 1/6; targets' var 2/3; 1 - (1/6) / (2/3)
        ([3.0, 2.0, 1.0], -3.0),  # residuals -2, 0, 2: var 8/3
    ],
)
def test_explained_variance(value, expected):
    target = jnp.array([[1.0, 2.0, 3.0, np.nan]]).T
    value = jnp.array([[*value, np.inf]]).T
    mask = jnp.array([[True, True, True, False]]).T
    np.testing.assert_allclose(explained_variance(target, value, mask), expected, atol=1e-6)


def test_explained_variance_without_variance_or_rows():
    x, mask = jnp.ones((3, 2)), jnp.ones((3, 2), bool)
    assert explained_variance(x, x + 1, mask) == 0
    assert explained_variance(x, x + 1, ~mask) == 0

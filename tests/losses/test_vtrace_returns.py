"""V-trace returns: golden vectors, sums worked by hand, rlax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from golden import Expanded, close, expand, vector, vectors

from flaxrl.losses.vtrace import vtrace_returns
from flaxrl.types import FIRST, LAST, MID

CLIPS = ("clip_rho", "clip_c", "clip_pg_rho")
EAGER = vector("vtrace_trunc_inside")
GOLDEN = [pytest.param(*p.values, True, id=str(p.id)) for p in vectors("vtrace")] + [
    pytest.param(EAGER, False, id="eager")  # one alone: op by op takes long
]


def golden_returns(inputs: dict[str, Any], rows: Expanded, jit: bool) -> Any:
    def f(ratio: Any, reward: Any, discount: Any, step_type: Any, value: Any) -> Any:
        continues = (step_type[1:] != LAST).astype(jnp.float32)
        clips = {name: inputs[name] for name in CLIPS}
        return vtrace_returns(
            jnp.log(ratio), reward, inputs["gamma"] * discount, continues, value, lambda_=inputs["lam"], **clips
        )

    f = jax.jit(f) if jit else f
    ratio, reward = rows.rows(inputs["ratio_pi_over_mu"], 1.0), rows.rows(inputs["r"])
    return f(ratio, reward, rows.discount, rows.step_type, rows.value)


@pytest.mark.parametrize(("v", "jit"), GOLDEN)
def test_golden_returns(v, jit):
    rows = expand(v["inputs"])
    returns = golden_returns(v["inputs"], rows, jit)
    close(rows.transitions(returns.target), v["expected"]["vs"], v)
    close(rows.transitions(returns.target - rows.value[:-1]), v["expected"]["errors"], v)
    close(rows.transitions(returns.advantage), v["expected"]["pg_advantage"], v)


def test_nothing_leaks_into_the_next_episode():
    """V=1, then V=100 after a truncation; no reward, gamma 1: a leak shows 99."""
    v = vector("vtrace_leak_probe")
    rows = expand(v["inputs"])
    returns = golden_returns(v["inputs"], rows, jit=True)
    assert rows.value[:, 0].tolist() == [1, 1, 1, 100, 100, 100]
    assert rows.transitions(returns.advantage).tolist() == [0, 0, 0, 0]
    assert rows.transitions(returns.target).tolist() == [1, 1, 100, 100]


# x0 x1 | terminated, x2 LAST | x3 | truncated, x4 LAST | x5, x6 bootstrap; gamma 0.5. Two envs: the second's rewards
# and values are twice the first's, and everything is linear in them.
STEP_TYPE = np.array([FIRST, MID, LAST, FIRST, LAST, FIRST, MID], np.int8)
VALUE = np.array([2.0, 4.0, 100.0, 6.0, 8.0, 2.0, 10.0])
REWARD = np.array([1.0, 3.0, 0.0, 1.0, 0.0, -1.0])
DISCOUNT = 0.5 * np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
RATIO = np.array([2.0, 0.5, 1.0, 1.0, 1.0, 0.25])
VALID = STEP_TYPE[:-1] != LAST


def by_hand(**kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Target and advantage of the valid rows, for both envs."""

    def column(x: np.ndarray, scale: float = 2.0) -> Any:
        return jnp.asarray(np.stack([x, scale * x], axis=1), jnp.float32)

    continues = (STEP_TYPE[1:] != LAST).astype(np.float32)
    rows = (column(np.log(RATIO), 1), column(REWARD), column(DISCOUNT, 1), column(continues, 1), column(VALUE))
    target, advantage = vtrace_returns(*rows, **kwargs)
    np.testing.assert_allclose(target[:, 1], 2 * target[:, 0])
    np.testing.assert_allclose(advantage[:, 1], 2 * advantage[:, 0])
    return np.asarray(target)[VALID, 0], np.asarray(advantage)[VALID, 0]


def test_by_hand():
    target, advantage = by_hand()
    # t5: delta .25 * (-1 + .5*10 - 2) = .5                       v5 = 2 + .5
    # t3: delta 1 * (1 + .5*8 - 6) = -1, the truncation bootstraps v3 = 6 - 1
    # t1: delta .5 * (3 + 0 - 4) = -.5, the end does not          v1 = 4 - .5
    # t0: delta 1 * (1 + .5*4 - 2) = 1, + .5 * c 1 * -.5 = .75    v0 = 2 + .75
    np.testing.assert_allclose(target, [2.75, 3.5, 5.0, 2.5])
    # t0: 1 * (1 + .5*3.5 - 2) = .75; the others are one-step
    np.testing.assert_allclose(advantage, [0.75, -0.5, -1.0, 0.5])


def test_lambda_enters_c_alone():
    target, advantage = by_hand(lambda_=0.5)
    # t0: 1 + .5 * (lambda .5 * c 1) * -.5 = .875; its advantage bootstraps from v1 = 3.5 whole, not mixed with V1
    np.testing.assert_allclose(target, [2.875, 3.5, 5.0, 2.5])
    np.testing.assert_allclose(advantage, [0.75, -0.5, -1.0, 0.5])
    target, advantage = by_hand(lambda_=0.0)
    np.testing.assert_allclose(target, [3.0, 3.5, 5.0, 2.5])
    np.testing.assert_allclose(advantage, [0.75, -0.5, -1.0, 0.5])


@pytest.mark.parametrize(
    ("clips", "target_0", "advantage_0"),
    [
        # only row 0 has a ratio (2) above 1: its delta 1 * rho, its trace .5 * c * -.5, its advantage rho' * .75
        ({"clip_rho": None}, 2 + 2 - 0.25, 0.75),
        ({"clip_rho": 1.5}, 2 + 1.5 - 0.25, 0.75),
        ({"clip_c": None}, 2 + 1 - 0.5, 0.75),
        ({"clip_pg_rho": None}, 2.75, 1.5),
        ({"clip_pg_rho": 0.2}, 2.75, 0.15),
    ],
)
def test_each_bound_has_its_place(clips, target_0, advantage_0):
    target, advantage = by_hand(**clips)
    np.testing.assert_allclose(target[0], target_0)
    np.testing.assert_allclose(advantage[0], advantage_0, rtol=1e-6)


@pytest.mark.parametrize(("clip_rho", "clip_pg_rho"), [(1.0, 1.0), (2.0, 1.5)])
def test_agrees_with_rlax(clip_rho, clip_pg_rho):
    """rlax computes the same at lambda 1, given the two factors of the episode rule."""
    rng = np.random.default_rng(3)
    T, B = 12, 5
    log_rho, reward = rng.normal(size=(2, T, B)).astype(np.float32)
    value = rng.normal(size=(T + 1, B)).astype(np.float32)
    discount = (0.97 * (rng.random((T, B)) > 0.2)).astype(np.float32)
    continues = (rng.random((T, B)) > 0.3).astype(np.float32)
    ours = vtrace_returns(
        log_rho, reward, discount, continues, value, clip_rho=clip_rho, clip_c=1.0, clip_pg_rho=clip_pg_rho
    )
    f = jax.vmap(
        lambda *x: rlax.vtrace_td_error_and_advantage(
            *x, clip_rho_threshold=clip_rho, clip_pg_rho_threshold=clip_pg_rho
        ),
        in_axes=1,
        out_axes=1,
    )
    theirs = f(value[:-1], value[1:], reward, discount, np.exp(log_rho), continues)
    np.testing.assert_allclose(ours.target - value[:-1], theirs.errors, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.advantage, theirs.pg_advantage, rtol=1e-5, atol=1e-5)


def test_targets_are_constants():
    x = jnp.ones((3, 1))
    grads = jax.grad(lambda v: sum(y.sum() for y in vtrace_returns(x, x, x, x, v)))(jnp.ones((4, 1)))
    np.testing.assert_array_equal(grads, 0)


def test_wrong_shapes_are_refused():
    x = jnp.ones((3, 1))
    with pytest.raises(AssertionError):
        vtrace_returns(x, x, x, x, x)  # values need one row more
    with pytest.raises(AssertionError):
        vtrace_returns(x[:, 0], x[:, 0], x[:, 0], x[:, 0], jnp.ones(4))

"""Optimizers by name, their arguments, schedules and the clip."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxrl.build import build, config_for
from flaxrl.errors import ConfigError
from flaxrl.trainers.optimizer import Optimizer, schedule_value, set_learning_rate

VECTORS = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["vectors"]


def _one_step(optimizer: Optimizer, gradient: list[float], rate: float | None = None) -> np.ndarray:
    tx = optimizer.make()
    params = jnp.ones(len(gradient))
    state = tx.init(params)
    if rate is not None:
        state = set_learning_rate(state, jnp.float32(rate))
    return np.asarray(tx.update(jnp.array(gradient), state, params)[0])


def test_linear_schedule_golden():
    vector = next(v for v in VECTORS if v["id"] == "linear_schedule")
    given = vector["inputs"]
    optimizer = Optimizer("sgd", learning_rate=given["start"], schedule="linear", final_fraction=0.0)
    for k, want in zip(given["at"], vector["expected"]["value"], strict=True):
        rate = float(optimizer.learning_rate_at(jnp.float32(k / given["total_updates"])))
        assert rate == pytest.approx(want, rel=1e-4, abs=1e-9) and rate >= 0


def test_schedules_worked_by_hand():
    linear = Optimizer(learning_rate=0.2, schedule="linear", final_fraction=0.5)
    assert [float(linear.learning_rate_at(p)) for p in (0, 0.5, 1, 2)] == pytest.approx([0.2, 0.15, 0.1, 0.1])
    cosine = Optimizer(learning_rate=0.2, schedule="cosine")
    # 0.1 (1 + cos(pi p)): cos 60 degrees = 1/2.
    assert [float(cosine.learning_rate_at(p)) for p in (0, 1 / 3, 0.5, 1, 3)] == pytest.approx(
        [0.2, 0.15, 0.1, 0, 0], abs=1e-7
    )
    constant = Optimizer(learning_rate=0.2, final_fraction=0.5)
    assert [float(constant.learning_rate_at(p)) for p in (0, 0.5, 2)] == pytest.approx([0.2] * 3)


def test_warmup_comes_first_and_the_schedule_spans_the_rest():
    optimizer = Optimizer(learning_rate=0.2, schedule="linear", warmup_fraction=0.2)
    at = (0.0, 0.1, 0.2, 0.6, 1.0, 1.5)
    assert [float(optimizer.learning_rate_at(p)) for p in at] == pytest.approx([0, 0.1, 0.2, 0.1, 0, 0], abs=1e-7)


def test_unknown_schedule_is_an_error():
    with pytest.raises(ValueError, match="'step' is unknown; expected one of"):
        schedule_value("step", 0.5, 1.0, 0.0)
    with pytest.raises(ConfigError, match=r"Optimizer\.schedule = 'linaer' is unknown; did you mean 'linear'"):
        Optimizer(schedule="linaer")


def test_gradients_are_scaled_to_the_norm():
    clipped = _one_step(Optimizer("sgd", learning_rate=1.0, max_grad_norm=1.0), [3.0, 4.0])
    np.testing.assert_allclose(clipped, [-0.6, -0.8], rtol=1e-6)
    below = _one_step(Optimizer("sgd", learning_rate=1.0, max_grad_norm=10.0), [3.0, 4.0])
    np.testing.assert_allclose(below, [-3.0, -4.0], rtol=1e-6)
    free = _one_step(Optimizer("sgd", learning_rate=1.0), [30.0, 40.0])
    np.testing.assert_allclose(free, [-30.0, -40.0], rtol=1e-6)


def test_learning_rate_is_set_from_outside():
    optimizer = Optimizer("sgd", learning_rate=1.0)
    np.testing.assert_allclose(_one_step(optimizer, [2.0], rate=0.25), [-0.5])
    with jax.numpy_dtype_promotion("strict"):
        state = optimizer.make().init(jnp.ones(1))
        changed = set_learning_rate(state, 0.25)
    assert jax.tree.structure(state) == jax.tree.structure(changed)
    rate = changed.hyperparams["learning_rate"]
    assert rate.dtype == jnp.float32 and not rate.weak_type


@pytest.mark.parametrize("algorithm", ["adam", "adamw", "rmsprop", "sgd", "lion"])
def test_algorithms_are_those_of_optax(algorithm):
    gradient = [0.5, -2.0]
    tx = getattr(optax, algorithm)(0.1)
    want = tx.update(jnp.array(gradient), tx.init(jnp.ones(2)), jnp.ones(2))[0]
    np.testing.assert_allclose(_one_step(Optimizer(algorithm, learning_rate=0.1), gradient), want, rtol=1e-6)


def test_arguments_are_complete_and_reach_optax():
    block = config_for("optimizer", algorithm="adam", learning_rate=0.1, args={"eps": 1.0})
    args = block.to_dict()["args"]
    assert {"b1", "b2", "eps", "eps_root"} <= set(args)
    assert args["b1"] == 0.9 and args["eps"] == 1.0
    # Adam's first step: g / (|g| + eps) = 1 / 2.
    np.testing.assert_allclose(_one_step(build(block), [1.0]), [-0.05], rtol=1e-5)


def test_optional_numbers_may_be_none_or_a_number():
    assert config_for("optimizer", algorithm="sgd").to_dict()["args"]["momentum"] is None
    optimizer = build(config_for("optimizer", algorithm="sgd", learning_rate=1.0, args={"momentum": 0.5}))
    tx, params = optimizer.make(), jnp.ones(1)
    state = tx.init(params)
    steps = []
    for _ in range(2):
        changes, state = tx.update(jnp.ones(1), state, params)
        steps.append(float(changes[0]))
    assert steps == [-1.0, -1.5]
    with pytest.raises(ConfigError, match=r"args\.momentum = 'high' of optax\.sgd must be float"):
        Optimizer("sgd", args={"momentum": "high"})
    with pytest.raises(ConfigError, match=r"args\.eps = None of optax\.adam must be float"):
        Optimizer("adam", args={"eps": None})


def test_wrong_arguments_name_the_nearest():
    with pytest.raises(ConfigError, match=r"args\.epsilon does not fit optax\.adam; did you mean 'eps'"):
        Optimizer("adam", args={"epsilon": 1e-5})
    with pytest.raises(ConfigError, match=r"optimizer\.args has no 'momentun'; did you mean 'momentum'"):
        config_for("optimizer", algorithm="rmsprop", args={"momentun": 0.9})
    with pytest.raises(ConfigError, match=r"'adamm' is not an optax optimizer; did you mean 'adam"):
        Optimizer("adamm")
    with pytest.raises(ConfigError, match=r"args\.eps = nan of optax\.adam must be float"):
        Optimizer("adam", args={"eps": float("nan")})


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": float("nan")},
        {"learning_rate": -1e-3},
        {"learning_rate": 0.0},
        {"max_grad_norm": 0.0},
        {"final_fraction": 1.5},
        {"warmup_fraction": 1.0},
    ],
)
def test_numbers_out_of_range_are_refused(fields):
    name = next(iter(fields))
    with pytest.raises(ConfigError, match=rf"Optimizer\.{name} = .* must be"):
        Optimizer(**fields)

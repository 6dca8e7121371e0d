import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from flaxrl.envs.base import AutoReset
from flaxrl.envs.brax import Brax
from flaxrl.envs.spec import ArraySpec, Box
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID
from tests.contract.env_contract import check_jax_env


@struct.dataclass
class State:
    """As brax's: what a step answers, as floats, and dicts of the task's own."""

    obs: jnp.ndarray
    reward: jnp.ndarray
    done: jnp.ndarray
    metrics: dict
    info: dict


class Walk:
    """The position is moved by the action; falls where it is above 2."""

    action_size = 1

    def __init__(self, backend="generalized"):
        self.backend = backend

    def reset(self, key):
        del key
        return State(jnp.zeros(2), 0.0, 0.0, {"x": 0.0}, {})  # type: ignore[arg-type]

    def step(self, state, action):
        obs = state.obs.at[0].add(action[0])
        return state.replace(obs=obs, reward=action[0], done=jnp.where(obs[0] > 2, 1.0, 0.0), metrics={"x": obs[0]})


@pytest.fixture
def brax(monkeypatch):
    """A stand-in for the package, which may not be installed."""
    envs = types.SimpleNamespace(_envs={"walk": Walk, "ant": Walk})
    envs.get_environment = lambda name, **kwargs: envs._envs[name](**kwargs)
    monkeypatch.setitem(sys.modules, "brax", types.ModuleType("brax"))
    monkeypatch.setitem(sys.modules, "brax.envs", envs)


def play(env, actions):
    auto = AutoReset(env)
    state = auto.reset(jax.random.split(jax.random.key(0), 1))
    rows = [state.timestep]
    for t, action in enumerate(actions):
        state = auto.step(state, jnp.full((1, 1), action, jnp.float32), jax.random.split(jax.random.key(t), 1))
        rows.append(state.timestep)
    return rows


@pytest.mark.usefixtures("brax")
def test_a_fall_terminates_and_the_limit_truncates():
    env = Brax("walk", max_steps=4)
    assert env.spec.observation == ArraySpec((2,), np.dtype(np.float32)) and env.spec.action == Box((-1.0,), (1.0,))
    rows = play(env, [9.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0])
    assert [int(r.step_type[0]) for r in rows] == [FIRST, MID, MID, LAST, FIRST, MID, MID, MID, LAST, FIRST]
    assert [float(r.discount[0]) for r in rows] == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert [float(r.observation[0, 0]) for r in rows[:4]] == [0, 1, 2, 3], "9.0 is clipped to 1"
    assert float(rows[8].episode_return[0]) == 2 and float(rows[8].observation[0, 0]) == 2


def test_the_backend_is_passed_on(brax):
    assert Brax("walk", backend="spring")._task.backend == "spring"


@pytest.mark.usefixtures("brax")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "antt"}, "Brax.task = 'antt' is unknown; did you mean 'ant'"),
        ({"kwargs": {"legs": 3}}, "walk with kwargs {'legs': 3} cannot be made: TypeError: .*'legs'"),
    ],
)
def test_wrong_tasks(fields, message):
    with pytest.raises(ConfigError, match=message):
        _ = Brax(**{"task": "walk"} | fields).spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"max_steps": 0}, "max_steps = 0 must be >= 1"), ({"backend": "mjxx"}, "'mjxx' is unknown; did you mean 'mjx'")],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        Brax(**fields)


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "brax", None)
    with pytest.raises(ConfigError, match=r"pip install 'flaxrl\[brax\]'"):
        _ = Brax().spec


def test_the_contract_with_the_package():
    check_jax_env(Brax("fast", max_steps=9), steps=24, varies=False)

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.envs.base import AutoReset
from flaxrl.envs.gymnax import Gymnax
from flaxrl.envs.names import resolve_game
from flaxrl.envs.spec import ArraySpec, Box, Discrete
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID

KNOWN = [
    "CartPole-v1",
    "Catch-bsuite",
    "Breakout-MinAtar",
    "MemoryChain-bsuite",
    "MountainCar-v0",
    "Pong-misc",
    "Pong-x",
]


def _play(env, steps, batch=2):
    auto = AutoReset(env)
    traces = []

    @jax.jit
    def step(state, action, keys):
        traces.append(None)
        return auto.step(state, action, keys)

    state = jax.jit(auto.reset)(jax.random.split(jax.random.key(0), batch))
    rows = [state.timestep]
    for t in range(steps):
        state = step(state, jnp.zeros((batch,), jnp.int32), jax.random.split(jax.random.key(t + 1), batch))
        rows.append(state.timestep)
    assert len(traces) == 1, "compiled anew"
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def test_a_time_limit_truncates_and_the_final_observation_is_its_own():
    """CartPole cut after 3 steps: LAST with discount 1, and a row that is neither reset nor lost."""
    rows = _play(Gymnax("CartPole-v1", max_steps=3), 6)
    assert rows.step_type[:, 0].tolist() == [FIRST, MID, MID, LAST, FIRST, MID, MID]
    assert np.all(rows.discount == 1)
    assert rows.episode_length[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert rows.episode_return[3, 0] == 3
    # always pushing left: the velocity falls by about 0.2 a step, so row 3 continues row 2 and row 4 is a new start
    velocity = rows.observation[:, 0, 1]
    np.testing.assert_allclose(np.diff(velocity[:4]), -0.195, atol=0.02)
    assert np.all(np.abs(rows.observation[[0, 4]]) <= 0.05)


def test_a_fall_terminates():
    rows = _play(Gymnax("CartPole-v1"), 12)
    last = rows.step_type == LAST
    assert last.any() and np.all(rows.discount[last] == 0) and np.all(rows.discount[~last] == 1)


def test_an_end_at_the_limit_is_a_termination():
    """Catch's ball lands after 9 steps: with the limit there too, nothing follows, so nothing may be bootstrapped."""
    rows = _play(Gymnax("catch", max_steps=9), 9)
    assert np.all(rows.step_type[9] == LAST) and np.all(rows.discount[9] == 0)
    assert set(rows.reward[9].tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("game", "observation", "action"),
    [
        ("CartPole-v1", ArraySpec((4,), np.dtype(np.float32)), Discrete(2)),
        ("breakout", ArraySpec((10, 10, 4), np.dtype(np.float32)), Discrete(3)),
        ("catch", ArraySpec((10, 5), np.dtype(np.float32)), Discrete(3)),
        ("pendulum", ArraySpec((3,), np.dtype(np.float32)), Box((-2.0,), (2.0,))),
        ("frozen_lake", ArraySpec((16,), np.dtype(np.float32)), Discrete(4)),
    ],
)
def test_spec(game, observation, action):
    spec = Gymnax(game).spec
    assert spec.observation == observation and spec.action == action and not spec.action_mask


def test_kwargs_and_params_reach_the_game():
    env = Gymnax("MemoryChain-bsuite", kwargs={"num_bits": 4}, params={"memory_length": 2})
    assert env.spec.observation.shape == (6,)
    rows = _play(env, 3)
    assert np.all(rows.step_type[3] == LAST) and np.all(np.abs(rows.reward[3]) == 1)
    # this game computes with a float limit: a whole number must not change its dtypes
    _play(Gymnax("bernoulli_bandit", max_steps=2), 3)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("cartpole", "CartPole-v1"),
        ("CARTPOLE-V1", "CartPole-v1"),
        ("breakout-minatar", "Breakout-MinAtar"),
        ("memory_chain", "MemoryChain-bsuite"),
        ("mountain_car", "MountainCar-v0"),
        ("pong-misc", "Pong-misc"),
    ],
)
def test_names(name, want):
    assert resolve_game(name, KNOWN, "Gymnax.game") == want


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Ctach", "'Ctach' is unknown; did you mean 'catch'"),
        ("CartPole-v0", "did you mean 'cartpole'"),
        ("zzz", "known: Breakout-MinAtar, CartPole-v1"),
        ("pong", "ambiguous: Pong-misc, Pong-x"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_game(name, KNOWN, "Gymnax.game")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": {"memory_lenght": 3}}, "has no parameter 'memory_lenght'; did you mean 'memory_length'"),
        ({"kwargs": {"bits": 3}}, "MemoryChain-bsuite with kwargs .*bits.* cannot be made"),
    ],
)
def test_wrong_arguments(fields, message):
    with pytest.raises(ConfigError, match=message):
        _ = Gymnax("memory_chain", **fields).spec


@pytest.mark.parametrize(
    ("game", "params", "message"),
    [
        (
            "CartPole-v1",
            {"gravity": "abc"},
            r"Gymnax\.params\.gravity = 'abc' must be a number, as .* 9\.8 is",
        ),
        ("CartPole-v1", {"gravity": True}, r"gravity = True must be a number"),
        ("memory_chain", {"memory_length": 2.5}, r"memory_length = 2\.5 must be an integer, as its default 5 is"),
        ("memory_chain", {"memory_length": float("inf")}, r"memory_length = inf must be an integer"),
        (
            "four_rooms",
            {"resample_goal_pos": 1},
            r"resample_goal_pos = 1 must be True or False, as",
        ),
    ],
)
def test_params_of_another_type_are_refused(game, params, message):
    with pytest.raises(ConfigError, match=message):
        _ = Gymnax(game, params=params).spec


def test_params_take_the_type_of_their_default():
    made = Gymnax("CartPole-v1", params={"gravity": 10, "max_steps_in_episode": 1e2})._made[1]
    assert (made.gravity, made.max_steps_in_episode) == (10.0, 100)
    assert (type(made.gravity), type(made.max_steps_in_episode)) == (float, int)


def test_wrong_limit():
    with pytest.raises(ConfigError, match="max_steps = 0 must be >= 1"):
        Gymnax(max_steps=0)


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    env = Gymnax("catch")
    with pytest.raises(ConfigError, match="pip install"):
        _ = env.spec


def test_the_agent_sees_the_observed_components_alone():
    """CartPole without velocities: components 0 and 2 of the same episode."""
    part, whole = (_play(Gymnax("CartPole-v1", observed=observed), 12) for observed in ((0, 2), None))
    np.testing.assert_array_equal(part.observation, whole.observation[..., [0, 2]])
    assert Gymnax("CartPole-v1", observed=(0, 2)).spec.observation.shape == (2,)


@pytest.mark.parametrize(
    ("game", "observed", "message"),
    [
        ("CartPole-v1", (0, 4), "components 0 to 3"),
        ("CartPole-v1", (), "at least one"),
        ("CartPole-v1", (1, 1), "twice"),
        ("Breakout-MinAtar", (0,), "vector observations"),
    ],
)
def test_components_that_are_not_there_are_refused(game, observed, message):
    with pytest.raises(ConfigError, match=message):
        _ = Gymnax(game, observed=observed).spec

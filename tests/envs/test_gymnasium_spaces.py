"""Gymnasium's spaces and action masks, through the vector env, as rows and actions of the agent."""

import gymnasium
import numpy as np
import pytest

from flaxrl import build
from flaxrl.envs.spec import ArraySpec, Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from tests.envs.test_gymnasium import make, play

# -- spaces ------------------------------------------------------------------------------------------------------------


def test_discrete_with_a_start():
    env = make("StartsAtTen", num_envs=3)
    assert env.spec.action == Discrete(3, start=10)
    assert play(env, [[0, 1, 2]]).observation[1, :, 1].tolist() == [10, 11, 12]


@pytest.mark.parametrize("workers", [0, 1])
def test_components(workers):
    env = make("Components", workers=workers)
    assert env.spec.action == MultiDiscrete((2, 3)) and env.spec.observation == ArraySpec((5,))
    shown = play(env, [[[0, 2], [1, 0]]]).observation
    assert shown[0].tolist() == [[1, 0, 1, 0, 0]] * 2
    assert shown[1].tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]


def test_switches():
    env = make("Switches")
    assert env.spec.action == MultiDiscrete((2, 2, 2, 2))
    assert env.spec.observation == ArraySpec((2, 2), np.dtype(np.int8))
    shown = play(env, [[[0, 1, 1, 0], [1, 1, 1, 0]]]).observation
    assert shown[1].tolist() == [[[0, 1], [1, 0]], [[1, 1], [1, 0]]]


@pytest.mark.parametrize(
    ("kwargs", "spec"),
    [
        ({}, Box((-np.inf, -np.inf), (np.inf, np.inf))),
        ({"low": -1.0}, Box((-1.0, -1.0), (np.inf, np.inf))),
        ({"low": -2.0, "high": 2.0, "shape": (1,)}, Box((-2.0,), (2.0,))),
        ({"low": 1.0, "high": 2.0, "shape": (2, 1)}, Box((1.0, 1.0), (2.0, 2.0))),
    ],
)
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_continuous(mode, kwargs, spec):
    env = make("Continuous", kwargs=kwargs, autoreset=mode)
    assert env.spec.action == spec
    action = np.full((2, *spec.shape), 1.25, np.float32)
    found = play(env, [action] * 9)
    np.testing.assert_array_equal(found.observation[1, :, 1], 1.25 * len(spec.low))
    np.testing.assert_array_equal(found.observation[:, 0, 0], np.arange(10) % 4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_trees_in_any_order(mode, workers):
    env = make("Nested", autoreset=mode, workers=workers)
    f, u = np.dtype(np.float32), np.dtype(np.uint8)
    assert env.spec.observation == {
        "img": ArraySpec((8, 8, 1), u),
        "inner": {"a": ArraySpec((3,), np.dtype(np.int8)), "b": ArraySpec((4,), np.float32)},
        "pair": (ArraySpec((), f), ArraySpec((1,), f)),
        "pos": ArraySpec((2,), f),
    }
    found = play(env, np.zeros((5, 2), int)).observation
    times = np.array([0, 1, 2, 3, 0, 1])
    assert found["img"].dtype == u and found["img"][:, 1, 0, 0, 0].tolist() == (250 + times).tolist()
    np.testing.assert_allclose(found["pos"][:, 0, 1], -times / 10)
    np.testing.assert_array_equal(found["inner"]["b"][:, 0], np.eye(4)[times])
    np.testing.assert_array_equal(found["inner"]["a"][:, 0, 2], times % 2)
    np.testing.assert_array_equal(found["pair"][0][:, 0], times)
    np.testing.assert_array_equal(found["pair"][1][:, 1, 0], times)


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_action_masks(mode, workers):
    """At time t action t % 3 is illegal; on the final row, here, all are."""
    env = make("Masked", action_mask=True, autoreset=mode, workers=workers, kwargs={"ends_at": 2})
    assert env.spec.action_mask
    found = play(env, [[1, 1], [2, 2], [0, 0], [1, 1]])
    illegal = ~found.action_mask
    assert [np.flatnonzero(x).tolist() for x in illegal[:, 0]] == [[0], [1], [0, 1, 2], [0], [1]]
    np.testing.assert_array_equal(illegal[:, 0], illegal[:, 1])


def test_masks_stay_0_based_where_actions_have_a_start():
    found = play(make("MaskedStart", action_mask=True), [[2, 2]])
    assert found.action_mask.tolist() == [[[False, False, True]] * 2] * 2
    assert found.observation[1, :, 1].tolist() == [12, 12]


def test_masks_of_components_are_joined():
    found = play(make("MaskedComponents", action_mask=True), np.zeros((1, 2, 2), int))
    assert found.action_mask[1].tolist() == [[True, False, False, True, True]] * 2


def test_masks_that_are_not_there():
    with pytest.raises(ConfigError, match=r"the info of env 0 has no 'action_mask'; give it in reset and step"):
        make(action_mask=True).reset(0)
    with pytest.raises(ConfigError, match=r"actions of '.*TestContinuous-v0' are continuous; use False"):
        _ = make("Continuous", action_mask=True).spec
    assert make("Masked").reset(0).action_mask is None


def test_a_space_without_a_spec():
    space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Text(3)})
    with pytest.raises(ConfigError, match=r"observation space Text\(.*\) has no fixed shape; known: Box, Discrete"):
        build.resolve("flaxrl.envs.gymnasium_spaces:observation_spec")(space, "X-v0")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"action space .* is none of Discrete"):
        build.resolve("flaxrl.envs.gymnasium_spaces:action_spec")(space, "X-v0")  # type: ignore[operator]

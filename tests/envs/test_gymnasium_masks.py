"""Gymnasium's action masks: of single actions, of components, and over their combinations."""

from __future__ import annotations

import numpy as np
import pytest

from flaxrl.envs.spec import Discrete
from flaxrl.errors import ConfigError
from tests.envs.gymnasium_envs import JointMask
from tests.envs.test_gymnasium import make, play


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


def test_masks_of_components_are_joined():
    found = play(make("MaskedComponents", action_mask=True), np.zeros((1, 2, 2), int))
    assert found.action_mask[1].tolist() == [[True, False, False, True, True]] * 2


def test_masks_that_are_not_there():
    with pytest.raises(ConfigError, match=r"the info of env 0 has no 'action_mask'; give it in reset and step"):
        make(action_mask=True).reset(0)
    with pytest.raises(ConfigError, match=r"actions of '.*TestContinuous-v0' are continuous; use False"):
        _ = make("Continuous", action_mask=True).spec
    assert make("Masked").reset(0).action_mask is None


@pytest.mark.parametrize(
    ("nvec", "mode", "workers"), [((2, 3), "next_step", 0), ((2, 2), "same_step", 0), ((2, 3), "disabled", 2)]
)
def test_masks_over_combinations(nvec, mode, workers):
    """One flat Discrete; the env, which checks what it gets, receives components."""
    env = make("JointMask", action_mask=True, autoreset=mode, workers=workers, kwargs={"nvec": nvec})
    assert env.spec.action == Discrete(nvec[0] * nvec[1])
    combinations = np.argwhere(np.ones(nvec))  # the last component runs fastest
    legal = [(combinations.sum(-1) + t) % 2 == 0 for t in (0, 1, 2, 3, 0)]
    actions = [(np.flatnonzero(legal[0])[-1], 0), (1, 1), (0, np.flatnonzero(legal[2])[-1]), (0, 0)]
    found = play(env, actions)
    for t, expected in enumerate(legal):
        np.testing.assert_array_equal(found.action_mask[t], [expected, expected])
    for t, row in enumerate(actions[:3]):  # the fourth is not executed
        for i, action in enumerate(row):
            first, second = combinations[action]
            hot = np.concatenate([np.eye(nvec[0])[first], np.eye(nvec[1])[second]])
            np.testing.assert_array_equal(found.observation[t + 1, i], hot)


def test_masks_keep_their_form():
    env = make("JointMask", action_mask=True, kwargs={"later": "flat"})
    env.reset(0)
    with pytest.raises(ConfigError, match=r"env 0 has the shape \(6,\), .* must have the shape \(2, 3\) on every row"):
        env.step(np.zeros(2, int))
    env.close()


def test_masks_of_another_size():
    env = make("JointMask", action_mask=True, kwargs={"turned": True})
    with pytest.raises(ConfigError, match=r"the shape \(3, 2\), 6 entries in all; it must have 5 entries, "):
        env.reset(0)
    env.close()


def test_a_vector_env_of_its_own_is_looked_at_too():
    env = make("SameStep", action_mask=True, vectorized=True, kwargs={"game": JointMask})
    assert env.spec.action == Discrete(6)
    assert play(env, [[0, 0]]).action_mask[1].tolist() == [[False, True, False, True, False, True]] * 2

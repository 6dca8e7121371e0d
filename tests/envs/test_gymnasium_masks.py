"""Gymnasium's action masks: of single actions and of components."""

from __future__ import annotations

import numpy as np
import pytest

from flaxrl.errors import ConfigError
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

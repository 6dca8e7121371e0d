"""What an env accepts: masks that leave an action to take."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.envs.spec import Discrete, MultiDiscrete, any_legal


@pytest.mark.parametrize("xp", [np, jnp])
def test_any_legal(xp):
    mask = xp.asarray([[False, False, True, False, True], [True, False, False, True, False], [False] * 5])
    assert any_legal(MultiDiscrete((2, 3)), mask).tolist() == [False, True, False]
    assert any_legal(Discrete(5), mask).tolist() == [True, True, False]

"""Actions and masks of games as the agent has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs

from flaxrl.envs.action_layout import layout_of
from flaxrl.envs.spec import Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError


def test_one_component():
    layout = layout_of(specs.DiscreteArray(5), (5,), "g")
    assert layout.spec == Discrete(5) and layout.masked
    assert int(layout.to_game(jnp.int32(3))) == 3
    assert layout.to_agent(jnp.array([1, 0, 1, 1, 0], bool)).tolist() == [True, False, True, True, False]


def test_a_scalar_that_does_not_start_at_0():
    """AutoReset adds `start`, so the layout must not."""
    layout = layout_of(specs.BoundedArray((), jnp.int32, 2, 4), None, "g")
    assert layout.spec == Discrete(3, start=2) and not layout.masked
    assert int(layout.to_game(jnp.int32(4))) == 4


def test_a_joint_mask_makes_one_flat_action():
    """Every flat action is the pair whose legality its mask entry tells."""
    layout = layout_of(specs.MultiDiscreteArray(jnp.array([4, 10])), (4, 10), "g")
    assert layout.spec == Discrete(40) and layout.spec.shape == ()
    mask = np.random.default_rng(0).random((4, 10)) < 0.5
    flat = np.asarray(layout.to_agent(jnp.asarray(mask)))
    pairs = np.asarray(jax.vmap(layout.to_game)(jnp.arange(40)))
    assert pairs.dtype == np.int32 and {tuple(p) for p in pairs.tolist()} == set(np.ndindex(4, 10))
    np.testing.assert_array_equal(flat, mask[pairs[:, 0], pairs[:, 1]])


def test_masks_of_components_are_joined():
    layout = layout_of(specs.MultiDiscreteArray(jnp.array([3, 2, 3])), (3, 3), "g")
    assert layout.spec == MultiDiscrete((3, 2, 3))
    mask = jnp.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], bool)
    assert layout.to_agent(mask).tolist() == [True, False, True, False, True, True, True, False]
    assert layout.to_game(jnp.array([2, 0, 1])).tolist() == [2, 0, 1]


def test_whole_numbers_between_bounds():
    layout = layout_of(specs.BoundedArray((2,), jnp.int16, jnp.array([1, 0]), jnp.array([3, 4])), (2, 5), "g")
    assert layout.spec == MultiDiscrete((3, 5))
    game = layout.to_game(jnp.array([0, 4], jnp.int32))
    assert game.tolist() == [1, 4] and game.dtype == jnp.int16


def test_bounds_wider_than_the_mask():
    """Jumanji's MultiCVRP allows 0 to 21 for 21 nodes."""
    layout = layout_of(specs.BoundedArray((2,), jnp.int16, 0, 21), (2, 21), "g")
    assert layout.spec == MultiDiscrete((21, 21))
    assert layout.to_agent(jnp.ones((2, 21), bool)).shape == (42,)


def test_continuous_actions_are_a_vector():
    layout = layout_of(specs.BoundedArray((2, 2), jnp.float32, -1, jnp.array([[1.0, 2.0], [3.0, 4.0]])), None, "g")
    assert layout.spec == Box((-1.0,) * 4, (1.0, 2.0, 3.0, 4.0))
    assert layout.to_game(jnp.arange(4.0)).tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("spec", "mask", "message"),
    [
        (specs.MultiDiscreteArray(jnp.array([3, 4])), (3, 3), r"mask \(3, 3\) must be joint \(3, 4\) or .* neither"),
        (specs.MultiDiscreteArray(jnp.array([2, 2])), (2, 2), "fits both ways"),
        (specs.DiscreteArray(3), (4,), "neither"),
        (specs.BoundedArray((2,), jnp.float32, -1, 1), (2,), "over continuous actions"),
        (specs.Array((2,), jnp.int32), None, "have no bounds"),
    ],
)
def test_what_fits_in_no_way_or_in_two_is_refused(spec, mask, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(spec, mask, "g")

"""What agents see of Jumanji's games."""

from __future__ import annotations

import jax
import numpy as np

from flaxrl.envs import observations
from flaxrl.envs.jumanji import Jumanji
from flaxrl.envs.spec import ArraySpec
from tests.envs.test_jumanji import DOWN, RIGHT, _play, _small_maze


def test_maze_observations():
    grid, vector = _small_maze(), _small_maze(observation="maze_vector")
    assert grid.spec.observation == ArraySpec((3, 3, 3), np.dtype(np.float32))
    assert vector.spec.observation == ArraySpec((21,), np.dtype(np.float32))
    image = _play(grid, [RIGHT]).observation[1]
    assert image.sum() == 2 and image[0, 1, 0] == 1 and image[2, 2, 1] == 1
    flat = _play(vector, [RIGHT]).observation[1]
    assert np.flatnonzero(flat).tolist() == [0, 3 + 1, 6 + 2, 9 + 2]
    positions = _small_maze(observation="maze_positions")
    assert positions.spec.observation == ArraySpec((12,), np.dtype(np.float32))
    np.testing.assert_array_equal(_play(positions, [RIGHT]).observation[1], flat[..., :12])
    walls = Jumanji("maze-fixed").reset(jax.random.key(0))[1][..., 2]
    assert walls[0].tolist() == [0, 0, 1, 0, 0, 1, 0, 1, 1, 0]


def test_snake_and_2048_observations():
    assert Jumanji("snake").spec.observation == ArraySpec((12, 12, 5), np.dtype(np.float32))
    env = Jumanji("game2048")
    assert env.spec.observation == ArraySpec((4, 4, 18), np.dtype(np.float32))
    state, seen, _ = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(np.argmax(seen, -1), state.game.board)
    assert np.all(np.sum(seen, -1) == 1) and seen[..., 0].sum() == 15


def test_flat_observations_hold_every_leaf_but_the_mask():
    """Maze: two positions, 9 walls, the step."""
    flat = _play(_small_maze(observation="flatten"), [RIGHT, DOWN]).observation
    assert flat[2].tolist() == [1, 1, 2, 2, *[0] * 9, 2]
    # Minesweeper has no function of its own: board, mines, step
    assert Jumanji("minesweeper").spec.observation.shape == (102,)


def agent_row(observation):
    """An observation function of a user's own, with a tree."""
    return {"row": observation.agent_position.row, "wall": observation.walls}


def test_an_observation_function_of_ones_own():
    env = _small_maze(observation=f"{__name__}:agent_row")
    assert env.spec.observation == {
        "row": ArraySpec((), np.dtype(np.int32)),
        "wall": ArraySpec((3, 3), np.dtype(np.bool_)),
    }
    assert _play(env, [DOWN, RIGHT]).observation["row"].tolist() == [0, 1, 1]


def test_every_short_name_is_told():
    doc = Jumanji.__doc__
    assert doc is not None
    for name in observations.OBSERVATIONS:
        assert f"'{name}'" in doc

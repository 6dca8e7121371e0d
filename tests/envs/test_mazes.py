"""The two mazes whose walls stay."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import numpy as np
import pytest

from flaxrl.envs.jumanji import Jumanji
from flaxrl.envs.mazes import GOALS, ROWS, STARTS, empty_maze, fixed_maze
from flaxrl.errors import ConfigError


def _distances(walls: np.ndarray, start: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Steps from `start` to every cell that can be reached, breadth first."""
    found, queue = {start: 0}, deque([start])
    while queue:
        row, column = queue.popleft()
        for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            inside = 0 <= cell[0] < walls.shape[0] and 0 <= cell[1] < walls.shape[1]
            if inside and not walls[cell] and cell not in found:
                found[cell] = found[row, column] + 1
                queue.append(cell)
    return found


def _starts(env, number: int = 200):
    """Start and goal of `number` episodes, and the walls of the first."""
    states = jax.jit(jax.vmap(lambda key: env.reset(key)[0]))(jax.random.split(jax.random.key(0), number)).game
    agent, target = np.stack(states.agent_position, -1), np.stack(states.target_position, -1)
    return list(zip(map(tuple, agent.tolist()), map(tuple, target.tolist()), strict=True)), np.asarray(states.walls[0])


def test_the_fixed_maze_can_be_solved_from_every_start():
    generator: Any = fixed_maze().generator
    walls = generator.walls
    assert walls.shape == (10, 10) and walls.sum() == sum(row.count("1") for row in ROWS)
    assert walls[0].tolist() == [False, False, True, False, False, True, False, True, True, False]
    for start in STARTS:
        distances = _distances(walls, start)
        assert not walls[start]
        for goal in GOALS:
            assert not walls[goal] and goal != start
            assert 0 < distances[goal] < fixed_maze().time_limit == 100


def test_the_fixed_maze_draws_all_nine_pairs():
    pairs, walls = _starts(Jumanji("maze-fixed"))
    assert set(pairs) == {(s, g) for s in STARTS for g in GOALS}
    assert min(pairs.count(pair) for pair in set(pairs)) >= 10
    np.testing.assert_array_equal(walls, [[cell == "1" for cell in row] for row in ROWS])


def test_the_write_ups_four_pairs():
    pairs, _ = _starts(Jumanji("maze-fixed", kwargs={"pairs": 4}))
    assert set(pairs) == {(s, g) for s in STARTS[:2] for g in GOALS[:2]}


def test_the_empty_maze():
    pairs, walls = _starts(Jumanji("maze-empty"), 5)
    assert set(pairs) == {((0, 0), (9, 9))} and walls.shape == (10, 10) and not walls.any()
    assert empty_maze(4).time_limit == 16 and empty_maze(4, time_limit=7).time_limit == 7


def test_walls_stop_the_agent_and_the_mask_says_so():
    """Only right and down are open in the corner; the cell left of it is outside, so going there does nothing."""
    env = Jumanji("maze-empty", kwargs={"size": 3})
    state, _, mask = jax.jit(env.reset)(jax.random.key(0))
    assert mask.tolist() == [False, True, True, False]
    step = jax.jit(env.step)
    state, _, reward, *_ = step(state, np.int32(3), jax.random.key(1))
    assert tuple(map(int, state.game.agent_position)) == (0, 0) and reward == 0 and state.steps == 1
    state, *_, mask = step(state, np.int32(1), jax.random.key(1))
    assert tuple(map(int, state.game.agent_position)) == (0, 1) and mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("game", "kwargs", "message"),
    [
        ("maze-fixed", {"pairs": 5}, "pairs = 5 must be 9"),
        ("maze-empty", {"size": 1}, "size = 1 must be >= 2"),
        ("maze-empty", {"rows": 4}, "Maze-empty-v0 with kwargs .*'rows': 4.* cannot be made: TypeError"),
    ],
)
def test_wrong_arguments(game, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        _ = Jumanji(game, kwargs=kwargs).spec

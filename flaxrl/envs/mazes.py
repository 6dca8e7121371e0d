"""Mazes of 10 x 10 cells whose walls never change, as generators of Jumanji's Maze.

They are those of a public PPO write-up on Equinox: an empty one with one start and one goal, and one with walls and
several starts and goals. Positions are (row, column), from the top left.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jumanji.environments import Maze
from jumanji.environments.routing.maze.generator import Generator
from jumanji.environments.routing.maze.types import Position, State

from flaxrl.errors import ConfigError
from flaxrl.types import Array

ROWS = (
    "0010010110",
    "0010010000",
    "0000011011",
    "1111000010",
    "0000010010",
    "0010110000",
    "1010110111",
    "0010000100",
    "1100010110",
    "0000010000",
)
"""The fixed maze; 1 is a wall."""

STARTS = ((0, 0), (9, 0), (0, 9))
GOALS = ((3, 9), (7, 8), (7, 0))


class FixedGenerator(Generator):
    """One maze; each episode draws a start and a goal, evenly and independently.

    Args:
        walls: bool `[rows, columns]`.
        starts: where the agent may begin.
        goals: where the target may be.
    """

    def __init__(self, walls: np.ndarray, starts: tuple[tuple[int, int], ...], goals: tuple[tuple[int, int], ...]):
        super().__init__(*walls.shape)
        self.walls = walls
        self.starts = starts
        self.goals = goals

    def __call__(self, key: Array) -> State:
        """The first state of an episode; Maze fills in its action mask."""
        start_key, goal_key, key = jax.random.split(key, 3)
        return State(
            agent_position=_draw(start_key, self.starts),
            target_position=_draw(goal_key, self.goals),
            walls=jnp.asarray(self.walls),
            action_mask=jnp.zeros((4,), bool),  # Maze fills it in
            step_count=jnp.array(0, jnp.int32),
            key=key,
        )


def _draw(key: Array, positions: tuple[tuple[int, int], ...]) -> Position:
    row, column = jnp.asarray(positions, jnp.int32)[jax.random.randint(key, (), 0, len(positions))]
    return Position(row=row, col=column)


def empty_maze(size: int = 10, time_limit: int | None = None) -> Maze:
    """A square without walls: from the top left corner to the bottom right one.

    Args:
        size: rows and columns, at least 2.
        time_limit: steps an episode; None: `size * size`, Maze's own.

    Raises:
        ConfigError: too small.
    """
    if size < 2:
        raise ConfigError(f"Maze-empty: size = {size} must be >= 2")
    generator = FixedGenerator(np.zeros((size, size), bool), ((0, 0),), ((size - 1, size - 1),))
    return Maze(generator, time_limit=time_limit)


def fixed_maze(pairs: int = 9, time_limit: int | None = None) -> Maze:
    """The maze of ROWS with its three STARTS and three GOALS.

    Args:
        pairs: 9, or 4 for the first two starts and goals only: the write-up draws each index from {0, 1}.
        time_limit: steps an episode; None: 100, Maze's own.

    Raises:
        ConfigError: another number of pairs.
    """
    if pairs not in (4, 9):
        raise ConfigError(f"Maze-fixed: pairs = {pairs} must be 9 (all) or 4 (the first two starts and goals)")
    number = 3 if pairs == 9 else 2
    walls = np.array([[cell == "1" for cell in row] for row in ROWS])
    return Maze(FixedGenerator(walls, STARTS[:number], GOALS[:number]), time_limit=time_limit)


MAZES: dict[str, Callable[..., Maze]] = {"Maze-empty-v0": empty_maze, "Maze-fixed-v0": fixed_maze}
"""Ids beside those that Jumanji registers."""

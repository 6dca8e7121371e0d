"""What an agent sees of a Jumanji game: functions of the game's own observation, without its action mask.

Each takes one observation (Jumanji's structure, no batch) and answers an array or a tree of arrays, all of which
`config.env.observation` names: a short name of OBSERVATIONS, or 'package.module:function'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxrl import build, checks
from flaxrl.errors import ConfigError
from flaxrl.types import Array, PyTree


def flatten(observation: Any) -> Array:
    """All leaves but the action mask, float32 `[F]`, in the order of the game's fields."""
    fields = observation._asdict() if hasattr(observation, "_asdict") else dict(vars(observation))
    leaves = [jnp.ravel(x).astype(jnp.float32) for k, v in fields.items() if k != "action_mask" for x in _leaves(v)]
    return jnp.concatenate(leaves)


def _leaves(value: PyTree) -> list[Array]:
    return [jnp.asarray(x) for x in jax.tree.leaves(value)]


def maze_grid(observation: Any) -> Array:
    """Maze as planes, float32 `[rows, columns, 3]`: the agent, the target, the walls."""
    walls = observation.walls
    # Compared with every cell rather than scattered into one: what a CPU does faster.
    cells = jnp.arange(walls.size).reshape(walls.shape)
    places = (observation.agent_position, observation.target_position)
    planes = [cells == place.row * walls.shape[1] + place.col for place in places]
    return jnp.stack([*planes, walls], axis=-1).astype(jnp.float32)


def maze_positions(observation: Any) -> Array:
    """Row and column of Maze's agent, then of its target, each one-hot: float32 `[2 * (rows + columns)]`.

    Enough where the walls stay from episode to episode.
    """
    places = [
        jax.nn.one_hot(index, size, dtype=jnp.float32)
        for position in (observation.agent_position, observation.target_position)
        for index, size in zip(position, observation.walls.shape, strict=True)
    ]
    return jnp.concatenate(places)


def maze_vector(observation: Any) -> Array:
    """Maze as a vector, float32 `[2 * (rows + columns) + rows * columns]`: `maze_positions`, then the walls."""
    return jnp.concatenate([maze_positions(observation), observation.walls.ravel().astype(jnp.float32)])


def snake_grid(observation: Any) -> Array:
    """Snake's own planes, float32 `[rows, columns, 5]`: body, head, tail, fruit, age of each part of the body."""
    return observation.grid.astype(jnp.float32)


def game_2048_one_hot(observation: Any) -> Array:
    """The exponent of every tile one-hot (0: empty), float32 `[size, size, size * size + 2]`.

    A board of n cells holds no tile above 2 ** (n + 1).
    """
    board = observation.board
    return jax.nn.one_hot(board, board.size + 2, dtype=jnp.float32)


OBSERVATIONS: dict[str, Callable[[Any], PyTree]] = {
    "flatten": flatten,
    "maze_grid": maze_grid,
    "maze_positions": maze_positions,
    "maze_vector": maze_vector,
    "snake_grid": snake_grid,
    "game_2048_one_hot": game_2048_one_hot,
}
"""Short names that a config may give as `observation`."""

_OWN = {"Maze": maze_grid, "Snake": snake_grid, "Game2048": game_2048_one_hot}


def check_name(name: str | None, where: str) -> None:
    """Checks a name without importing what it stands for.

    Raises:
        ConfigError: neither None, a short name nor 'package.module:function'.
    """
    if name is not None and ":" not in name and name not in OBSERVATIONS:
        hint = checks.nearest(name, OBSERVATIONS)
        raise ConfigError(f"{where} = {name!r} is unknown; {hint} (or give your own as 'package.module:function')")


def function_for(name: str | None, game: str, where: str) -> Callable[[Any], PyTree]:
    """The function that `name` stands for.

    Args:
        name: short name, 'package.module:function', or None for the game's own, which is `flatten` where it has none.
        game: the class of the game ('Maze').
        where: the config field, for messages.

    Raises:
        ConfigError: naming what exists.
    """
    if name is None:
        return _OWN.get(game, flatten)
    check_name(name, where)
    if name in OBSERVATIONS:
        return OBSERVATIONS[name]
    try:
        return build.resolve(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error

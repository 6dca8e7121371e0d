"""Jumanji's own pictures of its games."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.envs.jumanji import Jumanji
from flaxrl.envs.jumanji_pictures import painter
from flaxrl.errors import ConfigError
from tests.envs.test_jumanji import RIGHT, _small_maze

ROUTING, PACKING, LOGIC, SWARMS = (f"jumanji.environments.{k}" for k in ("routing", "packing", "logic", "swarms"))


def generated(name: str, **sizes: int | float) -> dict[str, Any]:
    return {"generator": {"name": name, **sizes}}


GAMES = {
    # its viewer takes the grid, not the state
    "connector": generated(f"{ROUTING}.connector.generator:UniformRandomGenerator", grid_size=4, num_agents=2),
    # their render answers nothing
    "snake": {"num_rows": 4, "num_cols": 4},
    "search_and_rescue": generated(
        f"{SWARMS}.search_and_rescue.generator:RandomGenerator", num_searchers=2, num_targets=3
    ),
    # their viewers go by another name
    "graph_coloring": generated(f"{LOGIC}.graph_coloring.generator:RandomGenerator", num_nodes=4, edge_probability=0.5),
    "sliding_tile_puzzle": generated(f"{LOGIC}.sliding_tile_puzzle.generator:RandomWalkGenerator", grid_size=3),
    "flat_pack": generated(
        f"{PACKING}.flat_pack.generator:RandomFlatPackGenerator", num_row_blocks=2, num_col_blocks=2
    ),
    "mmst": generated(
        f"{ROUTING}.mmst.generator:SplitRandomGenerator",
        num_nodes=8,
        num_edges=10,
        max_degree=5,
        num_agents=2,
        num_nodes_per_agent=2,
        max_step=10,
    ),
}


SLOW = ("search_and_rescue", "mmst")


@pytest.mark.parametrize("game", [pytest.param(g, marks=[pytest.mark.slow] if g in SLOW else []) for g in GAMES])
def test_a_game_is_drawn(game):
    env = Jumanji(game, kwargs=GAMES[game])
    with jax.numpy_rank_promotion("allow"):  # SearchAndRescue relies on it
        frame = env.render(jax.jit(env.reset)(jax.random.key(0))[0])
    assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[-1] == 3
    assert len(np.unique(frame)) > 2, "a blank picture"


def test_jumanji_draws_its_states_without_a_window():
    """The agent's green is in the top left of a 3 x 3 maze, and one cell further right after a step."""
    env = _small_maze()
    env.prepare_render()
    state = jax.jit(env.reset)(jax.random.key(0))[0]
    first = env.render(state)
    second = env.render(jax.jit(env.step)(state, jnp.int32(RIGHT), jax.random.key(0))[0])
    assert first.dtype == np.uint8 and first.shape == second.shape and first.shape[-1] == 3

    def column(picture):
        return np.nonzero((picture == (0, 255, 0)).all(-1))[1].mean() / picture.shape[1]

    assert column(first) < 0.36 < column(second) < 0.64


def test_a_game_without_a_viewer_draws_nothing():
    class Dark:
        _viewer = None

    with pytest.raises(ConfigError, match="Jumanji's Dark draws nothing"):
        painter(Dark())


def test_a_viewer_that_fails_is_told_before_anything_is_filmed(monkeypatch):
    env = _small_maze()

    def broken(state):
        raise ValueError("no paint\nleft")

    monkeypatch.setattr(env.suite_env, "render", broken)
    with pytest.raises(ConfigError, match=r"Jumanji\.game = 'maze-empty' cannot be drawn: ValueError: no paint$"):
        env.prepare_render()

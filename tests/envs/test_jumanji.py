from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji.environments import Maze
from jumanji.types import StepType

from flaxrl import build, config_for
from flaxrl.envs import mazes
from flaxrl.envs.base import AutoReset
from flaxrl.envs.jumanji import Jumanji
from flaxrl.envs.spec import Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID

UP, RIGHT, DOWN, LEFT = range(4)
CLEANER = {
    "generator": {
        "name": "jumanji.environments.routing.cleaner.generator:RandomGenerator",
        "num_rows": 5,
        "num_cols": 5,
        "num_agents": 2,
    }
}


def _small_maze(**fields) -> Jumanji:
    """3 x 3 cells: the goal is 4 moves away."""
    return Jumanji("maze-empty", kwargs={"size": 3}, **fields)


def _play(env, actions, batch=1):
    """Rows `[T + 1, ...]` of the first env; all take the same actions."""
    auto = AutoReset(env)
    step = jax.jit(auto.step)
    state = jax.jit(auto.reset)(jax.random.split(jax.random.key(0), batch))
    rows = [state.timestep]
    for t, action in enumerate(actions):
        state = step(state, jnp.full((batch,), action, jnp.int32), jax.random.split(jax.random.key(t + 1), batch))
        rows.append(state.timestep)
    return jax.tree.map(lambda *x: np.stack([y[0] for y in x]), *rows)


# -- how episodes end ----------------------------------------------------------------------------------------------


def test_the_goal_of_a_maze_terminates():
    rows = _play(_small_maze(), [RIGHT, RIGHT, DOWN, DOWN, UP, RIGHT])
    assert rows.step_type.tolist() == [FIRST, MID, MID, MID, LAST, FIRST, MID]
    assert rows.reward.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert rows.discount.tolist() == [1, 1, 1, 1, 0, 1, 1]
    # the last observation is its own: the agent on the goal
    np.testing.assert_array_equal(rows.observation[4, ..., 0], rows.observation[4, ..., 1])
    assert rows.observation[5, 0, 0, 0] == 1


def test_the_time_limit_of_a_maze_truncates():
    """Up is a wall, so the agent stays in its corner until Maze's own limit, rows x columns."""
    rows = _play(_small_maze(), [UP] * 10)
    assert rows.step_type.tolist() == [FIRST, *[MID] * 8, LAST, FIRST]
    assert np.all(rows.discount == 1) and np.all(rows.reward == 0)


def test_the_goal_reached_at_the_limit_terminates():
    rows = _play(_small_maze(max_steps=4), [RIGHT, RIGHT, DOWN, DOWN])
    assert rows.step_type[4] == LAST and rows.discount[4] == 0 and rows.reward[4] == 1


def test_max_steps_replaces_the_limit_of_the_game():
    assert np.flatnonzero(_play(_small_maze(max_steps=2), [UP] * 6).step_type == LAST).tolist() == [2, 5]
    longer = _play(_small_maze(max_steps=12), [UP] * 12)
    assert np.flatnonzero(longer.step_type == LAST).tolist() == [12]


def test_snake_ends_at_a_wall_or_at_its_limit():
    """Going up from anywhere in 4 rows meets the wall within 4 steps; two steps may or may not."""
    rows = _play(Jumanji("snake", kwargs={"num_rows": 4, "num_cols": 4}), [UP] * 4)
    last = int(np.argmax(rows.step_type == LAST))
    assert last > 0 and rows.discount[last] == 0
    circle = [RIGHT, DOWN, LEFT, UP]  # stays inside whatever the start, unless the start is at the edge
    rows = _play(Jumanji("snake", max_steps=3), circle[:3])
    assert rows.step_type[3] == LAST and rows.discount[3] == 1


def test_2048_ends_when_nothing_moves_and_has_no_limit_of_its_own():
    env = Jumanji("Game2048", kwargs={"board_size": 2})
    assert env._made.limit is None
    rows = _play(env, [LEFT, UP, RIGHT, DOWN] * 8)
    last = rows.step_type == LAST
    assert last.any() and np.all(rows.discount[last] == 0) and not rows.action_mask[last].any()
    rows = _play(Jumanji("Game2048", max_steps=3), [LEFT, UP, RIGHT])
    assert rows.step_type[3] == LAST and rows.discount[3] == 1


class Interrupted(Maze):
    """A maze that breaks off after two steps, by its own say: the last timestep's discount stays 1."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        step_type = jnp.where(state.step_count >= 2, StepType.LAST, timestep.step_type)
        return state, dataclasses.replace(timestep, step_type=step_type)


def test_a_games_own_end_with_discount_1_truncates(monkeypatch):
    """Unless its discount is 0 on that step: the goal of 2 x 2 cells is two moves away."""

    def make(size: int = 3, time_limit: int | None = None) -> Interrupted:
        return Interrupted(mazes.empty_maze(size).generator, time_limit=time_limit)

    monkeypatch.setitem(mazes.MAZES, "Interrupted-v0", make)
    rows = _play(Jumanji("interrupted"), [UP] * 4)
    assert rows.step_type.tolist() == [FIRST, MID, LAST, FIRST, MID] and np.all(rows.discount == 1)
    rows = _play(Jumanji("interrupted", kwargs={"size": 2}), [RIGHT, DOWN])
    assert rows.step_type.tolist() == [FIRST, MID, LAST] and rows.discount.tolist() == [1, 1, 0]


def test_a_horizon_that_scales_the_rewards_terminates():
    """SearchAndRescue pays (limit - step) / limit a target: after the limit there is nothing left to gain."""
    env = Jumanji("search_and_rescue", max_steps=2)
    ends = []
    with jax.numpy_rank_promotion("allow"):  # this game relies on it
        state, *_ = jax.jit(env.reset)(jax.random.key(0))
        step = jax.jit(env.step)
        for _ in range(2):
            state, _, _, terminated, truncated, mask = step(state, jnp.zeros(env.spec.action.shape), jax.random.key(1))
            ends.append((bool(terminated), bool(truncated)))
            assert mask is None
    assert ends == [(False, False), (True, True)]


@pytest.mark.parametrize("game", ["maze", "snake", "game2048"])
def test_it_plays_what_jumanji_plays(game):
    """The same key and actions give the rewards, masks and ends of Jumanji's own env, its discount at a limit apart."""
    import jumanji

    limit: Any = {} if game == "game2048" else {"max_steps": 12}
    env = Jumanji(game, **limit)
    own: Any = jumanji.make({"maze": "Maze-v0", "snake": "Snake-v1"}.get(game, "Game2048-v1"))
    if limit:
        own = type(own)(time_limit=12)
    key = jax.random.key(5)
    state, _, mask = jax.jit(env.reset)(key)
    own_state, own_step = jax.jit(own.reset)(jax.random.key_data(key))
    step, step_own = jax.jit(env.step), jax.jit(own.step)
    random, legal = np.random.default_rng(0), mask
    for _ in range(12):
        np.testing.assert_array_equal(legal, own_step.observation.action_mask)
        action = jnp.int32(random.choice(np.flatnonzero(legal)))
        state, _, reward, terminated, truncated, legal = step(state, action, key)
        own_state, own_step = step_own(own_state, action)
        jax.tree.map(np.testing.assert_array_equal, state.game, own_state)
        assert float(reward) == float(own_step.reward)
        assert bool(terminated | truncated) == bool(own_step.last())
        if own_step.last():
            break
    if game == "maze":  # nobody walks to this goal by chance in 12 steps, and Jumanji calls that the end of the world
        assert bool(truncated) and not bool(terminated) and float(own_step.discount) == 0


# -- actions and masks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "kwargs", "action", "mask_size"),
    [
        ("maze", {}, Discrete(4), 4),
        ("minesweeper", {}, Discrete(100), 100),
        ("cleaner", CLEANER, MultiDiscrete((4, 4)), 8),
    ],
)
def test_actions_and_masks(game, kwargs, action, mask_size):
    spec = build.build(config_for("jumanji", game=game, kwargs=kwargs)).spec
    assert spec.action == action and spec.action_mask and spec.mask_size == mask_size


def test_games_without_masks():
    spec = Jumanji("rubiks_cube").spec
    assert spec.action == MultiDiscrete((6, 1, 3)) and not spec.action_mask


def test_a_flat_action_of_minesweeper_opens_its_cell():
    env = Jumanji("minesweeper")
    state, _, mask = jax.jit(env.reset)(jax.random.key(0))
    assert mask.shape == (100,) and bool(mask.all())
    state, _, _, terminated, _, mask = jax.jit(env.step)(state, jnp.int32(37), jax.random.key(1))
    assert not bool(mask[37]) and int(mask.sum()) == 99
    assert int(state.game.board[3, 7]) >= 0 or bool(terminated)


# -- names and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"),
    [("Maze-v0", 100), ("maze", 100), ("MAZE_FIXED", 100), ("maze-empty", 100), ("game_2048", None), ("Snake", 4000)],
)
def test_names(name, limit):
    assert Jumanji(name)._made.limit == limit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"game": "snaek"}, "Jumanji.game = 'snaek' is unknown; did you mean 'snake'"),
        ({"game": "maze-fixd"}, "did you mean 'mazefixed'"),
        ({"game": "snake", "kwargs": {"rows": 3}}, "Snake-v1 with kwargs {'rows': 3} cannot be made: TypeError"),
        ({"observation": "snake_grid"}, "observation = 'snake_grid' fails on 'Maze-v0': AttributeError"),
        ({"observation": "flaxrl.envs.observations:maze"}, "Jumanji.observation: .* did you mean 'maze_grid'"),
        ({"kwargs": {"generator": {"name": "no_such:Thing"}}}, "no module 'no_such'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(fields, message):
    with pytest.raises(ConfigError, match=message) as raised:
        _ = Jumanji(**fields).spec
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 0}, "max_steps = 0 must be >= 1"),
        ({"observation": "maze_gird"}, "Jumanji.observation = 'maze_gird' is unknown; did you mean 'maze_grid'"),
        ({"max_steps": 3, "kwargs": {"time_limit": 4}}, "are the same limit"),
    ],
)
def test_what_can_be_told_without_jumanji_is_told_at_once(fields, message):
    with pytest.raises(ConfigError, match=message):
        Jumanji(**fields)


def test_a_config_block_builds_it():
    env = build.build(config_for("jumanji", game="maze-empty", max_steps=5, kwargs={"size": 3}), "config.env")
    assert env == _small_maze(max_steps=5)


def test_constructing_does_not_import_jumanji():
    code = "import sys; from flaxrl.envs.jumanji import Jumanji; Jumanji(); assert 'jumanji' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "jumanji", None)
    with pytest.raises(ConfigError, match=r"pip install 'flaxrl\[jumanji\]'"):
        _ = Jumanji().spec


def test_the_first_use_may_be_under_a_trace():
    """What a game computes while it is built is kept, so it must not be of the trace."""
    env = _small_maze()
    keys = jax.random.split(jax.random.key(0), 2)
    jax.jit(jax.vmap(env.reset))(keys)
    state, *_ = env.reset(keys[0])
    jax.jit(env.step)(state, jnp.int32(RIGHT), keys[0])
    env.step(state, jnp.int32(RIGHT), keys[0])


def test_the_reset_is_not_paid_for_on_every_step():
    """Random mazes are generated in a loop; one step of a batch holds them in one branch of a conditional."""
    env = Jumanji("maze")
    auto = AutoReset(env)
    keys = jax.random.split(jax.random.key(0), 3)
    state = jax.eval_shape(auto.reset, keys)
    jaxpr = jax.make_jaxpr(auto.step)(state, jnp.zeros((3,), jnp.int32), keys).jaxpr
    outside = [e.primitive.name for e in jaxpr.eqns]
    assert "while" not in outside and "scan" not in outside and "cond" in outside
    assert "while" in str(jax.make_jaxpr(jax.vmap(env.reset))(keys))

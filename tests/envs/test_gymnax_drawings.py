"""Pictures of gymnax's games: what moves in the state moves in the picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from flaxrl import ConfigError
from flaxrl.envs.gymnax import Gymnax
from flaxrl.envs.gymnax_drawings import DRAWINGS, grid, is_grid, maze

ACCENT, BODY, GOAL = (0xC8, 0x55, 0x3D), (0x3B, 0x6E, 0xA5), (0x4C, 0x9F, 0x70)


def centre(picture: np.ndarray, colour: tuple[int, int, int]) -> tuple[float, float]:
    """Mean column and row of the pixels of a colour."""
    rows, columns = np.nonzero((picture == colour).all(-1))
    assert len(rows)
    return float(columns.mean()), float(rows.mean())


def draw(game: str, params: dict[str, Any], **state: Any) -> np.ndarray:
    picture = DRAWINGS[game](None, SimpleNamespace(**state), SimpleNamespace(**params))
    assert picture.dtype == np.uint8 and picture.shape == (160, 240, 3)
    return picture


def test_cart_and_pole_move() -> None:
    params = {"x_threshold": 2.4}
    middle = draw("CartPole-v1", params, x=0.0, theta=0.0)
    right = draw("CartPole-v1", params, x=2.4, theta=0.0)
    # The cart goes to within 4 % of the width of the right edge, 0.46 of the width from the middle.
    assert centre(right, BODY)[0] - centre(middle, BODY)[0] > 100
    assert centre(middle, ACCENT)[0] == pytest.approx(120, abs=1)
    leaning = draw("CartPole-v1", params, x=0.0, theta=0.3)
    # The middle of a pole of 60 pixels is sin(0.3) * 30 = 9 pixels to the right.
    assert centre(leaning, ACCENT)[0] == pytest.approx(129, abs=2)


def test_a_pendulum_at_angle_0_is_upright_and_turns_to_the_left() -> None:
    params = {"l": 1.0}
    up, left, down = (centre(draw("Pendulum-v1", params, theta=a), ACCENT) for a in (0.0, np.pi / 2, np.pi))
    assert up[1] < 60 and down[1] > 100 and left[0] < 100 and left[1] == pytest.approx(80, abs=2)


def test_an_acrobot_hangs_at_angle_0_and_its_second_angle_adds_to_the_first() -> None:
    params = {"link_length_1": 1.0, "link_length_2": 1.0}
    hanging = centre(draw("Acrobot-v1", params, joint_angle1=0.0, joint_angle2=0.0), BODY)
    raised = centre(draw("Acrobot-v1", params, joint_angle1=np.pi, joint_angle2=0.0), BODY)
    bent = centre(draw("Acrobot-v1", params, joint_angle1=np.pi / 2, joint_angle2=np.pi / 2), BODY)
    assert hanging[1] > 100 and raised[1] < 60 and bent[0] > 130 and bent[1] < 80


@pytest.mark.parametrize("game", ["MountainCar-v0", "MountainCarContinuous-v0"])
def test_a_car_in_the_valley_is_below_one_on_the_hill(game: str) -> None:
    params = {"min_position": -1.2, "max_position": 0.6, "goal_position": 0.5}
    low, high = (draw(game, params, position=p) for p in (-np.pi / 6, 0.45))
    assert centre(low, ACCENT)[1] > centre(high, ACCENT)[1] + 60
    assert abs(centre(high, ACCENT)[0] - centre(high, GOAL)[0]) < 12


def test_a_point_robot_goes_to_its_goal() -> None:
    params = {"circle_radius": 1.0, "goal_radius": 0.2}
    picture = draw("PointRobot-misc", params, pos=np.array([-1.0, 0.0]), goal=np.array([1.0, 0.0]))
    assert centre(picture, GOAL)[0] - centre(picture, ACCENT)[0] == pytest.approx(160, abs=2)


def test_a_grid_has_a_colour_for_each_channel_and_the_first_on_top() -> None:
    channels = np.zeros((5, 6, 3))
    channels[0, 0, 0] = channels[1, 1, 1] = channels[2, 2, 2] = 1
    channels[4, 5, :] = 1
    picture = grid(channels)
    assert picture.shape == (5, 6, 3) and (picture[3] == 0).all()
    shown = [tuple(picture[i, i]) for i in range(3)]
    assert len(set(shown)) == 3 and tuple(picture[4, 5]) == shown[0]
    assert (grid(channels[..., 0]) == grid(channels[..., :1])).all()
    assert [is_grid(s) for s in ((10, 5), (8, 8, 3), (4,), (1, 7), (3, 8, 2), ())] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_maze_shows_walls_goal_and_agent() -> None:
    walls = np.eye(4)
    picture = maze(walls, (1, 2), (3, 0))
    assert tuple(picture[1, 2]) == ACCENT and tuple(picture[3, 0]) == GOAL
    assert (picture[2, 2] == 32).all() and (picture[0, 3] == 255).all()
    assert tuple(maze(walls, (3, 0), (3, 0))[3, 0]) == ACCENT


@pytest.mark.parametrize(
    ("game", "shape"),
    [("CartPole-v1", (160, 240, 3)), ("Breakout-MinAtar", (10, 10, 3)), ("FourRooms-misc", (13, 13, 3))],
)
def test_gymnax_draws_its_states(game: str, shape: tuple[int, ...]) -> None:
    env = Gymnax(game)
    env.prepare_render()
    state, observation, _ = jax.jit(env.reset)(jax.random.key(0))
    picture = env.render(state)
    assert (picture.dtype, picture.shape) == (np.uint8, shape)
    if game == "Breakout-MinAtar":
        np.testing.assert_array_equal(picture.any(-1), np.asarray(observation).any(-1))


def test_a_game_without_a_picture_says_so() -> None:
    env = Gymnax("MemoryChain-bsuite")
    for ask in (env.prepare_render, lambda: env.render(None)):
        with pytest.raises(ConfigError, match=r"Gymnax.game = 'MemoryChain-bsuite' draws nothing; .* CartPole-v1, "):
            ask()

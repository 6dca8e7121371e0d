"""Pictures of gymnax's games: what a state looks like, drawn from its numbers. Nothing of gymnax is imported."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

_WIDTH, _HEIGHT = 240, 160  # pixels of what is not a grid
_PAPER, _INK, _BODY, _ACCENT, _GOAL = "#ffffff", "#202020", "#3b6ea5", "#c8553d", "#4c9f70"
_MIN_SIDE = 4  # a thinner observation is a vector with a shape, not a picture

Point = tuple[float, float]


def is_grid(shape: Sequence[int]) -> bool:
    """Whether an observation of this shape is a picture: `[H, W]` or `[H, W, C]`."""
    return len(shape) in (2, 3) and min(shape[:2]) >= _MIN_SIDE


def grid(observation: np.ndarray) -> np.ndarray:
    """A grid of cells, one pixel each, a colour for each channel; where several are set the lowest is seen.

    Args:
        observation: `[H, W]` or `[H, W, C]`; 0 is an empty cell.

    Returns:
        uint8 `[H, W, 3]`.
    """
    channels = observation[..., None] if observation.ndim == 2 else observation
    height, width, count = channels.shape
    picture = np.zeros((height, width, 3), np.uint8)
    for channel in reversed(range(count)):
        picture[channels[..., channel] != 0] = _colour(channel, count)
    return picture


def _colour(index: int, count: int) -> tuple[int, int, int]:
    """Colour `index` of `count` that differ in hue; the first is the brightest, for it is mostly the player."""
    red, green, blue = colorsys.hsv_to_rgb(0.13 + index / max(count, 3), 0.65, 1.0 if index == 0 else 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)


def maze(occupied: np.ndarray, position: Sequence[Any], goal: Sequence[Any]) -> np.ndarray:
    """A maze: walls, the goal, and the agent above both.

    Args:
        occupied: `[H, W]`, 1 is a wall.
        position: row and column of the agent.
        goal: row and column of the goal.

    Returns:
        uint8 `[H, W, 3]`, a pixel a cell.
    """
    picture = np.where(np.asarray(occupied)[..., None] != 0, np.uint8(32), np.uint8(255)) * np.ones(3, np.uint8)
    for (row, column), colour in ((goal, _GOAL), (position, _ACCENT)):
        picture[int(row), int(column)] = _rgb(colour)
    return picture


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


class _Canvas:
    """A sheet whose coordinates are the game's: x to the right, y up."""

    def __init__(self, centre: Point, scale: float, height: int = _HEIGHT):
        self._image = Image.new("RGB", (_WIDTH, height), _PAPER)
        self._draw = ImageDraw.Draw(self._image)
        self._centre, self._scale = centre, scale

    def _at(self, point: Point) -> Point:
        x, y = ((p - c) * self._scale for p, c in zip(point, self._centre, strict=True))
        return _WIDTH / 2 + x, self._image.height / 2 - y

    def lines(self, points: Sequence[Point], width: float, colour: str) -> None:
        """Joins points; `width` in pixels."""
        self._draw.line([self._at(p) for p in points], fill=colour, width=round(width), joint="curve")

    def disc(self, point: Point, pixels: float, colour: str) -> None:
        """A disc of a radius in pixels."""
        x, y = self._at(point)
        self._draw.ellipse((x - pixels, y - pixels, x + pixels, y + pixels), fill=colour)

    def box(self, point: Point, width: float, height: float, colour: str) -> None:
        """A box around a point; sides in pixels."""
        x, y = self._at(point)
        self._draw.rectangle((x - width / 2, y - height / 2, x + width / 2, y + height / 2), fill=colour)

    def pixels(self) -> np.ndarray:
        """uint8 `[H, W, 3]`."""
        return np.asarray(self._image)


def _cart_pole(env: Any, state: Any, params: Any) -> np.ndarray:
    x, theta = float(state.x), float(state.theta)
    scale = 0.46 * _WIDTH / float(params.x_threshold)
    canvas = _Canvas((0.0, 0.0), scale)
    pole = 60 / scale  # its true length would be a few pixels
    canvas.lines([(-10.0, -0.6), (10.0, -0.6)], 1, _INK)
    canvas.box((x, -0.6), 36, 18, _BODY)
    canvas.lines([(x, -0.6), (x + pole * math.sin(theta), -0.6 + pole * math.cos(theta))], 6, _ACCENT)
    canvas.disc((x, -0.6), 3, _INK)
    return canvas.pixels()


def _pendulum(env: Any, state: Any, params: Any) -> np.ndarray:
    theta = float(state.theta)
    canvas = _Canvas((0.0, 0.0), 65 / float(params.l))
    tip = (-float(params.l) * math.sin(theta), float(params.l) * math.cos(theta))
    canvas.lines([(0.0, 0.0), tip], 10, _ACCENT)
    canvas.disc((0.0, 0.0), 4, _INK)
    return canvas.pixels()


def _acrobot(env: Any, state: Any, params: Any) -> np.ndarray:
    first, both = float(state.joint_angle1), float(state.joint_angle1) + float(state.joint_angle2)
    one, two = float(params.link_length_1), float(params.link_length_2)
    canvas = _Canvas((0.0, 0.0), 70 / (one + two))
    elbow = (one * math.sin(first), -one * math.cos(first))
    tip = (elbow[0] + two * math.sin(both), elbow[1] - two * math.cos(both))
    canvas.lines([(-10.0, one), (10.0, one)], 1, _GOAL)  # the height that the tip has to reach
    canvas.lines([(0.0, 0.0), elbow, tip], 7, _BODY)
    for joint in ((0.0, 0.0), elbow):
        canvas.disc(joint, 4, _ACCENT)
    return canvas.pixels()


def _mountain_car(env: Any, state: Any, params: Any) -> np.ndarray:
    low, high = float(params.min_position), float(params.max_position)

    def place(position: float) -> Point:
        return position, 0.45 * math.sin(3 * position)

    canvas = _Canvas(((low + high) / 2, 0.1), 0.95 * _WIDTH / (high - low))
    canvas.lines([place(p) for p in np.linspace(low, high, 80)], 2, _INK)
    flag = place(float(params.goal_position))
    canvas.lines([flag, (flag[0], flag[1] + 0.2)], 3, _GOAL)
    car = place(float(state.position))
    canvas.disc((car[0], car[1] + 0.05), 6, _ACCENT)
    return canvas.pixels()


def _point_robot(env: Any, state: Any, params: Any) -> np.ndarray:
    radius = float(params.circle_radius)
    canvas = _Canvas((0.0, 0.4 * radius), 80 / radius)
    arc = [(radius * math.cos(a), radius * math.sin(a)) for a in np.linspace(0, math.pi, 60)]
    canvas.lines(arc, 1, _INK)
    canvas.disc((float(state.goal[0]), float(state.goal[1])), 80 * float(params.goal_radius) / radius, _GOAL)
    canvas.disc((float(state.pos[0]), float(state.pos[1])), 4, _ACCENT)
    return canvas.pixels()


def _rooms(env: Any, state: Any, params: Any) -> np.ndarray:
    return maze(np.asarray(env.occupied_map), state.pos, state.goal)


DRAWINGS: dict[str, Callable[[Any, Any, Any], np.ndarray]] = {
    "CartPole-v1": _cart_pole,
    "Pendulum-v1": _pendulum,
    "Acrobot-v1": _acrobot,
    "MountainCar-v0": _mountain_car,
    "MountainCarContinuous-v0": _mountain_car,
    "PointRobot-misc": _point_robot,
    "FourRooms-misc": _rooms,
    "MetaMaze-misc": _rooms,
}
"""gymnax id -> (gymnax env, its state, its parameters) -> uint8 `[H, W, 3]`; games with a grid to see are not here."""

"""The full screen of an Atari game, which the vector env does not show next to its observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SCREEN: dict[str, Any] = {
    "img_height": 210,
    "img_width": 160,
    "grayscale": False,
    "stack_num": 1,
    "num_threads": 1,
}
"""Settings of ALE's vector env that show the screen as it is; none of them changes the game."""


class AtariScreen:
    """A second copy of one game, played along: same seed, same actions, so the same game, sticky actions included.

    That it is the same is checked at each step.

    Args:
        make: gives a vector env of one game, with the settings of `SCREEN`.
    """

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._env: Any = None
        self._pixels: np.ndarray | None = None

    def reset(self, seed: int) -> None:
        """Starts the game from a seed."""
        if self._env is None:
            self._env = self._make()
        observation, _ = self._env.reset(seed=seed)
        self._pixels = observation[0, 0]

    def step(self, action: int, reward: float, frame_number: int) -> None:
        """Plays along.

        Args:
            action: of the game.
            reward: that the game answered.
            frame_number: of the game after it.

        Raises:
            RuntimeError: before `reset`; the copy does something else.
        """
        if self._env is None:
            raise RuntimeError("AtariScreen.step before AtariScreen.reset")
        observation, rewards, _, _, info = self._env.step(np.array([action], np.int32))
        self._pixels = observation[0, 0]
        answer = float(rewards[0]), int(info["episode_frame_number"][0])
        if answer != (reward, frame_number):
            raise RuntimeError(
                f"the copy of the game that is filmed left it: reward and frame are {answer}, the game's are "
                f"{(reward, frame_number)}"
            )

    def pixels(self) -> np.ndarray:
        """The screen, uint8 `[210, 160, 3]`.

        Raises:
            RuntimeError: before `reset`.
        """
        if self._pixels is None:
            raise RuntimeError("AtariScreen.pixels before AtariScreen.reset")
        return self._pixels

    def close(self) -> None:
        """Ends the emulator; may be called twice."""
        if self._env is not None:
            self._env.close()
            self._env = None

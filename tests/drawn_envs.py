"""Scripted envs that draw themselves: a dark square of 8 x 8 with a bright pixel in row 0 for each step done."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxrl.envs.fake import HostScripted, Scripted


def picture(time: int) -> np.ndarray:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[0, :time] = 255
    return pixels


class DrawnScripted(Scripted):
    """In JAX; chance adds 0 to 7 to each reward."""

    def step(self, state: Any, action: Any, key: Any) -> Any:
        state, observation, reward, *rest = super().step(state, action, key)
        return state, observation, reward + jax.random.randint(key, (), 0, 8), *rest

    def render(self, state: Any) -> np.ndarray:
        return picture(int(state.time))


class DrawnHost(HostScripted):
    """On the host."""

    def render(self) -> np.ndarray:
        return picture(int(self._time[0]))

"""Jumanji's own pictures of its games, drawn by matplotlib without a window."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flaxrl.errors import ConfigError


def windowless(env: Any) -> Any:
    """A Jumanji env's viewer, made to answer pixels.

    Games build their viewer for a screen, and have no argument to change that.

    Raises:
        ConfigError: this game has no viewer of matplotlib's.
    """
    viewer = getattr(env, "_viewer", None)
    if viewer is None or not hasattr(viewer, "_display_rgb_array") or not hasattr(viewer, "_get_fig_ax"):
        raise ConfigError(f"Jumanji's {type(env).__name__} draws nothing: it has no viewer that answers pixels")
    viewer._display = viewer._display_rgb_array
    viewer._get_fig_ax = functools.partial(viewer._get_fig_ax, show=False)
    return viewer


def picture(viewer: Any, state: Any) -> np.ndarray:
    """The picture of a game's state, uint8 `[H, W, 3]`.

    Args:
        viewer: as `windowless` gives it.
        state: Jumanji's own.
    """
    # The canvas is painted over by the next picture.
    return np.array(viewer.render(state), np.uint8)[..., :3]

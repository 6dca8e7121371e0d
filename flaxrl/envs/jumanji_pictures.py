"""Jumanji's own pictures of its games, drawn by matplotlib without a window."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from flaxrl.errors import ConfigError

_VIEWERS = ("_viewer", "_env_viewer", "viewer")
"""Attributes in which Jumanji's games keep their viewer."""


def painter(env: Any) -> Callable[[Any], np.ndarray]:
    """What draws the states of a Jumanji env: Jumanji's state -> uint8 `[H, W, 3]`.

    Games build their viewer for a screen, and have no argument to change that.

    Raises:
        ConfigError: this game has no viewer of matplotlib's.
    """
    viewer = next((v for name in _VIEWERS if (v := getattr(env, name, None)) is not None), None)
    if not hasattr(viewer, "_display_rgb_array") or not hasattr(viewer, "_get_fig_ax"):
        raise ConfigError(f"Jumanji's {type(env).__name__} draws nothing: it has no viewer that answers pixels")
    assert viewer is not None
    shown: list[np.ndarray] = []

    def keep(figure: Any) -> np.ndarray:
        _put_in_view(figure)
        # The canvas is painted over by the next picture.
        shown.append(np.array(viewer._display_rgb_array(figure), np.uint8)[..., :3])
        return shown[-1]

    viewer._display = keep
    viewer._get_fig_ax = functools.partial(viewer._get_fig_ax, show=False)

    def paint(state: Any) -> np.ndarray:
        # The env knows which part of its state its viewer takes, but not every one hands on what the viewer answers.
        env.render(state)
        return shown.pop()

    return paint


def _put_in_view(figure: Any) -> None:
    """Extends axes without limits to the lines in them: matplotlib does not count what a viewer adds as an artist."""
    for axes in figure.axes:
        if axes.lines and not np.isfinite(axes.dataLim.get_points()).all():
            axes.update_datalim(np.concatenate([line.get_xydata() for line in axes.lines]))
            axes.autoscale_view()

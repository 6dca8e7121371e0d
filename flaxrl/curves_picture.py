"""The picture of learning curves, by matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flaxrl import checks
from flaxrl.errors import ConfigError

if TYPE_CHECKING:
    from flaxrl.curves import Curve

SUFFIXES = (".png", ".svg", ".pdf")

_INCHES, _DPI = (6.4, 3.6), 120


def check(out: str) -> Path:
    """The path of a picture, checked before anything is read.

    Raises:
        ConfigError: another suffix, a folder, a place that cannot be written, or matplotlib missing.
    """
    path = Path(out)
    if path.is_dir():
        raise ConfigError(f"--out={out} is a folder; give a file, {path / 'curves.png'}")
    if path.suffix.lower() not in SUFFIXES:
        known = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise ConfigError(f"--out={out} must end in {known}; did you mean {path.with_suffix('.png')}?")
    checks.writable(path, "--out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--mode=plot needs matplotlib: pip install 'flaxrl[plot]'")
    return path


def draw(curves: Sequence[Curve], what: str, path: Path) -> None:
    """Draws each curve as its mean, with one standard deviation to both sides shaded where it has several agents.

    Args:
        curves: one or more.
        what: name of the vertical axis.
        path: of the picture; its folder is made.
    """
    # Without pyplot: no window system is asked for, and nothing is left behind in the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        label = f"{curve.label} ({curve.agents} seeds)" if curve.agents > 1 else curve.label
        # Marks where there is something between them to see; a long training log is a line.
        (line,) = axes.plot(curve.steps, curve.mean, marker="o" if len(curve.steps) < 50 else "", ms=3, label=label)
        if curve.agents > 1:
            low, high = curve.mean - curve.std, curve.mean + curve.std
            axes.fill_between(curve.steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel="agent steps", ylabel=what)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

"""Learning curves of runs: what their folders hold, grouped by config, as mean and spread, drawn to a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxrl import checks, curves_picture
from flaxrl.errors import ConfigError
from flaxrl.run_folder import RunFolder

METRICS = {"eval/return_mean": "evaluation return", "actor/episode_return": "return of training episodes"}
"""What can be drawn, the best first, and what the axis calls it."""

DEFAULT_OUT = "curves.png"

_SAME_GROUP = (
    *("seed", "num_seeds", "sweep", "log", "checkpoint", "mesh", "learner.accumulation"),
    *("eval.every", "eval.video_episodes", "eval.video_frames"),
)
"""Fields and blocks in which runs of a group may differ: they change neither what is learned nor how it is judged."""

_MOST_SHOWN = 3  # differences in a line of the legend
_ENOUGH = 2  # points that make a curve


@dataclass(frozen=True)
class Series:
    """One agent's returns over its training.

    Attributes:
        steps: agent steps, ascending, `[N]`.
        values: returns, `[N]`.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        path: of the folder.
        config: dotted path -> value.
        rows: lines of `metrics.jsonl`.
    """

    path: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Reads a folder.

        Raises:
            ConfigError: no run there, or one that has written no metrics yet.
        """
        config = RunFolder(path).fields()
        file = path / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [row for row in map(_row, lines) if row is not None]
        if not rows:
            raise ConfigError(f"{path} has no metrics to draw yet (log.writers must have 'json_lines')")
        return cls(path, config, rows)

    def agents(self, metric: str) -> dict[str, list[Series]]:
        """The run's agents by setting of its sweep, '' where it has none; empty where it has no such metric.

        A run of many seeds or settings writes `METRIC/seed_I`, `METRIC/SETTING` or `METRIC/SETTING/seed_I` beside the
        mean over all, which counts only where it is alone.
        """
        pattern = re.compile(rf"{metric}(?:/(?!seed_\d+$)(?P<setting>[^/]+))?(?P<seed>/seed_\d+)?")
        found: dict[str, dict[bool, list[Series]]] = {}
        for name in dict.fromkeys(name for row in self.rows for name in row):
            match = pattern.fullmatch(name)
            if match and len((series := self._series(name)).steps):
                found.setdefault(match["setting"] or "", {}).setdefault(bool(match["seed"]), []).append(series)
        agents = {setting: kinds.get(True) or kinds[False] for setting, kinds in found.items()}
        return {setting: a for setting, a in agents.items() if setting} or agents

    def _series(self, name: str) -> Series:
        points = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return Series(np.array(steps, np.int64), np.array(values, np.float64))


@dataclass(frozen=True)
class Curve:
    """Mean and spread of a group of agents.

    Attributes:
        label: for the legend.
        steps: at which some agent of the group has a value, `[N]`.
        mean: over the agents that have come that far, `[N]`.
        std: their standard deviation, `[N]`; 0 where there is one.
        agents: how many they are.
    """

    label: str
    steps: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    agents: int


def plot(workdirs: Sequence[str], out: str | None = None) -> str:
    """Draws the runs of some folders.

    Args:
        workdirs: folders of runs, or folders that hold such folders.
        out: the picture's file; None is `DEFAULT_OUT`.

    Returns:
        What was drawn, in a few lines: each curve with its number of agents and its last value, and the file.

    Raises:
        ConfigError: a folder without runs, nothing to draw, a file that is no picture, matplotlib missing.
    """
    path = curves_picture.check(out or DEFAULT_OUT)
    metric, found = curves([Run.read(folder) for folder in run_folders(workdirs)])
    curves_picture.draw(found, METRICS[metric], path)
    return "\n".join([*map(_last, found), f"drew the {METRICS[metric]} into {path}"])


def _last(curve: Curve) -> str:
    """A curve's last value in a line."""
    several = curve.agents > 1
    seeds, spread = ("seeds", f" +- {curve.std[-1]:.3g}") if several else ("seed", "")
    return f"{curve.label}: {curve.agents} {seeds}, {curve.mean[-1]:.6g}{spread} at step {curve.steps[-1]:,}"


def run_folders(workdirs: Sequence[str]) -> list[Path]:
    """The runs' folders that the given ones are or hold, each once.

    Raises:
        ConfigError: one of them neither is nor holds any.
    """
    found: dict[Path, None] = {}
    for workdir in workdirs:
        path = Path(workdir)
        inside = [path] if RunFolder(path).has_run else sorted(p.parent for p in path.glob("*/config.json"))
        if not inside:
            beside = [str(p.parent) for p in path.parent.glob("*/config.json")]
            hint = f"; {checks.nearest(workdir, beside)}" if beside else ""
            raise ConfigError(f"--workdir={workdir} neither is a run's folder nor holds one{hint}")
        found |= dict.fromkeys(inside)
    return list(found)


def curves(runs: Sequence[Run]) -> tuple[str, list[Curve]]:
    """The metric that all runs have, and a curve for each group of runs whose configs differ in no more than the seed.

    Evaluations are taken where every run has two or more of them, else the returns of training episodes.

    Raises:
        ConfigError: a run has neither.
    """
    metric = _metric(runs)
    groups: dict[str, tuple[dict[str, Any], list[Series]]] = {}
    for run in runs:
        for setting, agents in run.agents(metric).items():
            config = _compared(run.config) | ({"sweep": setting} if setting else {})
            groups.setdefault(json.dumps(config, sort_keys=True), (config, []))[1].extend(agents)
    labels = _labels([config for config, _ in groups.values()])
    return metric, [_curve(label, agents) for label, (_, agents) in zip(labels, groups.values(), strict=True)]


def _metric(runs: Sequence[Run]) -> str:
    def lacking(metric: str) -> list[Path]:
        found = [(run.path, [s for agents in run.agents(metric).values() for s in agents]) for run in runs]
        return [path for path, series in found if not series or min(len(s.steps) for s in series) < _ENOUGH]

    for metric in METRICS:
        if not lacking(metric):
            return metric
    names = " or ".join(map(repr, METRICS))
    raise ConfigError(
        f"{lacking(list(METRICS)[-1])[0]} has too little for a curve: all runs need {_ENOUGH} or more points of "
        f"{names}; set config.log.every or config.eval.every lower"
    )


def _curve(label: str, agents: Sequence[Series]) -> Curve:
    """Mean and spread at every step that an agent has; between its own steps an agent is interpolated."""
    steps = np.unique(np.concatenate([s.steps for s in agents]))
    values = np.stack([np.interp(steps, s.steps, s.values, left=np.nan, right=np.nan) for s in agents])
    return Curve(label, steps, np.nanmean(values, axis=0), np.nanstd(values, axis=0), len(agents))


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    """The fields in which runs of a group agree."""

    def ignored(path: str) -> bool:
        return any(path == same or path.startswith(f"{same}.") for same in _SAME_GROUP)

    return {path: value for path, value in config.items() if not ignored(path)}


def _labels(configs: Sequence[dict[str, Any]]) -> list[str]:
    """What tells each group from the others: the fields that differ, at most a few, numbered where they do not do.

    Args:
        configs: fields of each group, dotted path -> value; 'sweep' -> a setting in words.
    """
    if len(configs) == 1:
        return [_name(configs[0])]
    absent = object()
    names = dict.fromkeys(name for config in configs for name in config)
    differing = [n for n in names if any(c.get(n, absent) != configs[0].get(n, absent) for c in configs)]
    # The fields of two different losses say no more than the losses' names.
    other_class = tuple(n.removesuffix("name") for n in differing if n.endswith(".name"))
    told = [n for n in differing if n.endswith(".name") or not n.startswith(other_class or (" ",))]
    labels = []
    for config in configs:
        parts = [
            str(config[n]) if n == "sweep" else f"{_short(n, told)}={config[n]}"
            for n in told[:_MOST_SHOWN]
            if n in config
        ]
        # A run without a sweep beside one with it has no field of its own to tell.
        labels.append(", ".join([*parts, *(["..."] if len(told) > _MOST_SHOWN else [])]) or _name(config))
    return [f"{label} ({i + 1})" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _short(name: str, others: Sequence[str]) -> str:
    """The last part of a dotted path, with as much before it as tells it from the others; `loss.name` is `loss`."""
    parts = name.removesuffix(".name").split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if sum(other.removesuffix(".name").endswith("." + tail) for other in others) == 1:
            return tail
    return ".".join(parts)


def _name(fields: dict[str, Any]) -> str:
    """Loss and env of a run, from its config's fields by dotted path."""
    env = next((str(fields[k]) for k in ("env.game", "env.id", "env.name") if fields.get(k)), "")
    return " on ".join(str(part) for part in (fields.get("loss.name"), env) if part)


def _row(line: str) -> dict[str, Any] | None:
    """A line of metrics; None for one that a kill tore."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None

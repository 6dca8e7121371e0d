"""Metrics of many seeds: means, deviations, and the returns of every seed; the table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxrl.trainers.metrics import MetricsBuffer
from flaxrl.trainers.seeds import Seeds

EVERY_SEED = ("actor/episode_return", "eval/return_mean", "loss/skipped")
"""Metrics of which each seed's own value is told, beside mean and deviation."""

STD = "_seed_std"
_RETURNS = (("evaluation", "eval/return_mean"), ("training", "actor/episode_return"))


def spread(seeds: Seeds, name: str, values: Any) -> dict[str, float]:
    """One metric of all runs as flat metrics.

    Without a sweep `NAME` is the mean over seeds, `NAME_seed_std` their standard deviation, and `NAME/seed_I` the value
    of each. With a sweep `NAME` is the mean over all runs, and a setting's are `NAME/SETTING`, `NAME_seed_std/SETTING`
    and `NAME/SETTING/seed_I`. Every seed weighs the same.

    Args:
        seeds: the runs.
        name: of the metric.
        values: `[N]`; masked where a run has nothing to tell, which is left out.
    """
    rows = np.ma.asarray(values, np.float64).reshape(len(seeds.sweep.settings), len(seeds.seeds))
    found: dict[str, Any] = {name: rows}
    for label, row in zip(seeds.sweep.labels, rows, strict=True):
        end = f"/{label}" if label else ""
        found[name + end] = row
        if len(seeds.seeds) > 1:
            found[name + STD + end] = row - row.mean()
            if name in EVERY_SEED:
                found |= {f"{name}{end}/seed_{seed}": row[i : i + 1] for i, seed in enumerate(seeds.seeds)}
    told = {key: x for key, x in found.items() if x.count()}
    return {k: float(np.sqrt(np.square(x).mean()) if STD in k else x.mean()) for k, x in told.items()}


class SeedMetrics(MetricsBuffer):
    """As MetricsBuffer, of metrics with a leading axis `[N]`, which `read` spreads.

    Args:
        seeds: the runs.
    """

    def __init__(self, seeds: Seeds):
        super().__init__()
        self._seeds = seeds

    def _means(self, pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
        means: dict[str, float] = {}
        for name, (total, count) in pairs.items():
            counted = np.maximum(count, np.finfo(np.float32).tiny)
            means |= spread(self._seeds, name, np.ma.masked_array(np.float64(total) / counted, np.equal(count, 0)))
        return means


def table(seeds: Seeds, metrics: Mapping[str, float], failed: np.ndarray) -> list[str]:
    """The last returns by setting, the best first; without a sweep, of all seeds in one row.

    Args:
        seeds: the runs.
        metrics: as `spread` made them; a metric that is missing is shown as '-'.
        failed: bool `[N]`.
    """
    by_setting = failed.reshape(len(seeds.sweep.settings), len(seeds.seeds)).sum(1)

    def shown(key: str) -> str:
        return f"{metrics[key]:.6g}" if key in metrics else "-"

    rows = []
    for values, label, lost in zip(seeds.sweep.settings, seeds.sweep.labels, by_setting, strict=True):
        end = f"/{label}" if label else ""
        cells = [f"{v:g}" for v in values]
        for _, name in _RETURNS:
            cells += [shown(name + end), shown(name + STD + end)]
        rows.append((metrics.get(f"eval/return_mean{end}", -np.inf), [*cells, str(lost)]))
    rows.sort(key=lambda row: -row[0])
    head = [*seeds.sweep.paths, *(x for what, _ in _RETURNS for x in (f"{what} return", "deviation")), "failed seeds"]
    lines = [head, *(cells for _, cells in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]

"""A metrics writer of one's own."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LongCsv:
    """`metrics.csv`: one (step, metric, value) a row, as plotting libraries like it.

    Args:
        workdir: the run's folder.
        start_step: step that the run starts or resumes from; rows beyond it, of a run that was killed, are dropped.
    """

    def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0):
        path = Path(workdir) / "metrics.csv"
        kept = [row for row in _rows(path) if int(row[0]) <= start_step]
        self._file = open(path, "w", newline="")  # noqa: SIM115 - closed by close()
        self._csv = csv.writer(self._file)
        self._csv.writerow(("step", "metric", "value"))
        self._csv.writerows(kept)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers at a step."""
        self._csv.writerows((step, name, float(value)) for name, value in scalars.items())

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes nothing: the run's folder has config.json."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Writes nothing: a row holds a number."""

    def flush(self) -> None:
        """Puts all rows on disk."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()


def _rows(path: Path) -> list[list[str]]:
    """Whole rows of the file, without its head and without a line that a kill tore."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return [row for row in list(csv.reader(file))[1:] if len(row) == 3 and row[2]]

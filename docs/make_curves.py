"""Draws the learning curves of docs/results/*.csv into docs/images/.

    python docs/make_curves.py                       # draws every file
    python docs/make_curves.py WORKDIR NAME TITLE    # first copies the evaluations of a run to docs/results/NAME.csv

A file holds `step,return_mean,return_std` of one run's evaluations; its first line is a comment with the title.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def copy_run(workdir: Path, name: str, title: str) -> None:
    """Writes the evaluations of a run's metrics.jsonl to docs/results/NAME.csv."""
    (HERE / "results").mkdir(exist_ok=True)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    with (HERE / "results" / f"{name}.csv").open("w", newline="") as file:
        file.write(f"# {title}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "return_mean", "return_std"])
        for row in rows:
            if "eval/return_mean" in row:
                writer.writerow([row["step"], f"{row['eval/return_mean']:.2f}", f"{row['eval/return_std']:.2f}"])


def draw(path: Path) -> None:
    """Draws one file: mean evaluation return over steps, one standard deviation over episodes shaded."""
    title, _, *lines = path.read_text().splitlines()
    step, mean, std = (list(column) for column in zip(*(map(float, line.split(",")) for line in lines), strict=True))
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=120)
    axes.plot([s / 1e6 for s in step], mean, marker="o", markersize=3)
    low, high = [m - s for m, s in zip(mean, std, strict=True)], [m + s for m, s in zip(mean, std, strict=True)]
    axes.fill_between([s / 1e6 for s in step], low, high, alpha=0.2, linewidth=0)
    axes.set(title=title.lstrip("# "), xlabel="agent steps (millions)", ylabel="evaluation return")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "images" / f"{path.stem}.png")
    plt.close(figure)


def main() -> None:
    """Copies a run where one is named (WORKDIR NAME TITLE), then draws every file."""
    if len(sys.argv) == 4:
        copy_run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    for path in sorted((HERE / "results").glob("*.csv")):
        draw(path)


if __name__ == "__main__":
    main()

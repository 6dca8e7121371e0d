"""Whether a run's memory grows: resident memory after some updates, and after many more.

    python -m benchmarks.memory [--config=FILE.py] [--first=500] [--last=2000] [--config.FIELD=VALUE ...]

What is there after the first updates (programs, envs, the first logs and checkpoints) is the run's own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that the file runs as a script, too

from benchmarks.report import load_config, print_json, print_table
from flaxrl.trainers.source import SourceStopped
from flaxrl.trainers.trainer import Trainer


class Watched(Trainer):
    """Notes the resident memory at some updates, and stops at the last of them.

    Args:
        config: of the run.
        workdir: its folder.
        at: numbers of updates, rounded up to whole calls.
    """

    def __init__(self, config: Any, workdir: str, at: Sequence[int]):
        super().__init__(config, workdir)
        per_call = self.plan.updates_per_call
        self.at = sorted({-(-n // per_call) * per_call for n in at})
        self._process = psutil.Process()
        self.seen: dict[int, float] = {}

    def _call(self) -> None:
        super()._call()
        if self.updates in self.at:
            jax.block_until_ready(self.state.params)
            self.seen[self.updates] = self._process.memory_info().rss / 2**20
        if self.updates >= self.at[-1]:
            raise SourceStopped


def _check(run: Watched, first: int, last: int) -> None:
    """Ends the program where the run could not be looked at twice."""
    if not 0 < first < last:
        raise SystemExit(f"error: --first={first} must be >= 1 and below --last={last}")
    plan = run.plan
    if plan.total_updates < last:
        steps = last * plan.steps_per_update
        raise SystemExit(
            f"error: the run ends after {plan.total_updates} updates, before --last={last}: "
            f"give it --config.total_steps={steps} or more, or a lower --last"
        )
    if len(run.at) < 2:
        raise SystemExit(
            f"error: --first={first} and --last={last} are in the same call of {plan.updates_per_call} updates: "
            f"give --last={run.at[-1] + 1} or more"
        )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table and the JSON line, and returns what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/impala_gymnax.py", help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument("--first", type=int, default=500, help="updates before the first look")
    parser.add_argument("--last", type=int, default=2000, help="updates before the last")
    options, overrides = parser.parse_known_args(argv)
    config = load_config(options.config, overrides)
    at = [options.first, (options.first + options.last) // 2, options.last]
    with tempfile.TemporaryDirectory() as folder:
        run = Watched(config, f"{folder}/run", at)
        _check(run, options.first, options.last)
        run.run()
    print_table([("updates", "resident, MiB"), *run.seen.items()])
    sizes = list(run.seen.values())
    result = {"first_mib": sizes[0], "last_mib": sizes[-1], "growth": sizes[-1] / sizes[0] - 1}
    print_json(result)
    return result


if __name__ == "__main__":
    main()

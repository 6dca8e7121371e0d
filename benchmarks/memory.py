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
    """Notes the resident memory at some updates, and stops at the last of them."""

    def __init__(self, config: Any, workdir: str, at: Sequence[int]):
        super().__init__(config, workdir)
        self._at, self._process = sorted(at), psutil.Process()
        self.seen: dict[int, float] = {}

    def _call(self) -> None:
        super()._call()
        if len(self.seen) < len(self._at) and self.updates >= self._at[len(self.seen)]:
            jax.block_until_ready(self.state.params)
            self.seen[self.updates] = self._process.memory_info().rss / 2**20
        if len(self.seen) == len(self._at):
            raise SourceStopped


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
        run.run()
    print_table([("updates", "resident, MiB"), *run.seen.items()])
    sizes = list(run.seen.values())
    result = {"first_mib": sizes[0], "last_mib": sizes[-1], "growth": sizes[-1] / sizes[0] - 1}
    print_json(result)
    return result


if __name__ == "__main__":
    main()

"""Many seeds in one program: what N of them cost, in times of what one costs.

    python -m benchmarks.seeds [--config=FILE.py] [--seeds=1,8] [--repeats=3] [--config.FIELD=VALUE ...]

Each repeat is a whole run in a process of its own, compiled anew, as in `benchmarks.ppo`: the rate is that of the
updates alone, the wall time holds tracing, compiling and the evaluation at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that the file runs as a script, too

from benchmarks.ppo import Job, measured
from benchmarks.report import print_json, print_table, rate_of


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table and the JSON line, and returns what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/ppo_cartpole.py", help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument(
        "--seeds", default="1,8", help="numbers of seeds, separated by commas; the first is compared with"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the median counts")
    options, overrides = parser.parse_known_args(argv)
    rows: list[tuple[Any, ...]] = [
        ("seeds", "steps/s of one", "of all", "updates cost", "wall s", "wall costs", "return")
    ]
    result: dict[str, Any] = {}
    first: dict[str, float] = {}
    for count in map(int, options.seeds.split(",")):
        job = Job(options.config, (f"--config.num_seeds={count}",), "", 0.0, None, None)
        runs = measured(job, options.repeats, overrides)
        rate, wall, score = (rate_of([run[key] for run in runs]) for key in ("steps_per_second", "wall", "return"))
        first = first or {"rate": rate.median, "wall": wall.median}
        updates_cost, wall_cost = first["rate"] / rate.median, wall.median / first["wall"]
        rows.append((count, rate, count * rate.median, updates_cost, wall, wall_cost, score))
        result |= {f"seeds_{count}_steps_per_second": rate, f"seeds_{count}_wall": wall}
        result |= {f"seeds_{count}_updates_cost": updates_cost, f"seeds_{count}_wall_cost": wall_cost}
    print_table(rows)
    print_json(result)
    return result


if __name__ == "__main__":
    main()

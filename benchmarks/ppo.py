"""PPO runs whole, on envs in JAX: how long they compile, how fast they are then, what the host adds, and the wall time.

    python -m benchmarks.ppo [--jobs=cartpole,maze,recurrent] [--repeats=3] [--config.FIELD=VALUE ...]

Each repeat is a whole run of the job's config in a process of its own, compiled anew; imports are left out of the wall
time and told beside it, the evaluation at the end is in it. PEERS holds what published programs took for the same job,
alone on two cores of an x86-64 CPU (Zen 3): ratios mean something on a machine of that kind.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_BEGAN = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parent.parent))  # so that the file runs as a script, too

import jax

from benchmarks.report import load_config, print_json, print_table, rate_of
from flaxrl.cpu_devices import use_cores
from flaxrl.trainers.trainer import Trainer

ROOT = Path(__file__).parent.parent


class Job(NamedTuple):
    """A config, what changes in it to be the peer's job, and the peer's figures.

    Attributes:
        config: FILE.py or FILE.py:ARGUMENT.
        overrides: '--config.FIELD=VALUE' arguments.
        peer: name.
        steps_per_second: of the peer, compiling left out.
        compile_seconds: of the peer, tracing included; None where not known.
        wall_seconds: of the peer, imports left out; None where not known.
    """

    config: str
    overrides: tuple[str, ...]
    peer: str
    steps_per_second: float
    compile_seconds: float | None
    wall_seconds: float | None


JOBS = {
    "cartpole": Job("configs/ppo_cartpole.py", (), "PureJaxRL", 77_300, 8.2, 14.3),
    "maze": Job("configs/ppo_maze.py:medium", (), "the Equinox PPO write-up", 21_000, 12.2, 50.8),
    "recurrent": Job(
        "configs/ppo_recurrent.py",
        (
            "--config.total_steps=99840",
            "--config.source.num_envs=4",
            "--config.source.unroll_length=128",
            "--config.source.updates_per_call=5",
            "--config.learner.minibatches=4",
        ),
        "PureJaxRL",
        3_630,
        10.4,
        37.9,
    ),
}


class Timed(Trainer):
    """Notes when calls end, and how long the device worked on them."""

    def __init__(self, config: Any, workdir: str):
        super().__init__(config, workdir)
        self.first_seconds = 0.0
        self.busy_seconds, self.busy_calls = 0.0, 0
        self._loop_began = self.loop_seconds = 0.0
        self.calls = 0

    def _set_up(self) -> None:
        super()._set_up()
        read = self._device_clock.read

        def noted() -> tuple[float, int]:
            seconds, count = read()
            self.busy_seconds += seconds
            self.busy_calls += count
            return seconds, count

        self._device_clock.read = noted  # type: ignore[method-assign]

    def _call(self) -> None:
        began = time.perf_counter()
        super()._call()
        self.calls += 1
        if self.calls == 1:
            jax.block_until_ready(self.state.params)
            self._loop_began = time.perf_counter()
            self.first_seconds = self._loop_began - began

    def _log(self) -> None:
        super()._log()
        self.loop_seconds = time.perf_counter() - self._loop_began


def _import_late_ones(config: Any) -> None:
    """Imports what a run imports on first use only, so that its time is told with that of the other imports."""
    suites = {"gymnax": ["gymnax"], "jumanji": ["flaxrl.envs.mazes"]}
    for name in ("distrax", "orbax.checkpoint", "clu.parameter_overview", *suites.get(config.env.name, [])):
        importlib.import_module(name)


def run_once(path: str, overrides: Sequence[str], imports: float) -> dict[str, float]:
    """A whole run in this process, nothing compiled before: its times in seconds, its rate, its final return."""
    jax.config.update("jax_enable_compilation_cache", False)
    config = load_config(path, overrides)
    use_cores(config)
    began = time.perf_counter()
    _import_late_ones(config)
    imports += time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run = Timed(config, f"{folder}/run")
        metrics = run.run()
        wall = time.perf_counter() - began
    calls = run.calls - 1
    # The last log comes right after the last call, so the loop's time holds all the calls but the first.
    steps = calls * run.plan.steps_per_call
    busy = run.busy_seconds * calls / max(run.busy_calls, 1)
    return {
        "imports": imports,
        "first_call": run.first_seconds - run.loop_seconds / max(calls, 1),
        "steps_per_second": steps / run.loop_seconds,
        "host_share": max(0.0, 1 - busy / run.loop_seconds),
        "wall": wall,
        "return": metrics["eval/return_mean"],
    }


def measured(job: Job, repeats: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """`run_once` in processes, one after the other."""
    found = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "--once", job.config, *job.overrides, *overrides]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr[-2000:]}")
        found.append(json.loads(run.stdout.splitlines()[-1]))
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table and the JSON line, and returns what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="which, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args(argv)
    if options.once:
        found = run_once(options.once, overrides, time.perf_counter() - _BEGAN)
        print(json.dumps(found), flush=True)
        return found
    names = options.jobs.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        raise SystemExit(f"error: --jobs={unknown[0]} is unknown; there are {', '.join(JOBS)}")
    rows: list[tuple[Any, ...]] = [
        ("job", "steps/s", "trace + compile s", "host between calls", "wall s", "imports s", "return", "x peer", "peer")
    ]
    result: dict[str, Any] = {}
    for name in names:
        job = JOBS[name]
        runs = measured(job, options.repeats, overrides)
        each = {key: rate_of([run[key] for run in runs]) for key in runs[0]}
        ratio = each["steps_per_second"].median / job.steps_per_second
        result |= {f"{name}_{key}": value for key, value in each.items()} | {f"{name}_vs_peer": ratio}
        if job.compile_seconds and job.wall_seconds:
            result[f"{name}_compile_of_peer"] = each["first_call"].median / job.compile_seconds
            result[f"{name}_wall_of_peer"] = each["wall"].median / job.wall_seconds
        shown = ("steps_per_second", "first_call", "host_share", "wall", "imports", "return")
        rows.append((name, *(each[key] for key in shown), ratio, job.peer))
    print_table(rows)
    print_json(result)
    return result


if __name__ == "__main__":
    main()

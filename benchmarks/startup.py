"""How long it takes from the command to the first update, the first time and the second.

    python -m benchmarks.startup [--configs=configs/impala_atari.py,configs/impala_gymnax.py] [--repeats=1]

Each start is `python main.py` in a process of its own; the clock runs from there to the first line of metrics, with a
line after each call. Processor time is told beside wall time: on a machine that does other work, only it says much. The
first start of a config has an empty folder for compiled programs, the second has that of the first. A wrong value shows
how long a mistake in the config takes to be answered. Imports are timed each in a process.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that the file runs as a script, too

from benchmarks.report import print_json, print_table

ROOT = Path(__file__).parent.parent
MODULES = ("jax", "flaxrl", "distrax", "orbax.checkpoint", "flaxrl.trainers.trainer", "ale_py", "gymnax")
_TIMEOUT_S = 600.0


def import_seconds(module: str) -> float:
    """Wall time of an import in a new process, jax's left out for what builds on it."""
    before = "" if module == "jax" else "import jax\n"
    code = f"import time\n{before}began = time.perf_counter()\nimport {module}\nprint(time.perf_counter() - began)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(run.stdout.split()[-1])


def start_seconds(config: str, workdir: Path, cache: Path, overrides: Sequence[str]) -> tuple[float, float]:
    """From the command to the end of its first update: wall and processor seconds; the run is then told to stop.

    Args:
        config: FILE.py or FILE.py:ARGUMENT.
        workdir: new folder.
        cache: where `flaxrl/` with the compiled programs lies.
        overrides: '--config.FIELD=VALUE' arguments.

    Raises:
        RuntimeError: the command ended, or did nothing for minutes.
    """
    command = [sys.executable, "main.py", f"--config={config}", f"--workdir={workdir}", "--config.log.every=1"]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    metrics = workdir / "metrics.jsonl"
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, *overrides],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            while not (metrics.exists() and "\n" in metrics.read_text()):
                if run.poll() is not None or time.perf_counter() - began > _TIMEOUT_S:
                    raise RuntimeError(f"{' '.join(command)} made no update")
                time.sleep(0.02)
            used = psutil.Process(run.pid).cpu_times()
            spent = (time.perf_counter() - began, used.user + used.system)
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=_TIMEOUT_S)  # it saves what it has
        finally:
            run.kill()
    return spent


def refusal_seconds(config: str) -> float:
    """How long the command takes to answer a value that is out of range."""
    began = time.perf_counter()
    command = [sys.executable, "main.py", f"--config={config}", "--config.total_steps=0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode != 2:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}, not 2: {run.stderr}")
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables and the JSON line, and returns what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="configs/impala_atari.py,configs/impala_gymnax.py")
    parser.add_argument("--repeats", type=int, default=1, help="of which the median counts")
    parser.add_argument("--modules", default=",".join(MODULES), help="imports to time")
    options, overrides = parser.parse_known_args(argv)
    result: dict[str, Any] = {}
    columns = ("first start, s", "processor, s", "second start, s", "processor, s", "wrong value, s")
    rows: list[tuple[Any, ...]] = [("config", *columns)]
    for config in options.configs.split(","):
        times: dict[str, list[float]] = {k: [] for k in ("first", "first_cpu", "second", "second_cpu", "refusal")}
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                for name in ("first", "second"):
                    workdir, cache = Path(folder, name), Path(folder, "cache")
                    wall, processor = start_seconds(config, workdir, cache, overrides)
                    times[name].append(wall)
                    times[f"{name}_cpu"].append(processor)
            times["refusal"].append(refusal_seconds(config))
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append((config, *medians.values()))
        file, _, argument = config.partition(":")
        label = Path(file).stem + (f"_{argument}" if argument else "")
        result |= {f"{label}_{name}_s": value for name, value in medians.items()}
    print_table(rows)
    imports = {module: import_seconds(module) for module in options.modules.split(",") if module}
    print_table([("import", "s"), *imports.items()])
    result |= {f"import_{module}_s": seconds for module, seconds in imports.items()}
    print_json(result)
    return result


if __name__ == "__main__":
    main()

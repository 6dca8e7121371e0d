"""`kill -9` at random moments of a run, each followed by the same command: minutes, so `pytest -m slow`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flaxrl.trainers.checkpoint_layout import Series
from tests.small_runs import rows

ROOT = Path(__file__).parent.parent
KILLS = 20
TOTAL, EVERY = 100_000, 400
COMMAND = (
    "--config=configs/impala_gymnax.py",
    f"--config.total_steps={TOTAL}",
    "--config.source.num_envs=4",
    "--config.source.updates_per_call=1",
    "--config.model.torso.hidden=16",
    f"--config.log.every={EVERY}",
    "--config.log.writers=json_lines",
    f"--config.eval.every={10 * EVERY}",
    "--config.eval.episodes=2",
    f"--config.checkpoint.every={EVERY}",
)


def start(workdir: Path, cache: Path, output: Path) -> subprocess.Popen:
    """The command, in a folder; programs are compiled once for all starts."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with output.open("w") as file:
        command = [sys.executable, "main.py", *COMMAND, f"--workdir={workdir}"]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def saved(workdir: Path) -> int:
    """The newest step that a start would restore, 0 where nothing was saved."""
    return max(Series(workdir / "checkpoints", "latest").complete(), default=0)


def resumed(output: Path) -> int | None:
    """The step that a start says it resumed at; None where it did not come so far."""
    text = output.read_text()
    assert "Traceback" not in text and "error:" not in text, text
    found = re.search(r"resumed at step ([\d,]+)", text)
    if found:
        return int(found.group(1).replace(",", ""))
    return 0 if re.search(r"\d/[\d,]+ steps", text) else None


@pytest.mark.slow
@pytest.mark.timeout(1200)  # less than .ci/run gives to all the slow tests
def test_twenty_kills(tmp_path: Path) -> None:
    cache, output, workdir = tmp_path / "cache", tmp_path / "output.txt", tmp_path / "killed"
    began = time.monotonic()
    whole = start(tmp_path / "whole", cache, output)
    while whole.poll() is None and not saved(tmp_path / "whole"):
        time.sleep(0.05)
    ready = time.monotonic() - began  # seconds to the first save; less where nothing has to be compiled
    assert whole.wait(300) == 0, output.read_text()
    moments, report = random.Random(11), []
    for number in range(KILLS):
        before = saved(workdir)
        began, process = time.monotonic(), start(workdir, cache, output)
        # Half of them at any time since the start, half of them once it has saved again: set up, training, saving.
        if number % 2:
            deadline = time.monotonic() + 120
            while saved(workdir) <= before and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            ready = min(ready, time.monotonic() - began)
            time.sleep(moments.uniform(0, 0.5))
        else:
            time.sleep(moments.uniform(0, 1.2 * ready))
        process.kill()
        assert process.wait(60) == -signal.SIGKILL, f"it ended by itself: {output.read_text()}"
        began_at = resumed(output)
        assert began_at in (None, before), "it neither started anew nor resumed from the newest save"
        assert saved(workdir) >= before
        report.append((before, began_at, saved(workdir)))
    assert sum(began_at is not None and began_at > 0 for _, began_at, _ in report) >= KILLS // 4, report
    last = start(workdir, cache, output)
    assert last.wait(300) == 0, output.read_text()
    assert resumed(output) == report[-1][-1]
    steps = [row["step"] for row in rows(workdir)]
    assert steps == sorted(set(steps)) == list(range(EVERY, TOTAL + 1, EVERY))
    assert steps == [row["step"] for row in rows(tmp_path / "whole")]
    evaluated = [row["step"] for row in rows(workdir) if "eval/return_mean" in row]
    assert evaluated == list(range(10 * EVERY, TOTAL + 1, 10 * EVERY)), "a kill during an evaluation lost it"
    assert saved(workdir) == TOTAL
    print(f"first save after {ready:.1f} s; saved before, resumed at, saved at the kill: {report}")

"""A user's folder outside the package, examples/my_lab: its loss, env, torso and writer train by main.py, and learn."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxrl
from tests.small_runs import rows

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the example, as its docstring says, in a process of its own."""
    folder = tmp_path_factory.mktemp("lab") / "run"
    command = [sys.executable, str(ROOT / "main.py"), "--config=my_lab/config.py", f"--workdir={folder}"]
    done = subprocess.run(
        [*command, "--config.loss.discount=0.9"],
        cwd=ROOT / "examples",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_learns_the_best_return(workdir: Path) -> None:
    lines = rows(workdir)
    assert lines[-1]["eval/return_mean"] == pytest.approx(0.5, abs=1e-6)
    assert lines[0]["actor/episode_return"] < 0.0
    assert {"loss/policy", "loss/entropy", "loss/return"} <= lines[-1].keys()


def test_its_writer_wrote_what_the_json_lines_hold(workdir: Path) -> None:
    with open(workdir / "metrics.csv", newline="") as file:
        head, *body = csv.reader(file)
    assert head == ["step", "metric", "value"]
    returns = {int(step): float(value) for step, name, value in body if name == "actor/episode_return"}
    assert returns == {r["step"]: r["actor/episode_return"] for r in rows(workdir)}


def test_it_loads_where_the_folder_is_on_the_path(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)  # another test may have found it
    with pytest.raises(flaxrl.ConfigError, match="no module 'my_lab' on the Python path"):
        flaxrl.load(workdir)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    agent = flaxrl.load(workdir)
    assert agent.config.loss.discount == 0.9
    assert agent.act(np.eye(6, dtype=np.float32)[:5]).tolist() == [1] * 5


def test_csv_rows_of_a_lost_stretch_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from my_lab.csv_writer import LongCsv  # type: ignore[import-not-found]

    for start, steps in ((0, (10, 20, 30)), (20, (25,))):
        writer = LongCsv(tmp_path, start)
        for step in steps:
            writer.write_scalars(step, {"x": jnp.float32(step)})
        writer.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["step", "10", "20", "25"]


def test_corridor_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from my_lab.corridor import Corridor  # type: ignore[import-not-found]

    env, key = Corridor(length=3, max_steps=4), jax.random.key(0)
    state, observation, _ = env.reset(key)
    rewards, ends = [], []
    for action in (0, 1, 1):
        state, observation, reward, terminated, truncated, _ = env.step(state, jnp.int32(action), key)
        rewards.append(round(float(reward), 6))
        ends.append((bool(terminated), bool(truncated)))
    assert rewards == [-0.1, -0.1, 0.9] and ends == [(False, False), (False, False), (True, False)]
    assert observation.tolist() == [0.0, 0.0, 1.0]
    state, *_ = env.reset(key)
    for _ in range(4):
        state, _, _, terminated, truncated, _ = env.step(state, jnp.int32(0), key)
    assert (bool(terminated), bool(truncated)) == (False, True)

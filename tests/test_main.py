"""main.py as a user runs it: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from flaxrl import cpu_devices
from tests.small_runs import rows, saved_steps

ROOT = Path(__file__).parent.parent

CONFIG = """
from flaxrl import config_for
from tests.small_runs import host_config, small_config

def get_config(kind="jax"):
    cadence = dict(
        log=config_for("log", every=80),
        checkpoint=config_for("checkpoint", every=80),
    )
    if kind == "jax":
        return small_config(20, config_for("tests.drawn_envs:DrawnScripted"), **cadence)
    return host_config(100_000, 1, env=config_for("host_scripted", step_seconds=0.002), **cadence)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Programs are compiled once for all the processes of this module."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Start:
    """Starts main.py in a folder with a config."""
    (tmp_path / "exp.py").write_text(CONFIG)

    def begin(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "main.py"), *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def finish(process: subprocess.Popen, seconds: float = 200) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for_steps(process: subprocess.Popen, workdir: Path, steps: int) -> None:
    """Returns when the run has saved a step beyond `steps`."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if any(int(p.name) > steps for p in (workdir / "checkpoints" / "latest").glob("*") if p.name.isdecimal()):
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no step beyond {steps}: {process.communicate()}")


def test_train_resume_evaluate_film_plot(start: Start, tmp_path: Path) -> None:
    """With 20 updates of 8 steps: the process ends by itself, the same command with more steps goes on."""
    code, out, err = finish(start("--config=exp.py", "--workdir=w"))
    assert (code, err) == (0, "") and "160/160 steps" in out
    code, out, err = finish(start("--config=exp.py", "--workdir=w", "--config.total_steps=240"))
    assert (code, err) == (0, "") and "resumed at step 160" in out
    assert [line["step"] for line in rows(tmp_path / "w")] == [80, 160, 240]
    command = ("--mode=eval", "--workdir=w", "--config.eval.episodes=3", "--config.eval.video_episodes=2")
    code, out, err = finish(start(*command, "--video=agent.gif"))
    assert (code, err) == (0, "")
    metrics = json.loads(out.splitlines()[-1])
    assert (metrics["step"], metrics["eval/episodes"]) == (240, 3)
    with Image.open(tmp_path / "agent.gif") as image:
        assert image.n_frames == 2 * 6  # type: ignore[attr-defined] # episodes of five actions
    code, out, err = finish(start("--mode=plot", "--workdir=w"))
    assert (code, err) == (0, "") and "drew the evaluation return into curves.png" in out
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (768, 432)


@pytest.mark.slow
def test_many_seeds_have_a_device_each_core_and_are_evaluated_one_by_one(start: Start) -> None:
    cores = min(2, cpu_devices.cores())
    many = ("--config.num_seeds=2", "--config.mesh.data=-1")
    code, out, err = finish(start("--config=exp.py", "--workdir=w", *many))
    assert (code, err) == (0, "") and f"devices       {cores} x cpu (mesh seed={cores})" in out
    code, out, err = finish(start("--mode=eval", "--workdir=w"))
    assert (code, err) == (0, "")
    metrics = json.loads(out.splitlines()[-1])
    code, out, err = finish(start("--mode=eval", "--workdir=w", "--eval_seed=4"))
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["eval/return_mean"] == metrics["eval/return_mean/seed_4"]
    code, _, err = finish(start("--mode=eval", "--workdir=w", "--eval_seed=5"))
    assert (code, err) == (2, "error: the run has no seed 5; there are 3 to 4\n")


def test_signals_and_kills(start: Start, tmp_path: Path) -> None:
    """SIGTERM and SIGINT save, say so and exit in seconds, with the code asked for; the same command goes on,
    as it does after kill -9.
    """
    command, workdir, reached = ("--config=exp.py:host", "--workdir=w"), tmp_path / "w", 0
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        process = start(*command, *(["--stopped_exit_code=75"] if number == signal.SIGINT else []))
        wait_for_steps(process, workdir, reached)
        process.send_signal(number)
        began = time.monotonic()
        code, out, err = finish(process, 60)
        took = time.monotonic() - began
        assert "Traceback" not in err
        assert (f"resumed at step {reached:,}" in out) == (reached > 0)
        if number == signal.SIGKILL:
            assert code == -9
        else:
            assert code == (75 if number == signal.SIGINT else 0) and took < 20
            assert f"{signal.Signals(number).name}: saved at step" in out
        before, reached = reached, saved_steps(workdir)[-1]
        assert reached > before
        metrics = [line["step"] for line in rows(workdir)]
        assert metrics == sorted(set(metrics))


def test_check_of_the_batch_answers_before_training(start: Start, tmp_path: Path) -> None:
    code, out, err = finish(start("--config=exp.py", "--workdir=w", "--config.learner.minibatches=3"))
    assert (code, out) == (2, "") and not (tmp_path / "w").exists()
    assert (
        err.startswith("error: 2 sequences a device do not split into 3 minibatches: 2 % 3 = 2")
        and err.count("\n") == 1
    )

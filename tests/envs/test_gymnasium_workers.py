"""Worker processes: small, without jax, and gone when the run is, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from flaxrl.envs import workers as workers_module
from flaxrl.envs.gymnasium import Gymnasium
from flaxrl.envs.workers import WorkerError

ROOT = Path(__file__).parent.parent.parent
MODULE = "tests.envs.gymnasium_envs"
SOON = 60.0

PROGRAM = """
import sys
import jax
import flaxrl
from flaxrl import config_for
from tests.small_runs import small_config

env = config_for("gymnasium", id="tests.envs.gymnasium_envs:TestRaises-v0", workers=4, kwargs={{"how": {how!r}}})
source = config_for("actor_threads", num_envs=8, unroll_length=4, threads={threads})
log = config_for("log", every=320, writers=("json_lines",))
config = small_config(10**6, env, source, log=log, eval=config_for("eval", every=None))
flaxrl.Trainer(config, sys.argv[1]).run()
"""
"""Without `if __name__ == "__main__"`: workers do not run the program again."""


def make(name: str = "Clock", num_envs: int = 4, workers: int = 4, **fields) -> Gymnasium:
    return Gymnasium(num_envs=num_envs, id=f"{MODULE}:Test{name}-v0", workers=workers, **fields)


def workers_of(process: int) -> list[psutil.Process]:
    """Living env workers below a process."""
    try:
        return [p for p in psutil.Process(process).children(recursive=True) if is_worker(p)]
    except psutil.NoSuchProcess:
        return []


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any("worker.py" in x for x in process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    left = workers_of(os.getpid())
    for process in left:
        process.kill()
    assert left == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def start(tmp_path: Path, how: str = "none", threads: int = 1) -> subprocess.Popen:
    """The program, warnings about forks being errors."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(how=how, threads=threads))
    command = [sys.executable, "-W", "error::RuntimeWarning", str(file), str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_worker_is_a_process_of_its_own_with_gymnasium_alone():
    env = make("Witness", num_envs=5, workers=2)
    seen = env.reset(0).observation
    [first, second] = workers_of(os.getpid())
    assert seen[:, 0].tolist() == [first.pid] * 3 + [second.pid] * 2
    assert seen[:, 1:].any() == np.False_, "neither jax nor flaxrl nor the main program is imported"
    memory = first.memory_info().rss / 2**20
    env.close()
    assert workers_of(os.getpid()) == []
    assert memory < 120, f"{memory:.0f} MiB"


def test_there_are_at_most_as_many_workers_as_envs():
    env = make(num_envs=2, workers=5)
    env.reset(0)
    assert len(workers_of(os.getpid())) == 2
    env.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_rows_are_those_of_one_process(mode):
    rows = []
    for workers in (0, 3):
        env = Gymnasium(num_envs=4, autoreset=mode, workers=workers)
        rows.append([env.reset(9), *(env.step(np.array([0, 1, 1, t % 2])) for t in range(40))])
        env.close()
    for a, b in zip(*rows, strict=True):
        for name in ("observation", "reward", "discount", "step_type", "episode_return", "episode_length"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"env worker 2 of 4 \(envs 2 to 2\) failed:(.|\n)*gymnasium_envs.py(.|\n)*Unpicklable: out of fuel"),
        ("eof", r"env worker 2 of 4 (.|\n)*EOFError: from the simulator"),
        ("exit", r"env worker 2 of 4 \(envs 2 to 2\) ended with exit code 7"),
    ],
)
def test_an_env_that_goes_wrong_ends_all_workers(how, message):
    env = make("Raises", kwargs={"how": how})
    env.reset(0)
    for _ in range(38):  # 29 steps, a reset after each 3
        env.step(np.zeros(4, int))
    with pytest.raises(WorkerError, match=message):
        for _ in range(2):
            env.step(np.zeros(4, int))
    began = time.monotonic()
    env.close()
    assert workers_of(os.getpid()) == [] and time.monotonic() - began < 4


def test_a_hanging_env_is_an_error_that_names_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "CLOSE_S", 0.2)
    env = make("Raises", kwargs={"how": f"hang:{tmp_path / 'hangs'}"}, stall_seconds=123.0)
    env.reset(0)
    assert env._envs._stall_seconds == 123
    env._envs._stall_seconds = 1.0  # starting the processes took longer
    with pytest.raises(WorkerError, match=r"env worker 2 of 4 \(envs 2 to 2\) gave no answer for 1 s \(env\.stall"):
        for _ in range(40):
            env.step(np.zeros(4, int))
    assert (tmp_path / "hangs").exists()
    env.close()
    assert workers_of(os.getpid()) == []


def test_a_killed_worker_is_an_error():
    env = make(workers=2)
    env.reset(0)
    workers_of(os.getpid())[1].kill()
    with pytest.raises(WorkerError, match=r"env worker 1 of 2 \(envs 2 to 3\) ended with signal 9"):
        env.step(np.zeros(4, int))
    env.close()


def test_an_env_that_cannot_be_made_in_a_worker(monkeypatch):
    env = make(workers=1)
    _ = env.spec  # made here once; there it meets another limit
    monkeypatch.setattr(env, "kwargs", {"ends_at": 3, "wrong": 1})
    with pytest.raises(WorkerError, match="unexpected keyword argument 'wrong'"):
        env.reset(0)
    env.close()
    assert workers_of(os.getpid()) == []


def test_envs_of_the_main_program_travel_by_value():
    program = (
        "import gymnasium, numpy as np\n"
        "from flaxrl.envs.gymnasium import Gymnasium\n"
        "from tests.envs.gymnasium_envs import Clock\n"
        "class Mine(Clock):\n"
        "    def info(self): return {'action_mask': np.array([0, 1])}\n"
        "gymnasium.register('Mine-v0', entry_point=Mine)\n"
        "env = Gymnasium(num_envs=2, id='Mine-v0', workers=1, action_mask=True)\n"
        "print(env.reset(0).action_mask.tolist())\n"
        "env.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=SOON * 2
    )
    assert done.stdout.strip() == "[[False, True], [False, True]]"


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
def test_an_env_that_raises_ends_the_run(tmp_path, threads):
    process = start(tmp_path, "raise", threads)
    until(lambda: process.poll() is not None or len(workers_of(process.pid)) >= 4)
    workers = workers_of(process.pid)
    _, text = process.communicate(timeout=SOON * 2)
    assert process.returncode == 1 and "Unpicklable: out of fuel" in text and "gymnasium_envs.py" in text
    assert "fork" not in text
    assert not any(is_worker(p) for p in workers)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_a_signal_ends_run_and_workers(tmp_path, number, code):
    """SIGTERM and SIGINT go to all processes of a job, here too; the run saves itself and ends in order."""
    process = start(tmp_path)
    until(lambda: process.poll() is not None or (tmp_path / "run" / "metrics.jsonl").exists())
    until(lambda: process.poll() is not None or len(workers_of(process.pid)) == 4)
    workers = workers_of(process.pid)
    for each in workers if number != signal.SIGKILL else ():
        each.send_signal(number)
    process.send_signal(number)
    _, text = process.communicate(timeout=SOON * 2)
    assert process.returncode == code, text
    until(lambda: not any(is_worker(p) for p in workers))


def test_a_hanging_env_does_not_outlive_its_run(tmp_path):
    process = start(tmp_path, f"hang:{tmp_path / 'hangs'}")
    until(lambda: process.poll() is not None or (tmp_path / "hangs").exists())
    workers = workers_of(process.pid)
    assert len(workers) == 4
    process.kill()
    process.communicate(timeout=SOON)
    until(lambda: not any(is_worker(p) for p in workers))

"""One run in two processes: it is the run of one process, stops at one update, and ends as a whole."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flaxrl import ConfigError, Trainer, TrainingError, cli, config_for, processes
from tests import process_runs
from tests.process_runs import ROOT, STEPS, UPDATES, finish, start
from tests.small_runs import rows, saved_steps, train

CONFIG = """
from tests.process_runs import config

def get_config(kind):
    return config(kind)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of this file lie; programs are compiled once for them."""
    made = tmp_path_factory.mktemp("processes")
    (made / "exp.py").write_text(CONFIG)
    return made


def script(folder: Path, *kinds: str) -> list[subprocess.Popen]:
    return start(["-m", "tests.process_runs", str(folder), *kinds], folder / "cache", ROOT)


def command(folder: Path, kind: str, *flags: str) -> list[subprocess.Popen]:
    arguments = [str(ROOT / "main.py"), f"--config=exp.py:{kind}", f"--workdir={kind}", *flags]
    return start(arguments, folder / "cache", folder)


# -- the same run --------------------------------------------------------------------------------------------------


KINDS = ("jax", "gymnax", "lock_step")
"""Of runs that are the same each time."""


@pytest.fixture(scope="module")
def both(folder: Path) -> list[tuple[int, str, str]]:
    """Runs one after the other, by a caller in Python: envs in JAX, and host envs in lock step."""
    return finish(script(folder, *KINDS))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The same runs in this process."""
    for kind in KINDS:
        train(process_runs.config(kind), folder / "alone" / kind)
    return folder / "alone"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_log_what_one_does(both: Any, folder: Path, alone: Path, kind: str) -> None:
    assert [status for status, _, _ in both] == [0, 0], both
    found, expected = rows(folder / kind), rows(alone / kind)
    assert [row["step"] for row in found] == [2 * STEPS, 4 * STEPS, 6 * STEPS]
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = (
            {k: v for k, v in row.items() if not k.startswith("time/") or k == "time/updates"} for row in (ours, theirs)
        )
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert names(found) == names(expected)


def names(lines: list[dict[str, Any]]) -> set[str]:
    """Of all scalars: what a thread times beside the loop may come a line later."""
    return set().union(*lines)


@pytest.mark.slow
def test_only_process_0_prints_and_writes(both: Any, folder: Path) -> None:
    (_, first, _), (_, second, _) = both
    assert "devices       4 x cpu (mesh data=2 x fsdp=2)" in first and "100%" in first
    assert second == ""
    assert {p.name for p in (folder / "jax").iterdir()} == {
        "checkpoints",
        "config.json",
        "evaluated.json",
        "metrics.jsonl",
        "versions.json",
    }
    assert saved_steps(folder / "jax") == [2 * STEPS, 4 * STEPS, 6 * STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on(
    both: Any, folder: Path, alone: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the same parameters as after a run that was one process's from its start."""
    ended = []
    for i, run in enumerate((folder / kind, alone / kind)):
        shutil.copytree(run, tmp_path / str(i))
        trainer = goes_on(process_runs.config(kind), tmp_path / str(i), UPDATES * STEPS, 2, capsys)
        assert [row["step"] for row in rows(tmp_path / str(i))] == [2 * STEPS, 4 * STEPS, 6 * STEPS, 8 * STEPS]
        ended.append(jax.device_get((trainer.state.params, trainer.state.opt_state)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *ended)


def goes_on(config: Any, workdir: Path, step: int, updates: int, capsys: pytest.CaptureFixture[str]) -> Trainer:
    """One process takes up the run at `step`, for as many updates more."""
    config.total_steps, config.mesh = step + updates * STEPS, config_for("mesh", data=1)
    capsys.readouterr()
    trainer = train(config, workdir)
    assert f"resumed at step {step:,} (update {step // STEPS:,})" in capsys.readouterr().out
    assert trainer.steps == step + updates * STEPS
    return trainer


@pytest.mark.slow
def test_atari_in_two_processes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = finish(script(folder, "atari"))
    assert [status for status, _, _ in found] == [0, 0], found
    config = process_runs.config("atari")
    train(config, tmp_path)
    lines, expected = rows(folder / "atari"), rows(tmp_path)
    assert [row["step"] for row in lines] == [2 * STEPS, 4 * STEPS, 6 * STEPS]
    assert names(lines) == names(expected)
    assert all(np.isfinite(row["loss/total"]) for row in lines)
    goes_on(config, folder / "atari", UPDATES * STEPS, 2, capsys)


# -- stopping and failing ------------------------------------------------------------------------------------------


def test_sigterm_on_one_saves_on_all_at_the_same_update(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = command(folder, "threads")
    for _ in wait_for(folder / "threads" / "metrics.jsonl"):
        assert all(process.poll() is None for process in running), finish(running)
    running[1].send_signal(signal.SIGTERM)
    (status_0, out, _), (status_1, silent, _) = finish(running)
    assert (status_0, status_1, silent) == (0, 0, "")
    step = saved_steps(folder / "threads")[-1]
    assert f"SIGTERM in process 1: saved at step {step:,}; the same command goes on" in out
    goes_on(process_runs.config("threads"), folder / "threads", step, 1, capsys)


def wait_for(path: Path, seconds: float = 240) -> Any:
    """Yields until the file is there and has something in it."""
    deadline = time.monotonic() + seconds
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path.name} after {seconds} s"
        yield time.sleep(0.1)


def test_an_error_in_one_ends_all(folder: Path) -> None:
    (status_0, _, error_0), (status_1, _, error_1) = finish(command(folder, "fails"))
    assert (status_0, status_1) == (1, 1)
    assert error_0.strip().splitlines()[-1] == "error: process 1 failed: RuntimeError: the emulator is on fire"
    assert "Traceback" not in error_0
    assert "RuntimeError: the emulator is on fire" in error_1 and "Traceback" in error_1


def test_a_killed_process_ends_all(folder: Path) -> None:
    (status_0, _, error_0), (status_1, _, _) = finish(script(folder, "killed"))
    assert (status_0, status_1) == (1, -signal.SIGKILL)
    assert "lost another process of this run: " in error_0 or "process 1 was not heard of for 10 s: " in error_0


# -- the parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1234", None, 0), "--num_processes is missing"),
        ((None, 2, None), "--coordinator and --process_id is missing"),
        (("host:1234", 0, 0), "--num_processes=0 must be >= 1"),
        (("host:1234", 2, 2), "--process_id=2 must be 0 to 1"),
        (("host", 2, 0), "--coordinator=host must be HOST:PORT, such as host:12345"),
        (("host:70000", 2, 0), "must be HOST:PORT"),
    ],
)
def test_flags_that_do_not_fit(given: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.connect(*given)


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--coordinator={address}: cannot listen on port"):
            processes.connect(address, 2, 0)


def test_a_process_0_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_REACH_S", 0.1)
    with pytest.raises(TrainingError, match=r"process 0 did not answer at --coordinator=127\.0\.0\.1:\d+ for 0\.1 s"):
        processes.connect(f"127.0.0.1:{process_runs.free_port()}", 2, 1)


def test_one_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    processes.connect()
    processes.connect("host:1", 1, 0)
    assert not jax.distributed.is_initialized() and processes.current().count == 1


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, False),  # the batch script itself, or an interactive shell
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[1-2]"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], several: bool) -> None:
    assert processes._started_as_one_of_several(environment) is several


@pytest.mark.parametrize("installed", [True, False])
def test_a_pod_with_an_index_is_recognised_where_jax_can_ask_the_cluster(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    find = importlib.util.find_spec
    found = importlib.machinery.ModuleSpec("kubernetes", None) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "kubernetes" else find(name))
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
    assert processes._started_as_one_of_several(pod) is installed
    assert not processes._started_as_one_of_several({"JOB_COMPLETION_INDEX": "0"})


def test_every_process_tells_its_workdir(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was given it: the processes speak in turn, and one that skips a turn would answer another's."""
    told: list[Any] = []

    class Others:
        def same(self, what: str, value: str | None) -> None:
            told.append((what, value))

        def from_first(self, compute: Any) -> Any:
            told.append("from_first")
            return compute()

    monkeypatch.setattr(processes, "_peers", Others())
    assert cli.run_workdir("w", lambda: "none") == "w"
    assert cli.run_workdir(None, lambda: "exp.py").startswith("runs/exp/")
    assert told == [("--workdir", "w"), ("--workdir", None), "from_first"]

"""Runs in two processes of two devices each: the configs, the programs, and how a test starts them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxrl import config_for
from flaxrl.envs.fake import HostScripted
from flaxrl.types import Timestep
from tests.small_runs import small_config

ROOT = Path(__file__).parent.parent
UPDATES, STEPS = 6, 32
"""Of `config`; steps of an update: T 4 x B 8."""

_GLOO = re.compile(r"(\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|[\d\s])*")
"""A line of gloo alone: several of its threads write at once, so that one line may end or begin inside another."""

FSDP = config_for("mesh", data=2, fsdp=2, rules=(("Dense_0/kernel", "fsdp"),))


@dataclass(kw_only=True)
class EndsIn(HostScripted):
    """HostScripted that in one process, at the `at`-th step, raises, or kills its process.

    Attributes:
        process: which.
        at: `step` call since `reset`.
        kill: SIGKILL instead of an error.
    """

    process: int = 1
    at: int = 10
    kill: bool = False

    def step(self, action: np.ndarray) -> Timestep:
        if self._calls == self.at and jax.process_index() == self.process:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the emulator is on fire")
        return super().step(action)


def config(kind: str) -> Any:
    """A small run on a mesh over two processes, or over four devices of one."""
    every = 2 * STEPS
    fields: dict[str, Any] = {
        "mesh": FSDP,
        "log": config_for("log", every=every, writers=("json_lines",)),
        "eval": config_for("eval", every=every, episodes=2),
        "checkpoint": config_for("checkpoint", every=every, keep=20),
    }
    threads = {"jax": None, "gymnax": None, "lock_step": 0}.get(kind, 1)
    if threads is None:
        env = config_for("gymnax", game="CartPole-v1") if kind == "gymnax" else config_for("scripted", mask="partial")
        source = config_for("jax_rollout", num_envs=8, unroll_length=4)
    else:
        env = {
            "fails": config_for("tests.process_runs:EndsIn"),
            "killed": config_for("tests.process_runs:EndsIn", kill=True),
            "atari": config_for("atari", game="pong"),
        }.get(kind, config_for("host_scripted"))
        source = config_for("actor_threads", num_envs=8, unroll_length=4, threads=threads, stall_seconds=60)
    if kind == "lock_step":
        fields["learner"] = config_for("learner", reward_scaling=0.9)
    updates = UPDATES if kind in ("jax", "gymnax", "lock_step", "atari") else 100_000
    made = small_config(updates * STEPS // 8, env, source, **fields)
    made.model.normalize_observations = kind == "lock_step"
    return made


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command: list[str], cache: Path, cwd: Path) -> list[subprocess.Popen]:
    """`command`, with the flags of process 0 and 1 appended, in two processes."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    return [
        subprocess.Popen(
            [sys.executable, *command, *flags, f"--process_id={i}"],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 240) -> list[tuple[int, str, str]]:
    """Exit status, stdout (without what gloo prints) and stderr of each; none is left running."""
    try:
        found = []
        for process in processes:
            out, error = process.communicate(timeout=timeout)
            lines = [line for line in out.splitlines() if not _GLOO.fullmatch(line)]
            found.append((process.returncode, "\n".join(lines), error))
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def main(argv: list[str]) -> None:
    """A caller in Python: connects, then trains each KIND in FOLDER/KIND, one after the other."""
    import flaxrl
    from flaxrl.trainers import peers

    folder, *kinds, coordinator, count, index = argv
    values = [flag.partition("=")[2] for flag in (coordinator, count, index)]
    flaxrl.connect(values[0], int(values[1]), int(values[2]))
    peers._LOST_S = 10.0
    for kind in kinds:
        flaxrl.Trainer(config(kind), Path(folder) / kind).run()


if __name__ == "__main__":
    main(sys.argv[1:])

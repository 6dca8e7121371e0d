"""A vector env of gymnasium envs in worker processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from flaxrl.envs import worker
from flaxrl.envs.worker import Setup

CLOSE_S = worker.GRACE_S
"""Seconds that workers have to close their envs in; then they are killed."""

_POLL_S = 0.2


class WorkerError(RuntimeError):
    """An env raised in a worker process, whose traceback the message holds, or the process hangs or ended."""


class Workers:
    """Gymnasium's vector env interface, as far as rows need it, over processes that hold a share of the envs each.

    The processes are new interpreters, never forks, that import gymnasium and what the env needs. Observations come
    through shared memory, everything else through a pipe. They ignore SIGINT and SIGTERM, which a terminal or a
    scheduler sends to all processes of a job, and end with this one, however it ends.

    Args:
        make: makes one env; pickled by value where it is defined in `__main__`.
        observation_space: of one env.
        num_envs: B.
        workers: processes, at most B.
        autoreset: value of gymnasium's AutoresetMode.
        keys: of the info that are passed on.
        stall_seconds: a worker that gives no answer for so long is an error.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        observation_space: Any,
        num_envs: int,
        workers: int,
        autoreset: str,
        keys: tuple[str, ...],
        stall_seconds: float,
    ):
        import cloudpickle

        self.num_envs, self._stall_seconds = num_envs, stall_seconds
        self._shares = np.array_split(np.arange(num_envs), workers)
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        size = worker.memory_size(observation_space, num_envs)
        memory_fd = _memory_file(size)
        try:
            self._observation = worker.memory_views(observation_space, num_envs, mmap.mmap(memory_fd, size))
            for share in self._shares:
                self._start(memory_fd)
                setup = Setup(
                    list(sys.path), cloudpickle.dumps(make), int(share[0]), len(share), num_envs, autoreset, keys
                )
                self._connections[-1].send(tuple(setup))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory_fd)

    def _start(self, memory_fd: int) -> None:
        """One more process. `-P` keeps the worker's folder, which has a gymnasium.py of its own, off its path."""
        ours, theirs = Pipe()
        self._connections.append(ours)
        flags = [f"-W{option}" for option in sys.warnoptions]
        command = [sys.executable, "-P", *flags, worker.__file__, str(theirs.fileno()), str(memory_fd)]
        # Blocked signals are so in the new process too, until it ignores them: none reaches it while Python starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.IGNORED)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(), memory_fd), start_new_session=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._processes.append(process)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """See gymnasium's VectorEnv; observations are views that the next call overwrites, infos one dict an env."""
        mask = (options or {}).get("reset_mask")
        messages = []
        for share in self._shares:
            own = {} if mask is None else {"reset_mask": mask[share]}
            messages.append(("reset", None if seed is None else [seed + int(i) for i in share], own))
        # An env of a share that none of whose envs restarts is left alone: gymnasium refuses an empty mask.
        asked = [mask is None or bool(mask[share].any()) for share in self._shares]
        answers = self._ask(messages, asked)
        nothing = [({},) * len(share) for share in self._shares]
        parts = [list(a[0]) if a else list(n) for a, n in zip(answers, nothing, strict=True)]
        return self._observation, [info for part in parts for info in part]

    def step(self, action: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """See `reset`."""
        answers = self._ask([("step", action[share], None) for share in self._shares], [True] * len(self._shares))
        reward, terminated, truncated = (np.concatenate([a[k] for a in answers]) for k in range(3))
        return self._observation, reward, terminated, truncated, [info for a in answers for info in a[3]]

    def _ask(self, messages: list[tuple], asked: list[bool]) -> list[tuple]:
        """Answers of the workers that are asked, () for the others; all work at the same time."""
        for i, message in enumerate(messages):
            if asked[i]:
                with contextlib.suppress(OSError):  # it has ended: what it said last is read below
                    self._connections[i].send(message)
        deadline = time.monotonic() + self._stall_seconds
        return [self._answer(i, deadline) if asked[i] else () for i in range(len(messages))]

    def _answer(self, i: int, deadline: float) -> tuple:
        connection = self._connections[i]
        try:
            while not connection.poll(_POLL_S):
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"{self._name(i)} gave no answer for {self._stall_seconds:g} s (env.stall_seconds): it hangs"
                    )
            kind, content = connection.recv()
        except (EOFError, OSError) as error:
            code = self._processes[i].wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise WorkerError(f"{self._name(i)} ended with {how}") from error
        if kind == "error":
            raise WorkerError(f"{self._name(i)} failed:\n\n{content}")
        return content

    def _name(self, i: int) -> str:
        share = self._shares[i]
        return f"env worker {i} of {len(self._shares)} (envs {share[0]} to {share[-1]})"

    def close(self) -> None:
        """Ends the processes: they close their envs, or are killed where that takes too long; may be called twice."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + CLOSE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._connections, self._processes = [], []


def _memory_file(size: int) -> int:
    """File descriptor of `size` zero bytes that other processes can map; no name is left behind, whatever happens."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("flaxrl-observations")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor

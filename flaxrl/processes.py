"""The same run in several processes: how they find one another. Nothing here costs a run in one process anything."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flaxrl.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from flaxrl.trainers.peers import Peers

_HEARTBEAT_S = 60  # jax's own watch; that of `trainers.peers` is sooner, and says it in one line
_REACH_S = 300.0
_peers: Peers | None = None


def connect(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Makes this process one of several that train together; to be called before anything asks jax for a device.

    All processes run the same program with the same config. Without arguments it is jax that finds out about the
    others, where SLURM, Open MPI or Kubernetes started several; elsewhere nothing happens. A second call does nothing.

    Args:
        coordinator: HOST:PORT on which process 0 listens, reachable from all.
        num_processes: how many there are; 1 changes nothing.
        process_id: 0 .. num_processes - 1, different in each.

    Raises:
        ConfigError: some of the three are missing or wrong; jax is in use already.
        TrainingError: the others could not be reached.
    """
    check(coordinator, num_processes, process_id)
    if num_processes == 1 or (num_processes is None and not _started_as_one_of_several(os.environ)):
        return
    import jax

    if not jax.distributed.is_initialized():
        if coordinator is not None and process_id is not None:
            _reach(coordinator, process_id)
        # Its handler of SIGTERM would take the place of the run's; `trainers.peers` agrees on where to stop, for SIGINT
        # and during evaluations too.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=_HEARTBEAT_S)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            if "must be called before" in reason:
                raise ConfigError("connect must come before anything asks jax for a device") from error
            raise TrainingError(f"the processes of this run could not be connected: {reason}") from error
    current()


def _reach(coordinator: str, process_id: int) -> None:
    """Finds out what would end jax, or make it wait without a word: a port in use, a process 0 that is not there."""
    host, _, port = coordinator.rpartition(":")
    if process_id == 0:
        try:
            with socket.create_server(("", int(port))):
                return
        except OSError as error:
            raise ConfigError(f"--coordinator={coordinator}: cannot listen on port {port}: {error.strerror}") from error
    deadline = time.monotonic() + _REACH_S
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"process 0 did not answer at --coordinator={coordinator} for {_REACH_S:g} s: {error}"
                ) from error
        time.sleep(0.5)


def current() -> Peers:
    """The processes of this program: those that `connect` (or the caller's own jax.distributed) joined, or it alone."""
    global _peers
    from jax._src import distributed  # jax has no public way to its store

    from flaxrl.trainers.peers import Peers

    state = distributed.global_state
    if state.client is None:
        return Peers()
    if _peers is None:
        _peers = Peers(state.client, state.process_id, state.num_processes)
        atexit.register(_peers.close)  # runs before jax's own, which waits for all processes
        _watch_uncaught(_peers)
    return _peers


def _watch_uncaught(peers: Peers) -> None:
    """An error that ends this program ends the others too."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        peers.fail(error)
        before(kind, error, trace)

    sys.excepthook = hook


def fail(error: BaseException) -> None:
    """Tells the other processes, where there are any, that this one ends."""
    if _peers is not None:
        _peers.fail(error)


def same(what: str, value: str | None) -> None:
    """Checks that all processes were given the same value of `what`.

    Raises:
        ConfigError: in all of them, with the values of two.
    """
    if _peers is not None:
        _peers.same(what, value)


def from_first(text: str) -> str:
    """The text that process 0 has, in all processes."""
    return text if _peers is None else _peers.from_first(lambda: text)


def check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Checks what says where this process belongs, without jax.

    Raises:
        ConfigError: one line with the flag and the rule.
    """
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise ConfigError(f"several processes need {', '.join(given)}, all three; {' and '.join(missing)} is missing")
    assert coordinator is not None and num_processes is not None and process_id is not None
    if num_processes < 1:
        raise ConfigError(f"--num_processes={num_processes} must be >= 1")
    if not 0 <= process_id < num_processes:
        raise ConfigError(f"--process_id={process_id} must be 0 to {num_processes - 1} (--num_processes - 1)")
    match = re.fullmatch(r"(.+):(\d+)", coordinator)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ConfigError(f"--coordinator={coordinator} must be HOST:PORT, such as {coordinator.split(':')[0]}:12345")


def _started_as_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that jax knows started this process, and others with it."""
    for mark, size in (("SLURM_STEP_NODELIST", "SLURM_NTASKS"), ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE")):
        if mark in environment and int(environment.get(size, 1)) > 1:
            return True
    # A pod knows its own index, and from the package `kubernetes` how many there are.
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    return indexed and importlib.util.find_spec("kubernetes") is not None

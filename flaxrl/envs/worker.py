"""The program of one worker process: a batch of gymnasium envs, stepped on demand.

`flaxrl.envs.workers` runs this file by its path, in a new interpreter, so that neither flaxrl nor jax is imported here.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

GRACE_S = 5.0
"""Seconds that envs have to close in, once the process that uses them is gone."""


IGNORED = (signal.SIGINT, signal.SIGTERM)
"""Signals that reach all processes of a job; the one that uses the envs decides what they mean."""


class Setup(NamedTuple):
    """What a worker is told first; plain data, since only then does it know where modules are.

    Attributes:
        path: `sys.path` of the process that uses it.
        make: cloudpickled function without arguments that makes one env.
        first: its first env's place in the batch.
        count: its envs.
        total: envs of the batch, B.
        autoreset: value of gymnasium's AutoresetMode.
        keys: of the info that are sent back.
    """

    path: list[str]
    make: bytes
    first: int
    count: int
    total: int
    autoreset: str
    keys: tuple[str, ...]


def leaves(tree: Any) -> list[Any]:
    """Leaves of nested dicts (in order of their sorted keys) and tuples."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def rebuilt(tree: Any, found: Iterator[Any]) -> Any:
    """A tree like `tree` with the leaves `found`."""
    if isinstance(tree, dict):
        return {key: rebuilt(tree[key], found) for key in sorted(tree)}
    if isinstance(tree, tuple):
        return tuple(rebuilt(part, found) for part in tree)
    return next(found)


def batch_of(space: Any, count: int) -> Any:
    """Zeros for observations of `count` envs, as dicts and tuples of arrays `[B, ...]` with gymnasium's dtypes."""
    from gymnasium.vector.utils import create_empty_array

    return create_empty_array(space, count, fn=np.zeros)


def memory_size(space: Any, total: int) -> int:
    """Bytes that observations of `total` envs take in shared memory."""
    return max(1, sum(_aligned(x.nbytes) for x in leaves(batch_of(space, total))))


def memory_views(space: Any, total: int, memory: mmap.mmap) -> Any:
    """The observations `[B, ...]` that lie in `memory`, as a tree of arrays over it."""
    like, views, offset = batch_of(space, total), [], 0
    for x in leaves(like):
        views.append(np.frombuffer(memory, x.dtype, x.size, offset).reshape(x.shape))
        offset += _aligned(x.nbytes)
    return rebuilt(like, iter(views))


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def infos(info: dict[str, Any], count: int, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """What a vector env's info says of each env, of `keys`; of 'final_info' as 'final_KEY'.

    Args:
        info: gymnasium's layout: KEY holds the values of all envs, _KEY where they are given (everywhere if absent).
        count: envs.
        keys: of interest.
    """
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    if not keys:
        return found
    for key in keys:
        if key in info:
            for i in np.flatnonzero(info.get(f"_{key}", np.ones(count, bool))):
                found[int(i)][key] = _of_env(info[key], int(i))
    if isinstance(info.get("final_info"), dict):
        for i, final in enumerate(infos(info["final_info"], count, keys)):
            found[i] |= {f"final_{key}": value for key, value in final.items()}
    return found


def _of_env(values: Any, i: int) -> Any:
    """Env i's part of a tree of arrays `[B, ...]`; an array of objects holds one object an env."""
    if isinstance(values, dict):
        return {key: _of_env(value, i) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_of_env(value, i) for value in values)
    return values[i]


def vector_env(make: Callable[[], Any], count: int, autoreset: str) -> Any:
    """Gymnasium's vector env of `count` envs in this process; what it answers it overwrites at the next call.

    Args:
        make: makes one env.
        count: envs.
        autoreset: value of gymnasium's AutoresetMode.
    """
    from gymnasium.vector import SyncVectorEnv
    from gymnasium.wrappers import TransformObservation

    def copying() -> Any:
        # Here the next episode begins before anyone has read the final observation, of which gymnasium keeps a
        # reference: an env that answers the same array again and again would write its first observation over it.
        return TransformObservation(make(), copy.deepcopy, None)

    each = copying if autoreset == "SameStep" else make
    return SyncVectorEnv([each] * count, copy=False, autoreset_mode=autoreset)


def serve(connection: Connection, memory_fd: int) -> None:
    """Answers 'reset' and 'step' until the other side hangs up."""
    told = _next(connection)
    if told is None:
        return
    setup = Setup(*told)
    sys.path[:] = setup.path
    envs = vector_env(pickle.loads(setup.make), setup.count, setup.autoreset)
    try:
        space = envs.single_observation_space
        with open(memory_fd, "r+b") as file:
            views = leaves(memory_views(space, setup.total, mmap.mmap(file.fileno(), memory_size(space, setup.total))))
        while (message := _next(connection)) is not None:
            command, argument, options = message
            if command == "reset":
                observation, info = envs.reset(seed=argument, options=options)
                answer: tuple = ()
            else:
                observation, *rest, info = envs.step(argument)
                answer = tuple(rest)
            for view, x in zip(views, leaves(observation), strict=True):
                view[setup.first : setup.first + setup.count] = x
            connection.send(("answer", (*answer, infos(info, setup.count, setup.keys))))
    finally:
        envs.close()


def _next(connection: Connection) -> tuple | None:
    """The next message; None where the other side has hung up."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _end_with_parent() -> None:
    """Ends this process when stdin closes, as it does once the process at its other end is gone, however it ended."""
    while os.read(0, 1):
        pass
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    """Serves the connection and the memory whose file descriptors the command line names."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection, int(sys.argv[2]))
    except BaseException:
        with contextlib.suppress(OSError):  # nobody is there to be told
            connection.send(("error", traceback.format_exc()))


if __name__ == "__main__":
    main()

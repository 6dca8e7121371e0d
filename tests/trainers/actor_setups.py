"""A run of ActorThreads for tests: set up, watched, closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from learner_setups import VECTOR, key, make_agent, mesh_of, progress

from flaxrl.configuration import MeshSettings
from flaxrl.envs.fake import HostScripted
from flaxrl.trainers.actors import ActorThreads
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import init_state
from flaxrl.trainers.source import Runtime

SOON = 60.0
"""Seconds that are far more than enough, on a busy machine too."""


@dataclass
class Run:
    """A source that is set up, and what its envs were asked for."""

    source: ActorThreads
    state: Any
    seeds: list[int] = field(default_factory=list)

    def sample(self, state: Any = None, number: int = 0) -> tuple[Any, dict]:
        """The next trajectory and metrics."""
        return self.source.sample(None, self.state if state is None else state, key(number))[1:]


@contextlib.contextmanager
def running(
    make_env: Callable[[int], Any] | None = None,
    agent: Any = None,
    devices: int = 1,
    seed: int = 0,
    updates: int = 0,
    env: dict | None = None,
    **fields: Any,
) -> Iterator[Run]:
    """A run of ActorThreads, closed at the end; afterwards no actor thread is alive."""
    source = ActorThreads(**({"num_envs": 4, "unroll_length": 5, "stall_seconds": SOON} | fields))
    agent = make_agent(core="feed_forward") if agent is None else agent
    mesh = mesh_of(devices)[1]
    state = init_state(agent, VECTOR, Optimizer(), MeshSettings(), mesh, 0, target=False)
    run = Run(source, state.replace(updates=jnp.int32(updates)))

    def make(num_envs: int) -> Any:
        made = make_env(num_envs) if make_env else HostScripted(num_envs=num_envs, **(env or {}))
        reset = made.reset

        def noted(seed: int) -> Any:
            run.seeds.extend(seed + i for i in range(num_envs))
            return reset(seed)

        made.reset = noted
        return made

    try:
        source.setup(Runtime(make, agent, mesh, seed, progress))
        source.init(state, key(1000))
        yield run
    finally:
        source.close()
    assert not alive()


def alive() -> list[str]:
    """Names of living actor threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("actor-")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)

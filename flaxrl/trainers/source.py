"""Sources yield trajectories; they are all that differs between one training setup and another."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.trainers.update import Update
from flaxrl.types import Array, Metrics, PyTree, TrainState, Trajectory

Data = Any


@dataclass(frozen=True)
class Runtime:
    """What a run gives its source.

    Attributes:
        make_env: number of envs -> a HostEnv of as many, or the JaxEnv.
        agent: the Linen module.
        mesh: devices of the learner.
        seed: of the run.
        progress: of the number of updates, the fraction of the run done.
        stop: whether the run was told to end; a source that waits asks it.
    """

    make_env: Callable[[int], HostEnv | JaxEnv]
    agent: Any
    mesh: Mesh
    seed: int
    progress: Callable[[Any], Any]
    stop: Callable[[], bool] = lambda: False


class SourceStopped(Exception):
    """A source gave up waiting because the run was told to end."""


class Source(abc.ABC):
    """A dataclass of config fields; `setup` connects it to a run before anything else is called.

    Attributes:
        traceable: pure JAX: the whole iterate is jitted, donated and scanned.
    """

    traceable: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """B of the trajectories, over all devices and processes."""

    @property
    @abc.abstractmethod
    def steps_per_update(self) -> int:
        """Steps an iterate adds: T x B."""

    @abc.abstractmethod
    def setup(self, runtime: Runtime) -> None:
        """Connects to the run; makes envs, compiles nothing."""

    @abc.abstractmethod
    def init(self, state: TrainState, key: Array) -> Data:
        """The source's data before the first iterate."""

    def traced_init(self, state: TrainState, key: Array) -> Data:
        """What `init` gives, as part of a larger program: what many seeds in one program need of a traceable source.

        `config.num_seeds` and `config.sweep` call it inside `jax.vmap`, with a mesh of one device in Runtime.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define traced_init, which many seeds need")

    @abc.abstractmethod
    def sample(self, data: Data, state: TrainState, key: Array) -> tuple[Data, Trajectory, Metrics]:
        """The next trajectory, `[T, B, ...]`."""

    def feedback(self, data: Data, priorities: Array | None) -> Data:
        """Tells how surprising the last trajectory's sequences were, `[B]`. Default: nothing."""
        del priorities
        return data

    @property
    def iterates_per_call(self) -> int:
        """Iterates in one dispatch; more than 1 only where traceable."""
        return 1

    @property
    def reserved_devices(self) -> tuple[int, ...]:
        """Indices of local devices that the mesh leaves to this source."""
        return ()

    def check(self, data: Data) -> None:
        """Raises what went wrong since the last log (an env without a legal action); called by the host.

        Of many seeds in one program it is called with the data of all, leaves `[N, ...]`; where that raises, with each
        one's.
        """
        del data

    def snapshot(self, data: Data) -> PyTree | None:
        """What a checkpoint keeps of `data`; None where nothing is kept."""
        return data if self.traceable else None

    def restore(self, data: Data, snapshot: PyTree) -> Data:
        """`data` with a checkpoint's snapshot."""
        del data
        return snapshot

    def close(self) -> None:
        """Ends threads and envs; may be called twice."""
        return


@jax.jit
def split(key: Array) -> tuple[Array, Array]:
    """Two keys in one dispatch, where the loop runs in Python."""
    first, second = jax.random.split(key)
    return first, second


def iterate(
    source: Source, update: Update, state: TrainState, data: Data, key: Array
) -> tuple[TrainState, Data, Metrics]:
    """The whole algorithm: take a batch, take a step, tell the source what was surprising."""
    key_sample, key_update = split(key)
    data, trajectory, metrics = source.sample(data, state, key_sample)
    state, out = update(state, trajectory, key_update)
    return state, source.feedback(data, out.priorities), metrics | out.metrics

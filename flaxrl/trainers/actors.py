"""ActorThreads: host envs stepped by threads that feed the learner; or in lock step with it."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl import checks
from flaxrl.envs.base import HostEnv
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers.actor import Act, Actor, Unrolled
from flaxrl.trainers.blocks import InputBlocks
from flaxrl.trainers.peers import settle
from flaxrl.trainers.setup import fold_in
from flaxrl.trainers.sharding import replicated, to_global
from flaxrl.trainers.source import Runtime, Source, SourceStopped
from flaxrl.types import Array, Metrics, PyTree, TrainState, Trajectory

_POLL_S = 0.2
_STOP_S = 3.0  # an unroll on its way is waited for, so that what it cost is not lost
_JOIN_S = 10.0


class _Published(NamedTuple):
    """Parameters that actors may take: a copy that no donation touches, ready once its update is done."""

    model: PyTree
    updates: int

    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return all(x.is_ready() for x in jax.tree.leaves(self.model))


@dataclass
class ActorThreads(Source):
    """Threads, each with its own envs, actor device and bounded queue; a batch takes one unroll of each, in order.

    Row b of every batch is the same env. Actors take the newest parameters whose update is done, and do not wait.

    Attributes:
        num_envs: B, over all threads and processes.
        unroll_length: T.
        threads: actor threads of a process; 0 acts in lock step with the learner, deterministic.
        queue_depth: finished unrolls that a thread may hold before it waits.
        prefetch: batches sent to the device before the updates ahead of them are done.
        stall_seconds: the run ends when an actor gives nothing for so long.
        actor_devices: indices of local devices for acting alone, left out of the mesh; () shares the learner's.
    """

    num_envs: int = 32
    unroll_length: int = 20
    threads: int = 1
    queue_depth: int = 1
    prefetch: int = 1
    stall_seconds: float = 300.0
    actor_devices: tuple[int, ...] = ()

    traceable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.positive(self, "num_envs", "unroll_length", "queue_depth", "stall_seconds")
        checks.non_negative(self, "threads", "prefetch", "actor_devices")
        checks.divides(self.num_envs, jax.process_count() * max(self.threads, 1), "envs", "actor threads")
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._recent: tuple[_Published, ...] = ()
        self._threads: list[threading.Thread] = []
        self._actor: Actor | None = None

    @property
    def batch_size(self) -> int:
        """B."""
        return self.num_envs

    @property
    def envs_per_actor(self) -> int:
        """Envs of one thread."""
        return self.num_envs // (jax.process_count() * max(self.threads, 1))

    @property
    def steps_per_update(self) -> int:
        """T x B."""
        return self.unroll_length * self.num_envs

    @property
    def reserved_devices(self) -> tuple[int, ...]:
        """Local devices that the mesh must leave out."""
        return self.actor_devices

    def setup(self, runtime: Runtime) -> None:
        """See Source."""
        self._runtime = runtime
        env = self._make_env()  # an env of the wrong kind is refused here, before threads and checkpoints
        self._act = Act(runtime.agent, env.spec, runtime.progress, self.unroll_length)
        env.close()
        self._blocks = InputBlocks(self.unroll_length + 1, max(self.threads, 1))
        local = [d for d in runtime.mesh.devices.flatten() if d.process_index == jax.process_index()]
        self._learner_devices = local
        self._devices = [jax.local_devices()[i] for i in self.actor_devices] or local
        self._copy = jax.jit(lambda model: jax.tree.map(jnp.copy, model), out_shardings=replicated(runtime.mesh))

    def _make_env(self) -> HostEnv:
        env = self._runtime.make_env(self.envs_per_actor)
        if not isinstance(env, HostEnv):
            raise ConfigError(
                f"actor_threads steps envs on the host; {type(env).__name__} is in JAX: use config_for('jax_rollout')"
            )
        return env

    def init(self, state: TrainState, key: Array) -> None:
        """Nothing yet: threads start with the first sample, when a resumed run's counters are known."""
        del state
        self._key = key

    # -- learner's side --------------------------------------------------------------------------------------------

    def sample(self, data: None, state: TrainState, key: Array) -> tuple[None, Trajectory, Metrics]:
        """Publishes the parameters and takes the next unroll of every actor."""
        if not self._recent:
            self._updates = self._first_update = int(state.updates)
            self._publish(state)
            self._start()
        else:
            self._updates += 1
            self._publish(state)
        began = time.perf_counter()
        behind = self.prefetch if self._actor is None else 0
        if len(self._recent) > behind:
            jax.block_until_ready(self._recent[-1 - behind].model)
        ready = time.perf_counter()
        if self._actor is not None:
            parts = [self._actor.unroll(self._model_for(0, self._recent[-1]), self._updates, key)]
        else:
            parts = [self._take(i) for i in range(self.threads)]
        acted = time.perf_counter()
        trajectory = to_global(_whole(parts), self._runtime.mesh)
        metrics = _joined(parts)
        metrics["time/wait_for_update_seconds"] = (ready - began, 1.0)
        metrics["time/wait_for_actors_seconds"] = (acted - ready, 1.0)
        metrics["time/transfer_seconds"] = (time.perf_counter() - acted, 1.0)
        metrics["actor/lag_updates"] = (float(sum(self._updates - p.updates for p in parts)), float(len(parts)))
        return None, trajectory, metrics

    def _publish(self, state: TrainState) -> None:
        published = _Published(self._copy({"params": state.params, **state.variables}), self._updates)
        settle(published.model)
        self._recent = (*self._recent[-1 - self.prefetch :], published)

    def _take(self, thread: int) -> Unrolled:
        """The next unroll of one thread, or what it died of."""
        began = time.monotonic()
        while True:
            try:
                return self._queues[thread].get(timeout=_POLL_S)
            except queue.Empty:
                if self._error is not None:
                    raise self._error from None
                waited = time.monotonic() - began
                if self._runtime.stop() and waited > _STOP_S:
                    raise SourceStopped from None
                if waited > self.stall_seconds:
                    raise TrainingError(
                        f"actor thread {thread} gave no unroll for {self.stall_seconds:g} s (source.stall_seconds): "
                        "its env hangs"
                    ) from None

    # -- actors' side ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.threads == 0:
            self._actor = self._make_actor(0)
            return
        self._queues = [queue.Queue(self.queue_depth) for _ in range(self.threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"actor-{i}", daemon=True) for i in range(self.threads)
        ]
        for thread in self._threads:
            thread.start()

    def _make_actor(self, thread: int) -> Actor:
        count = self.envs_per_actor
        first = (jax.process_index() * max(self.threads, 1) + thread) * count
        # All envs of the run get consecutive seeds, other ones after a resume.
        sequence = np.random.SeedSequence([self._runtime.seed, self._first_update])
        seed = int(sequence.generate_state(1)[0]) % (2**31 - self.num_envs)
        ids = np.arange(first, first + count, dtype=np.int32)
        env = self._make_env()
        try:
            return Actor(
                env,
                self._act,
                ids,
                seed + first,
                unroll_length=self.unroll_length,
                blocks=self._blocks,
                part=thread,
                device=self._device(thread),
                num_envs=self.num_envs,
                first_step=self._first_update * self.steps_per_update,
            )
        except BaseException:
            env.close()
            raise

    def _device(self, thread: int) -> Any:
        """The device that a thread acts on."""
        return self._devices[thread % len(self._devices)]

    def _model_for(self, thread: int, published: _Published) -> PyTree:
        """Published parameters on the device that a thread acts on."""
        own = self._device(thread)
        learner = self._learner_devices
        near = own if own in learner else learner[thread % len(learner)]
        model = jax.tree.map(
            lambda x: next(shard.data for shard in x.addressable_shards if shard.device == near), published.model
        )
        return jax.device_put(model, own)  # no copy where it is there already

    def _newest_ready(self) -> _Published:
        """The newest parameters that need no waiting for, or the oldest at hand where all of them do."""
        recent = self._recent
        return next((p for p in reversed(recent) if p.ready()), recent[0])

    def _work(self, thread: int) -> None:
        """An actor thread, until it is stopped or fails."""
        actor = None
        try:
            actor = self._make_actor(thread)
            key = fold_in(fold_in(self._key, np.int32(jax.process_index())), np.int32(thread))
            number = self._first_update
            current = self._newest_ready()
            model = self._model_for(thread, current)
            while not self._stop.is_set():
                newest = self._newest_ready()
                if newest is not current:
                    current, model = newest, self._model_for(thread, newest)
                self._put(thread, actor.unroll(model, current.updates, fold_in(key, np.int32(number))))
                number += 1
        except BaseException as error:  # travels to the main thread, whatever it is
            self._error = error
        finally:
            if actor is not None:
                actor.close()

    def _put(self, thread: int, unrolled: Unrolled) -> None:
        while not self._stop.is_set():
            try:
                return self._queues[thread].put(unrolled, timeout=_POLL_S)
            except queue.Full:
                continue

    def close(self) -> None:
        """Stops the threads and closes the envs."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        if self._actor is not None:
            self._actor.close()


def _whole(parts: list[Unrolled]) -> Trajectory:
    """The batch of several actors; the inputs lie together already."""
    if len(parts) == 1:
        return parts[0].trajectory
    rest = [p.trajectory.replace(inputs=None) for p in parts]
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *rest).replace(inputs=parts[0].block)


def _joined(parts: list[Unrolled]) -> Metrics:
    """Metrics of several actors as one, totals and counts added."""
    metrics: Metrics = {}
    for part in parts:
        for name, (total, count) in part.metrics.items():
            seen = metrics.get(name, (0.0, 0.0))
            metrics[name] = (seen[0] + total, seen[1] + count)
    # Of an update, however many threads and processes play.
    metrics["actor/episodes"] = (metrics["actor/episodes"][0], 1.0 if jax.process_index() == 0 else 0.0)
    return metrics

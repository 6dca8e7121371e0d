"""ActorThreads ends whatever happens, with the error that was first; and refuses configs that cannot work."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest
from actor_setups import SOON, alive, running, wait_until
from learner_setups import host, make_agent

from flaxrl.envs.fake import HostScripted, Scripted
from flaxrl.envs.spec import EnvSpec, MultiDiscrete
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers.actors import ActorThreads

# -- errors -------------------------------------------------------------------------------------------------------


def test_an_env_that_raises_ends_the_run_with_its_own_error():
    def make(num_envs: int) -> HostScripted:
        fails = threading.current_thread().name == "actor-2"
        return HostScripted(num_envs=num_envs, fail_at=30 if fails else None)

    with running(make, threads=4) as run:
        with pytest.raises(RuntimeError, match="fails at step 30") as caught:
            for _ in range(8):
                run.sample()
        assert "fake.py" in "".join(traceback.format_tb(caught.value.__traceback__))
        began = time.monotonic()
        run.source.close()
        assert time.monotonic() - began < SOON / 2 and not alive()


def test_an_env_that_cannot_be_made_ends_the_run():
    def make(num_envs: int) -> HostScripted:
        if threading.current_thread() is threading.main_thread():
            return HostScripted(num_envs=num_envs)
        raise OSError("no emulator")

    with running(make, threads=2) as run, pytest.raises(OSError, match="no emulator"):
        run.sample()


def test_a_hanging_env_ends_the_run():
    go_on = threading.Event()

    class Hangs(HostScripted):
        def step(self, action: np.ndarray) -> Any:
            go_on.wait()
            return super().step(action)

    with running(lambda n: Hangs(num_envs=n), stall_seconds=0.3) as run:
        try:
            with pytest.raises(TrainingError, match=r"thread 0 gave no unroll for 0\.3 s \(source\.stall_seconds"):
                run.sample()
        finally:
            go_on.set()


@pytest.mark.parametrize("threads", [0, 2])
def test_no_legal_action_ends_the_run_with_its_step(threads):
    """Env 3 of 4 in row 2 of the 8th update of 5 x 4 steps: 7 * 20 + 2 * 4 + 3."""

    class Trap(HostScripted):
        def _mask(self) -> Any:
            mask = super()._mask()
            assert mask is not None
            if self._calls == 2 and threading.current_thread().name != "actor-0":
                mask[-1] = False
            return mask

    with (
        running(lambda n: Trap(num_envs=n, mask="partial"), threads=threads, updates=7) as run,
        pytest.raises(TrainingError, match="env 3 gave an action mask without a legal action at step 151, "),
    ):
        run.sample()


class Parts(HostScripted):
    """Actions of two components; at time 2 of an episode env 1 has none for the first, and two for the second."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec = EnvSpec(self.spec.observation, MultiDiscrete((2, 3)), action_mask=True)

    def step(self, action: np.ndarray) -> Any:
        return super().step(action[:, 1])

    def _mask(self) -> np.ndarray:
        mask = np.broadcast_to([True, True, True, False, True], (self.num_envs, 5)).copy()
        mask[1, :2] = self._time[1] != 2
        return mask


def test_a_component_without_a_legal_action_ends_the_run():
    agent = make_agent(Parts(num_envs=1).spec, core="feed_forward")
    with (
        running(lambda n: Parts(num_envs=n), agent=agent, threads=0) as run,
        pytest.raises(TrainingError, match="env 1 gave an action mask without a legal action at step 9, "),
    ):
        run.sample()


def test_no_legal_action_on_a_last_row_is_fine():
    with running(env={"mask": "empty_on_last", "episode_length": 2}, threads=0) as run:
        trajectory = host(run.sample()[0])
    assert not trajectory.inputs.action_mask[:-1][~trajectory.mask].any()
    assert np.isfinite(trajectory.log_prob).all()


@pytest.mark.parametrize("queue_depth", [1, 3])
def test_close_while_actors_wait_at_full_queues(queue_depth):
    with running(threads=2, queue_depth=queue_depth, prefetch=0) as run:
        run.sample()
        wait_until(lambda: all(q.full() for q in run.source._queues))
        assert len(alive()) == 2
        began = time.monotonic()
        run.source.close()
        assert time.monotonic() - began < SOON / 2 and not alive()
        run.source.close()


def test_a_learner_that_dies_takes_the_actors_with_it():
    with pytest.raises(ZeroDivisionError), running(threads=2, queue_depth=1) as run:
        for i in range(4):
            run.sample(number=i)
            if i == 3:
                raise ZeroDivisionError
    assert not alive()


def test_close_without_a_sample():
    with running(threads=2):
        assert not alive()


@pytest.mark.parametrize("threads", [0, 1])
def test_envs_are_closed(threads):
    closed = []

    class Noting(HostScripted):
        def close(self) -> None:
            closed.append(threading.current_thread().name)

    with running(lambda n: Noting(num_envs=n), threads=threads) as run:
        run.sample()
        before = len(closed)
    assert len(closed) > before


# -- config ------------------------------------------------------------------------------------------------------------


def test_envs_must_split_over_threads():
    with pytest.raises(ConfigError, match="10 envs do not split into 4 actor threads: 10 % 4 = 2; nearest: 8 or 12"):
        ActorThreads(num_envs=10, threads=4)


def test_an_env_in_jax_is_refused():
    with (
        pytest.raises(ConfigError, match=r"Scripted is in JAX: use config_for\('jax_rollout'\)"),
        running(lambda n: Scripted()),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value"), [("threads", -1), ("queue_depth", 0), ("prefetch", -1), ("stall_seconds", 0.0), ("num_envs", 0)]
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"ActorThreads\.{name} = {value} must be"):
        ActorThreads(**{name: value})

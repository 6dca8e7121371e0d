"""ActorThreads: what it yields, which parameters act, and that it ends whatever happens."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_setups import VECTOR, host, key, learner, make_agent, mesh_of, progress, same

from flaxrl.configuration import MeshSettings
from flaxrl.envs.fake import HostScripted, Scripted
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers import actor as actor_module
from flaxrl.trainers.actors import ActorThreads
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import init_state
from flaxrl.trainers.source import Runtime, iterate

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


# -- what it yields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_every_reward_is_seen_once_and_a_row_is_always_the_same_env(threads):
    with running(threads=threads, env={"reward": "count", "episode_length": 3}) as run:
        unrolls = [host(run.sample()[0]) for _ in range(4)]
    reward, mask = (np.concatenate([getattr(u, n) for u in unrolls]) for n in ("reward", "mask"))
    assert reward.shape == (20, 4)
    for b in range(4):
        # 4 rows an episode, of which one only resets: 15 executed actions, paid 0, 1, ... in order.
        assert reward[mask[:, b], b].tolist() == list(range(15))
    for before, after in zip(unrolls, unrolls[1:], strict=False):
        np.testing.assert_array_equal(before.inputs.observation[-1], after.inputs.observation[0])


def test_float64_observations_travel_as_float32():
    with running(threads=0, env={"float64": True}) as run:
        assert run.sample()[0].inputs.observation.dtype == jnp.float32


@pytest.mark.parametrize("threads", [0, 2])
def test_episode_metrics_are_totals_and_counts(threads):
    with running(threads=threads, env={"reward": "count", "episode_length": 3}) as run:
        metrics = [run.sample()[1] for _ in range(4)]
    total = {n: np.sum([m[n] for m in metrics], axis=0).tolist() for n in metrics[0]}
    # Episodes pay 0+1+2, 3+4+5, ... 12+13+14 in each of 4 envs.
    assert total["actor/episode_return"] == [4 * sum(range(15)), 20.0]
    assert total["actor/episode_length"] == [60.0, 20.0]
    assert total["actor/episodes"] == [20.0, 4.0]  # an update's mean, however many threads


def test_lock_step_is_deterministic():
    def play(seed: int = 0) -> Any:
        with running(threads=0, seed=seed) as run:
            state, update = _learner(run)
            unrolls = []
            for i in range(3):
                trajectory, metrics = run.sample(state, i)
                assert metrics["actor/lag_updates"] == (0.0, 1.0)
                unrolls.append(host(trajectory))
                state, _ = update(state, trajectory, key(i))
            return unrolls, host(state.params)

    first = play()
    assert same(first, play())
    assert not same(first[0], play(seed=1)[0])


def _learner(run: Run, **fields: Any) -> tuple[Any, Any]:
    """A state and a donating update for the run's agent."""
    state, update, _ = learner(run.source._runtime.agent, VECTOR, Optimizer(learning_rate=1e-2), **fields)
    return state, update


def test_a_nan_reward_passes_to_the_loss():
    with running(threads=1, env={"nan_at": 3}) as run:
        reward = host(run.sample()[0].reward)
    assert np.isnan(reward).sum() == 1 and np.isnan(reward[2, 0])


# -- which parameters act ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch", "queue_depth"), [(0, 1), (2, 2)])
def test_actors_act_with_recent_whole_parameters(prefetch, queue_depth):
    """40 donating updates: what acted is exactly the parameters of `lag` updates ago, and no batch changes later."""
    agent = make_agent(core="feed_forward")
    log_probs = jax.jit(
        lambda params, t: agent.apply({"params": params}, t.inputs, ())[0][:-1].policy.log_prob(t.action)
    )
    with running(agent=agent, prefetch=prefetch, queue_depth=queue_depth, threads=1) as run:
        state, update = _learner(run)
        versions, batches, lags = [], [], []
        for i in range(40):
            versions.append(host(state.params))
            trajectory, metrics = run.sample(state, i)
            batches.append((trajectory, host(trajectory)))
            lags.append(int(metrics["actor/lag_updates"][0]))
            state, _ = update(state, trajectory, key(i))
    assert min(lags) >= 0 and max(lags) <= prefetch + queue_depth + 1, lags
    for i, (now, before) in enumerate(batches):
        assert same(now, before), "a batch changed after it was handed over"
        acted = log_probs(versions[i - lags[i]], before)
        np.testing.assert_allclose(acted, before.log_prob, rtol=1e-5, atol=1e-5)
    assert np.abs(log_probs(versions[0], batches[-1][1]) - batches[-1][1].log_prob).max() > 1e-3


def test_threads_act_on_four_devices_beside_the_learner():
    with running(threads=2, devices=4, num_envs=8) as run:
        state, update = _learner(run, data=4)
        data = None
        for i in range(6):
            state, data, metrics = iterate(run.source, update, state, data, key(i))
            assert metrics["actor/lag_updates"][0] <= 2 * 3
        assert int(state.updates) == 6 and float(metrics["loss/skipped"][0]) == 0
        # One compilation a device that acts.
        assert run.source._act.step._cache_size() <= 2


def test_act_compiles_once():
    with running(threads=1) as run:
        state, update = _learner(run)
        for i in range(4):
            trajectory, _ = run.sample(state, i)
            state, _ = update(state, trajectory, key(i))
            if i == 1:
                sizes = run.source._act.step._cache_size(), run.source._copy._cache_size()
        assert (run.source._act.step._cache_size(), run.source._copy._cache_size()) == sizes
        assert sizes[0] == 1


def _count(monkeypatch: Any, owner: Any, name: str) -> list[None]:
    """Counts the calls of `owner.name`."""
    calls, wrapped = [], getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_one_transfer_an_unroll(monkeypatch):
    """Of a step only its actions come to the host at once; the rest, and what the learner gets, moves once an unroll."""
    down = _count(monkeypatch, actor_module.jax, "device_get")
    up = _count(monkeypatch, actor_module.jax, "make_array_from_process_local_data")
    for length in (3, 9):
        with running(threads=0, unroll_length=length) as run:
            down.clear()
            up.clear()
            trajectory, _ = run.sample()
            assert len(down) == 1
            assert len(up) == len(jax.tree.leaves(trajectory))


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_env_seeds_differ_and_follow_from_seed_and_update():
    def seeds(**fields: Any) -> list[int]:
        with running(threads=2, num_envs=6, **fields) as run:
            run.sample()
        return sorted(run.seeds)

    first = seeds()
    assert len(set(first)) == 6
    assert seeds() == first
    others = [seeds(seed=1), seeds(updates=5)]
    assert not set(first) & set(others[0]) and not set(first) & set(others[1])
    assert seeds(updates=5) == others[1]


# -- how it ends -------------------------------------------------------------------------------------------------------


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
            with pytest.raises(TrainingError, match=r"actor thread 0 gave no unroll for 0\.3 s \(source\.stall_seconds"):
                run.sample()
        finally:
            go_on.set()


def test_no_legal_action_ends_the_run():
    with (
        running(env={"mask": "empty"}, agent=make_agent(core="feed_forward"), threads=1) as run,
        pytest.raises(TrainingError, match="env 0 gave an action mask without a legal action at step 0, "),
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

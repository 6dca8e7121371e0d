"""ActorThreads: what it yields, and which parameters act."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from actor_setups import Run, running
from learner_setups import VECTOR, compilations, host, key, learner, make_agent, same

from flaxrl.trainers import actor as actor_module
from flaxrl.trainers import actors as actors_module
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.source import iterate

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
    for before, after in itertools.pairwise(unrolls):
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


@pytest.mark.parametrize(("prefetch", "queue_depth", "late"), [(0, 1, False), (2, 2, True)])
def test_actors_act_with_recent_whole_parameters(prefetch, queue_depth, late, monkeypatch):
    """40 donating updates: what acted is exactly the parameters of `lag` updates ago, and no batch changes later.

    Where `late`, the update that gives the newest parameters always seems to run still, so actors take the last ones.
    """
    agent = make_agent(core="feed_forward")
    log_probs = jax.jit(
        lambda params, t: agent.apply({"params": params}, t.inputs, ())[0][:-1].policy.log_prob(t.action)
    )
    with running(agent=agent, prefetch=prefetch, queue_depth=queue_depth, threads=1) as run:
        state, update = _learner(run)
        if late:
            monkeypatch.setattr(actors_module._Published, "ready", lambda p: p.updates < run.source._updates)
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
        assert compilations(run.source._act.step) <= 2


def test_act_compiles_once():
    with running(threads=1) as run:
        state, update = _learner(run)
        for i in range(4):
            trajectory, _ = run.sample(state, i)
            state, _ = update(state, trajectory, key(i))
            if i == 1:
                sizes = compilations(run.source._act.step), compilations(run.source._copy)
        assert (compilations(run.source._act.step), compilations(run.source._copy)) == sizes
        assert sizes[0] == 1


def _count(monkeypatch: Any, owner: Any, name: str) -> list[Any]:
    """Notes the first argument of each call of `owner.name`."""
    calls, wrapped = [], getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(("core", "memory", "arrays"), [("feed_forward", False, 1), ("lstm", True, 4)])
def test_what_moves_between_host_and_device(core, memory, arrays, monkeypatch, capfd):
    """A step moves what the model reads of a row in, and its actions out; all else moves once an unroll.

    Of a row a feed-forward model reads the observation only, one with an LSTM the step type too.
    """
    down = _count(monkeypatch, actor_module.jax, "device_get")
    read = _count(monkeypatch, actor_module.np, "asarray")
    agent = make_agent(core=core, use_last_action=memory, use_last_reward=memory)
    for length in (3, 9):
        with running(threads=0, unroll_length=length, agent=agent) as run:
            run.sample()  # envs, env ids and compilation
            number = key(1)
            down.clear()
            read.clear()
            capfd.readouterr()
            with jax.transfer_guard("log_explicit"):
                trajectory = run.source.sample(None, run.state, number)[1]
            up = capfd.readouterr().err.count("host-to-device transfer")
            whole = len(jax.tree.leaves(trajectory))
            # A row a step; the number of updates; the batch.
            assert up == length * arrays + 1 + whole
            assert len(down) == 1
            assert len([x for x in read if isinstance(x, jax.Array)]) == length


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_batches_share_no_memory_and_never_change(threads):
    """On a CPU a batch may be the very memory that the actors wrote; it stays its own while they go on."""
    with running(threads=threads, queue_depth=2) as run:
        state, update = _learner(run)
        batches = []
        for i in range(6):
            trajectory, _ = run.sample(state, i)
            batches.append((trajectory, host(trajectory)))
            state, _ = update(state, trajectory, key(i))
    assert all(same(now, before) for now, before in batches)
    seen = [[np.asarray(x) for x in jax.tree.leaves(now)] for now, _ in batches]
    for before, after in itertools.combinations(seen, 2):
        assert not any(np.shares_memory(x, y) for x in before for y in after)


def test_the_learner_takes_the_inputs_without_a_copy():
    with running(threads=2) as run:
        blocks, take = [], run.source._blocks.take

        def noted(part: int, row: Any) -> Any:
            blocks.append(take(part, row))
            return blocks[-1]

        run.source._blocks.take = noted
        observation = run.sample()[0].inputs.observation
    assert any(np.shares_memory(np.asarray(observation), block.observation) for block, _ in blocks)


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

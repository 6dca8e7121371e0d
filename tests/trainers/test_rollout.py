"""JaxRollout: what it yields of envs with known answers, and on how many devices it does not matter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_setups import assert_close, compilations, host, key, make_agent, means, mesh_of, progress, same

from flaxrl.configuration import MeshSettings
from flaxrl.envs.fake import Counting, HostScripted, Scripted
from flaxrl.envs.spec import EnvSpec, MultiDiscrete
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.rollout import JaxRollout
from flaxrl.trainers.setup import init_state
from flaxrl.trainers.source import Runtime
from flaxrl.types import FIRST, LAST


def start(env: Any, agent: Any = None, devices: int = 1, seed: int = 0, **fields: Any) -> tuple[Any, Any, Any, Any]:
    """(source, state, data, jitted sample) of a rollout that is set up."""
    agent = make_agent(env.spec, core="feed_forward") if agent is None else agent
    mesh = mesh_of(devices)[1]
    source = JaxRollout(**({"num_envs": 4, "unroll_length": 5} | fields))
    state = init_state(agent, env.spec, Optimizer(), MeshSettings(), mesh, 0, target=False)
    source.setup(Runtime(lambda n: env, agent, mesh, seed, progress))
    return source, state, source.init(state, key(1000 + seed)), jax.jit(source.sample)


def play(env: Any, samples: int = 4, seed: int = 0, **fields: Any) -> tuple[list[Any], list[dict]]:
    """Host copies of consecutive trajectories, and their metrics."""
    _, state, data, sample = start(env, seed=seed, **fields)
    unrolls, metrics = [], []
    for i in range(samples):
        data, trajectory, found = sample(data, state, key(seed * 100 + i))
        unrolls.append(host(trajectory))
        metrics.append(host(found))
    return unrolls, metrics


def test_every_reward_is_seen_once():
    unrolls, _ = play(Counting())
    rewards = np.concatenate([u.reward for u in unrolls])
    assert all(u.mask.all() for u in unrolls)
    assert rewards.T.tolist() == [list(range(20))] * 4
    # The row that ends an unroll starts the next one, so no action goes unanswered.
    seen = [u.inputs.observation[:, 0, 0].tolist() for u in unrolls]
    assert seen == [list(range(5 * k, 5 * k + 6)) for k in range(4)]


def test_episode_metrics_are_known_returns():
    # Episodes of 3 pay 0 + 1 + 2 and take 4 rows with the reset: 20 rows hold 5 episodes an env, 4 envs.
    unrolls, metrics = play(Counting(episode_length=3))
    total = jax.tree.map(lambda *x: float(sum(x)), *metrics)
    assert total["actor/episode_return"] == (5 * 4 * 3.0, 20.0)
    assert total["actor/episode_length"] == (5 * 4 * 3.0, 20.0)
    assert total["actor/episodes"] == (20.0, 4.0)
    valid = np.concatenate([np.where(u.mask, u.reward, np.nan) for u in unrolls])[:, 0]
    np.testing.assert_array_equal(valid, [0, 1, 2, np.nan] * 5)


def test_an_unroll_without_an_episode_end_counts_nothing():
    _, metrics = play(Counting(), samples=1)
    assert means(metrics[0]) == {"actor/episodes": 0.0}


def test_steps_are_rows():
    source = JaxRollout(num_envs=6, unroll_length=7)
    assert source.steps_per_update == 42 and source.batch_size == 6


def test_envs_differ_and_a_rerun_is_the_same():
    env = Scripted(episode_length=3, num_actions=4)
    agent = make_agent(env.spec, core="feed_forward")
    first, _ = play(env, agent=agent, num_envs=8)
    again, _ = play(env, agent=agent, num_envs=8)
    other, _ = play(env, agent=agent, num_envs=8, seed=1)
    assert same(first, again) and not same(first, other)
    for field in ("action", "log_prob"):
        columns = np.concatenate([getattr(u, field) for u in first]).T
        assert len({c.tobytes() for c in columns}) == 8
    episodes = np.concatenate([u.inputs.observation[:-1] for u in first])
    starts = np.concatenate([u.inputs.step_type[:-1] for u in first]) == FIRST
    offsets = episodes[..., 1:].argmax(-1)
    assert len({offsets[starts[:, b], b].tobytes() for b in range(8)}) > 4


def test_four_devices_play_what_one_plays():
    env = Scripted(episode_length=3, mask="partial")
    fields = {"agent": make_agent(env.spec, use_last_action=True), "num_envs": 8, "samples": 2}
    one, metrics_one = play(env, **fields)
    four, metrics_four = play(env, devices=4, **fields)
    assert_close(one, four, 1e-6)
    assert_close(metrics_one, metrics_four, 1e-6)


def test_data_keeps_its_placement_and_compiles_once():
    _, state, data, sample = start(Scripted(), devices=4, num_envs=8)
    placed = jax.tree.map(lambda x: x.sharding, data)
    for i in range(3):
        data, _, _ = sample(data, state, key(i))
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), data, placed))
    sizes = compilations(sample)
    data, _, _ = sample(data, state, key(9))
    assert compilations(sample) == sizes


def test_no_legal_action_on_a_last_row_is_fine():
    source, state, data, sample = start(Scripted(episode_length=3, mask="empty_on_last"))
    for i in range(2):
        data, trajectory, _ = sample(data, state, key(i))
        assert not trajectory.inputs.action_mask[trajectory.inputs.step_type == LAST].any()
        assert np.isfinite(trajectory.log_prob).all()
    source.check(data)


class _Trap(Scripted):
    """No legal action at time 2 of an episode in envs that drew `secret`; its mask is full elsewhere."""

    secret = -1

    def _mask(self, state):
        legal = ~((state.time == 2) & (state.offset == self.secret))
        return jnp.broadcast_to(legal, (self.num_actions,))


class _Parts(_Trap):
    """The same of the first of two components; the second has two legal actions everywhere."""

    def __post_init__(self):
        super().__post_init__()
        self.spec = EnvSpec(self.spec.observation, MultiDiscrete((2, 3)), action_mask=True)

    def step(self, state, action, key):
        return super().step(state, action[1], key)

    def _mask(self, state):
        return jnp.concatenate([super()._mask(state)[:2], jnp.asarray([True, False, True])])


@pytest.mark.parametrize("kind", [_Trap, _Parts])
def test_no_legal_action_elsewhere_is_an_error_that_names_env_and_step(kind):
    env = kind(episode_length=9, mask="partial")
    source, state, data, sample = start(env, num_envs=8)
    secrets = host(data.envs.env.offset)
    trapped = int(np.flatnonzero(secrets != secrets[0])[0])
    env.secret = int(secrets[trapped])
    data, _, _ = sample(data, state, key())
    # The row is t = 2 of 8 envs: steps 16 to 23.
    with pytest.raises(TrainingError, match=rf"env {trapped} gave .* without a legal action at step {16 + trapped}, "):
        source.check(data)
    for i in range(3):  # it stays the first one
        data, _, _ = sample(data, state.replace(updates=jnp.int32(i + 1)), key(i))
    with pytest.raises(TrainingError, match=rf"env {trapped} .* at step {16 + trapped}, "):
        source.check(data)


def test_a_host_env_is_refused():
    env = HostScripted(num_envs=4)
    with pytest.raises(ConfigError, match="HostScripted runs on the host: use config_for"):
        start(env)


@pytest.mark.parametrize("field", ["num_envs", "unroll_length", "updates_per_call"])
def test_sizes_are_positive(field):
    with pytest.raises(ConfigError, match=rf"JaxRollout\.{field} = 0 must be > 0"):
        JaxRollout(**{field: 0})

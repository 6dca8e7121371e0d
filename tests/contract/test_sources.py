"""Every source passes the source contract, and a broken one does not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from source_contract import check_source

from flaxrl.build import build, config_for
from flaxrl.configuration import MeshSettings
from flaxrl.envs.fake import HostScripted, Scripted
from flaxrl.trainers.actors import ActorThreads
from flaxrl.trainers.rollout import JaxRollout
from flaxrl.trainers.sharding import make_mesh
from flaxrl.types import LAST

SOURCES = {
    "jax_rollout": lambda: JaxRollout(num_envs=4, unroll_length=5),
    "lock_step": lambda: ActorThreads(num_envs=4, unroll_length=5, threads=0),
    "one_thread": lambda: ActorThreads(num_envs=4, unroll_length=5, threads=1, queue_depth=2, prefetch=0),
    "two_threads": lambda: ActorThreads(num_envs=4, unroll_length=5, threads=2),
}
ENV = {"episode_length": 3, "mask": "empty_on_last"}


def _agent(core: str = "lstm") -> Any:
    block = config_for(
        "agent",
        torso=config_for("mlp", hidden=(8,)),
        core=config_for(core, features=8),
        head=config_for("policy_value", policy_scale=1.0),
        policy=config_for("sampled"),
        use_last_action=True,
        use_last_reward=True,
    )
    spec = Scripted(**ENV).spec
    return build(block, "model", action_spec=spec.action, env_spec=spec)


def _make_env(name: str, **fields: Any):
    fields = ENV | fields
    return lambda n: Scripted(**fields) if name == "jax_rollout" else HostScripted(num_envs=n, **fields)


def _mesh(devices: int):
    return make_mesh(MeshSettings(devices), jax.devices()[:devices])


@pytest.mark.parametrize(
    ("name", "devices"),
    [("jax_rollout", 4), ("lock_step", 1), ("one_thread", 1), ("two_threads", 4)],
)
def test_source(name, devices):
    unrolls = check_source(SOURCES[name](), _make_env(name), _agent(), _mesh(devices))
    # Terminations: discount 0 on every row that ends an episode.
    for u in unrolls:
        ends = u.mask & (u.inputs.step_type[1:] == LAST)
        assert np.all(u.discount[ends] == 0)


@pytest.mark.parametrize("name", ["jax_rollout", "one_thread"])
def test_truncations_keep_discount_one(name):
    env = _make_env(name, time_limit=True, mask="partial")
    unrolls = check_source(SOURCES[name](), env, _agent("gru"), _mesh(1))
    assert all(np.all(u.discount[u.mask] == 1) for u in unrolls)


class _LateCarry(JaxRollout):
    """Stores the state after the first row, not before it."""

    def sample(self, data, state, key):
        new, trajectory, metrics = super().sample(data, state, key)
        return new, trajectory.replace(carry=jax.tree.map(lambda x: x[None], new.carry)), metrics


class _Gap(JaxRollout):
    """Drops a row between unrolls."""

    def sample(self, data, state, key):
        data, _, _ = super().sample(data, state, jax.random.fold_in(key, 1))
        return super().sample(data, state, key)


class _Alike(JaxRollout):
    """All envs are the same env."""

    def sample(self, data, state, key):
        data, trajectory, metrics = super().sample(data, state, key)
        return data, jax.tree.map(lambda x: jnp.repeat(x[:, :1], x.shape[1], 1), trajectory), metrics


@pytest.mark.parametrize(
    ("broken", "message"),
    [(_LateCarry, "differs from the unroll's"), (_Gap, "start with the row"), (_Alike, "acted alike")],
)
def test_the_contract_notices(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_source(broken(num_envs=2, unroll_length=5), _make_env("jax_rollout"), _agent(), _mesh(1))

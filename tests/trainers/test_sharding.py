"""Meshes, where a state lies, and what a sharded update computes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P
from learner_setups import (
    VECTOR,
    VTRACE,
    assert_close,
    host,
    key,
    learner,
    made_up_trajectory,
    make_agent,
    mesh_of,
)

from flaxrl.configuration import MeshSettings
from flaxrl.errors import ConfigError
from flaxrl.losses.base import Loss
from flaxrl.losses.ppo import PPO
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.sharding import bind_unroll, make_mesh, state_shardings, to_global

SGD = Optimizer("sgd", learning_rate=1.0)
ADAM = Optimizer("adam", learning_rate=1e-2)
LAYOUTS: dict[str, Any] = {
    "single": {},
    "data": {"data": 4},
    "fsdp": {"data": 2, "fsdp": 2},
    "fsdp_only": {"data": 1, "fsdp": 4},
}


# -- mesh --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "fsdp", "shape"), [(-1, 1, (4, 1)), (-1, 2, (2, 2)), (1, -1, (1, 4)), (2, 1, (2, 1)), (1, 1, (1, 1))]
)
def test_mesh_shapes(data, fsdp, shape):
    mesh = make_mesh(MeshSettings(data, fsdp))
    assert mesh.axis_names == ("data", "fsdp") and mesh.devices.shape == shape


def test_a_mesh_that_devices_cannot_fill_is_refused():
    with pytest.raises(ConfigError, match="mesh of data=4 x fsdp=2 needs 8 devices; there are 4"):
        make_mesh(MeshSettings(4, 2))
    with pytest.raises(ConfigError, match="4 devices do not split into 3 parts of the mesh: 4 % 3 = 1"):
        make_mesh(MeshSettings(-1, 3))
    with pytest.raises(ConfigError, match="cannot both be -1"):
        make_mesh(MeshSettings(-1, -1))


# -- where a state lies ------------------------------------------------------------------------------------------------


class Parameters(struct.PyTreeNode):
    """A state with nothing but parameters."""

    params: Any


def test_a_rule_that_matches_nothing_is_refused():
    settings, mesh = mesh_of(2, 2, (("torso/Dence", "fsdp"),))
    with pytest.raises(ConfigError, match=r"'torso/Dence' matches no parameter; there are torso/Dense_0/kernel"):
        state_shardings(Parameters({"torso": {"Dense_0": {"kernel": jnp.zeros((4, 4))}}}), settings, mesh)


def test_rules_place_the_largest_dimension_that_divides():
    settings, mesh = mesh_of(2, 2, (("keep", "replicated"), (r"a|keep", "fsdp")))
    shapes = {
        "a": {"wide": jnp.zeros((4, 6)), "odd": jnp.zeros((5, 4)), "none": jnp.zeros((3, 5)), "tie": jnp.zeros((4, 4))},
        "keep": jnp.zeros((8,)),
        "other": jnp.zeros((8,)),
    }
    placed = jax.tree.map(lambda s: s.spec, state_shardings(Parameters(shapes), settings, mesh).params)
    assert placed["a"] == {"wide": P(None, "fsdp"), "odd": P(None, "fsdp"), "none": P(), "tie": P("fsdp")}
    assert placed["keep"] == P() and placed["other"] == P()


@pytest.mark.usefixtures("optimized")
def test_moments_lie_like_their_parameters():
    state, _, _ = learner(make_agent(), VECTOR, ADAM, data=2, fsdp=2)
    moments = state.opt_state.inner_state[0][0]
    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
    kernels = [s for path, s in jax.tree_util.tree_leaves_with_path(specs) if "kernel" in jax.tree_util.keystr(path)]
    assert kernels and all("fsdp" in s for s in kernels)
    for moment in (moments.mu, moments.nu):
        assert jax.tree.map(lambda x: x.sharding.spec, moment) == specs
    whole = host(learner(make_agent(), VECTOR, ADAM)[0])
    assert_close(host(state.params), whole.params, 0)
    kernel = state.params["torso"]["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2


def test_to_global_splits_the_batch():
    mesh = mesh_of(2, 2)[1]
    tree = {"x": np.arange(24).reshape(3, 8)}
    made = to_global(tree, mesh)["x"]
    assert [s.data.tolist() for s in made.addressable_shards][1] == tree["x"][:, 2:4].tolist()
    rows = to_global(np.arange(8), mesh, time_first=False)
    assert [s.data.tolist() for s in rows.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_random_streams_differ_by_shard():
    class Noisy:
        def apply(self, variables, inputs, carry, rngs):
            return (jax.random.uniform(rngs["noise"], inputs.step_type.shape),)

    agent, mesh = make_agent(core="feed_forward"), mesh_of(4)[1]
    unroll = bind_unroll(Noisy(), {}, mesh)
    batch = made_up_trajectory(agent, VECTOR, mesh)
    noise = host(jax.jit(lambda k: unroll({}, batch, {"noise": k}))(key()))
    assert len({tuple(row) for row in noise.T}) == noise.shape[1]


# -- what a sharded update computes ------------------------------------------------------------------------------------


LOSSES: dict[str, Loss] = {"vtrace": VTRACE, "ppo": PPO(minibatch="sequences")}


@functools.cache
def _gradient(loss: str, layout: str = "single") -> tuple[Any, Any]:
    """Gradient and metrics of one SGD step of rate 1."""
    agent = make_agent()
    state, update, mesh = learner(agent, VECTOR, SGD, loss=LOSSES[loss], **LAYOUTS[layout])
    before = host(state.params)
    state, out = update(state, made_up_trajectory(agent, VECTOR, mesh), key())
    return jax.tree.map(np.subtract, before, host(state.params)), host(out.metrics)


@functools.cache
def _adam(layout: str = "single") -> Any:
    """Parameters after two updates."""
    agent = make_agent()
    state, update, mesh = learner(agent, VECTOR, ADAM, **LAYOUTS[layout])
    for i in range(2):
        state, _ = update(state, made_up_trajectory(agent, VECTOR, mesh, seed=i), key(i))
    return host(state.params)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        ("vtrace", "data"),
        ("vtrace", "fsdp"),
        ("ppo", "data"),
        pytest.param("vtrace", "fsdp_only", marks=SLOW),
        pytest.param("ppo", "fsdp", marks=SLOW),
    ],
)
def test_devices_change_neither_loss_nor_gradient(loss: str, layout: str) -> None:
    """Envs end their episodes at different rows, so each device has another number of valid ones."""
    (gradient, metrics), (alone, told) = _gradient(loss, layout), _gradient(loss)
    assert metrics["loss/skipped"][0] == 0
    assert_close(gradient, alone, 1e-6)
    assert_close(metrics, told, 2e-6)


@pytest.mark.parametrize("layout", ["data", pytest.param("fsdp", marks=SLOW)])
def test_devices_do_not_change_training(layout: str) -> None:
    assert_close(_adam(layout), _adam(), 1e-5)

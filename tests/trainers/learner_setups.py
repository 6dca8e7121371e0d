"""What the tests of updates and sources share: small agents, meshes, states, a made-up trajectory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.build import build, config_for
from flaxrl.configuration import MeshSettings
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.losses.base import Loss
from flaxrl.losses.vtrace import VTrace
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import init_state
from flaxrl.trainers.sharding import bind_unroll, make_mesh, to_global
from flaxrl.trainers.statistics import RewardScaling, Statistics
from flaxrl.trainers.update import make_update
from flaxrl.types import FIRST, LAST, MID, AgentInput, Trajectory

VECTOR = EnvSpec(ArraySpec((4,)), Discrete(3))
IMAGE = EnvSpec(ArraySpec((10, 10, 4), np.uint8), Discrete(3))
KERNELS = ((r"kernel", "fsdp"),)
TOTAL_UPDATES = 100
VTRACE = VTrace()


def make_agent(spec: EnvSpec = VECTOR, core: str = "lstm", **fields: Any) -> Any:
    """A small agent; images go through a convolution in chunks of 8 rows."""
    if isinstance(spec.observation, ArraySpec) and len(spec.observation.shape) == 3:
        fields = {"torso": config_for("minatar_cnn", features=4, hidden=8), "torso_chunk": 8} | fields
    block = config_for(
        "agent",
        **(
            {
                "torso": config_for("mlp", hidden=(8,)),
                "core": config_for(core) if core == "feed_forward" else config_for(core, features=8),
                "head": config_for("policy_value", policy_scale=1.0),
                "policy": config_for("sampled"),
            }
            | fields
        ),
    )
    return build(block, "model", action_spec=spec.action, env_spec=spec)


def mesh_of(data: int = 1, fsdp: int = 1, rules: tuple = ()) -> tuple[MeshSettings, Any]:
    """Mesh settings and a mesh of the first data x fsdp devices."""
    settings = MeshSettings(data, fsdp, rules if fsdp > 1 else ())
    return settings, make_mesh(settings, jax.devices()[: data * fsdp])


def progress(updates: Any) -> Any:
    """Fraction done of a run of TOTAL_UPDATES."""
    return updates / TOTAL_UPDATES


def learner(
    agent: Any,
    spec: EnvSpec,
    optimizer: Optimizer,
    data: int = 1,
    fsdp: int = 1,
    rules: tuple = KERNELS,
    loss: Loss = VTRACE,
    reward_scaling: RewardScaling | None = None,
    batch: int = 8,
    **settings: Any,
) -> tuple[Any, Any, Any]:
    """First state, the jitted update as a Trainer runs it (donation included), and the mesh; `batch` is B."""
    mesh_settings, mesh = mesh_of(data, fsdp, rules)
    statistics = Statistics(agent, reward_scaling)
    collections = statistics.start(batch)
    state = init_state(agent, spec, optimizer, mesh_settings, mesh, seed=0, target=False, collections=collections)
    update = make_update(
        loss,
        lambda variables, pieces=1: bind_unroll(agent, variables, mesh, pieces),
        mesh,
        learning_rate=optimizer.learning_rate_at,
        progress=progress,
        statistics=statistics,
        **settings,
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return state, jax.jit(update, donate_argnums=(0,), out_shardings=(shardings, None)), mesh


def made_up_trajectory(
    agent: Any, spec: EnvSpec, mesh: Any, time: int = 6, batch: int = 8, seed: int = 0
) -> Trajectory:
    """Random rows on the mesh; env b < time ends an episode at every other row up to b (so masks differ by shard)."""
    random = np.random.default_rng(seed)
    step_type = np.full((time + 1, batch), MID, np.int8)
    for b in range(min(time, batch)):
        for row in range(b % 3, b + 1, 2):
            step_type[row, b], step_type[row + 1, b] = LAST, FIRST
    masked = step_type[:-1] == LAST

    def answering(x: np.ndarray) -> np.ndarray:
        return np.where(masked, np.nan, x).astype(np.float32)

    assert isinstance(spec.action, Discrete)
    shape = (time + 1, batch, *spec.observation.shape)
    observation = random.integers(256, size=shape) if spec is IMAGE else random.normal(size=shape)
    carry = jax.eval_shape(lambda: agent.core.initial_carry(batch))
    trajectory = Trajectory(
        inputs=AgentInput(observation.astype(spec.observation.dtype), step_type),
        action=random.integers(spec.action.n, size=(time, batch)).astype(np.int32),
        reward=answering(random.normal(size=(time, batch))),
        discount=answering(random.integers(2, size=(time, batch))),
        log_prob=answering(-1 - random.uniform(size=(time, batch))),
        value=answering(random.normal(size=(time, batch))),
        carry=jax.tree.map(lambda x: random.normal(size=(1, *x.shape)).astype(np.float32), carry),
    )
    return to_global(trajectory, mesh)


def host(tree: Any) -> Any:
    """A copy in numpy, which no donation reaches."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def assert_close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    """Trees equal leaf by leaf, relative and absolute `tolerance`."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same numbers, bit by bit."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def means(metrics: Any) -> dict[str, float]:
    """Metric pairs as means; those that counted nothing are left out."""
    return {k: float(total / count) for k, (total, count) in metrics.items() if count > 0}


def key(number: int = 0) -> jax.Array:
    """A key."""
    return jax.random.fold_in(jax.random.key(7), jnp.int32(number))


def compilations(jitted: Any) -> int:
    """Programs that a jitted function has compiled."""
    return jitted._cache_size()

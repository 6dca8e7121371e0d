"""From a config to the objects of a run: env, agent, first state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from flaxrl.build import build
from flaxrl.configuration import MeshSettings
from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.envs.spec import EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.models.agent import wants
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.sharding import state_shardings
from flaxrl.types import FIRST, ActContext, AgentInput, PyTree, TrainState


def env_factory(config: Any) -> Callable[[int], HostEnv | JaxEnv]:
    """Number of envs -> a HostEnv of as many, or the JaxEnv, of `config.env`."""

    def make(num_envs: int) -> HostEnv | JaxEnv:
        env = build(config.env, "config.env", num_envs=num_envs)
        if not isinstance(env, (HostEnv, JaxEnv)):
            raise ConfigError(f"config.env.name = {config.env.name!r} is neither a flaxrl.JaxEnv nor a flaxrl.HostEnv")
        return env

    return make


def build_agent(config: Any, spec: EnvSpec) -> Any:
    """The agent of `config.model` for an env's `spec`."""
    return build(config.model, "config.model", action_spec=spec.action)


def example_input(agent: Any, spec: EnvSpec, batch: int = 1) -> AgentInput:
    """A FIRST row of zeros, `[B, ...]`, with what `agent` and env have."""
    action = jnp.zeros((batch, *spec.action.shape), spec.action.dtype)
    return AgentInput(
        observation=jax.tree.map(jnp.asarray, spec.zeros(batch)),
        step_type=jnp.full((batch,), FIRST, jnp.int8),
        action_mask=jnp.ones((batch, spec.mask_size), bool) if spec.action_mask else None,
        last_action=action if wants(agent, "last_action") else None,
        last_reward=jnp.zeros((batch,), jnp.float32) if wants(agent, "last_reward") else None,
    )


def run_key(seed: Any, purpose: str) -> Any:
    """The root key of one purpose of a run: 'parameters' or 'training'; no two runs or purposes share one.

    `seed` is an int, or int32 on the device.
    """
    return jax.random.fold_in(jax.random.key(seed), ("parameters", "training").index(purpose))


@jax.jit
def fold_in(key: Any, number: Any) -> Any:
    """`jax.random.fold_in` in one dispatch; `number` is an int32 scalar, not a Python int."""
    return jax.random.fold_in(key, number)


def act_context(env_ids: Any, progress: Any) -> ActContext:
    """An ActContext with strongly typed leaves."""
    return ActContext(env_ids=jnp.asarray(env_ids, jnp.int32), progress=jnp.asarray(progress, jnp.float32))


def first_state(
    agent: Any,
    spec: EnvSpec,
    tx: optax.GradientTransformation,
    target: bool,
    key: Any,
    collections: PyTree | None = None,
) -> TrainState:
    """The first TrainState, to be traced; `key` is the run's for 'parameters', the rest as in `init_state`."""
    key_params, key_sample = jax.random.split(key)
    rngs = {"params": key_params, "sample": key_sample}
    context = act_context(jnp.zeros((1,)), 0.0)
    variables = agent.init(rngs, example_input(agent, spec), None, context, method="act")
    return TrainState.init(agent.apply, {**variables, **(collections or {})}, tx, target)


def init_state(
    agent: Any,
    spec: EnvSpec,
    optimizer: Optimizer,
    settings: MeshSettings,
    mesh: Mesh,
    seed: int,
    target: bool,
    abstract: bool = False,
    collections: PyTree | None = None,
) -> TrainState:
    """The first TrainState, made where it will lie: no device ever holds a full copy of what is sharded.

    Args:
        agent: the Linen module.
        spec: of the env.
        optimizer: makes the optax chain.
        settings: sharding rules.
        mesh: devices.
        seed: of the run.
        target: whether the loss wants a target network.
        abstract: only shapes, dtypes and shardings (`jax.ShapeDtypeStruct`), as a checkpoint's template.
        collections: what `variables` hold beside those of the agent; None for nothing.
    """
    tx = optimizer.make()

    def init(key: Any) -> TrainState:
        return first_state(agent, spec, tx, target, key, collections)

    key = run_key(seed, "parameters")
    shapes = jax.eval_shape(init, key)
    shardings = state_shardings(shapes, settings, mesh)
    if abstract:
        return jax.tree.map(lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, shardings)
    return jax.jit(init, out_shardings=shardings)(key)

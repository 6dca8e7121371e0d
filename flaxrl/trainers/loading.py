"""Trained agents, read back from a run's folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.build import build
from flaxrl.configuration import MeshSettings, is_many
from flaxrl.envs.base import HostEnv
from flaxrl.envs.spec import Box, EnvSpec, env_action
from flaxrl.errors import ConfigError
from flaxrl.models.agent import wants
from flaxrl.run_folder import RunFolder
from flaxrl.trainers.checkpoint import Checkpointer
from flaxrl.trainers.seeds import Seeds, init_states, make_seeds
from flaxrl.trainers.setup import act_context, build_agent, env_factory, init_state
from flaxrl.trainers.sharding import make_mesh
from flaxrl.trainers.statistics import Statistics
from flaxrl.types import FIRST, MID, AgentInput, Array, PyTree


class LoadedAgent:
    """A trained agent: `act(observation)` answers greedily, `act(observation, key)` samples.

    It remembers what a recurrent agent remembers; `reset()` starts a new episode. Parameters stay on the device.

    Attributes:
        config: of the run.
        step: at which the parameters were saved.
        spec: of the env: observation and action.
    """

    def __init__(self, config: Any, agent: Any, spec: Any, params: PyTree, variables: PyTree, step: int):
        self.config, self.agent, self.spec, self.step = config, agent, spec, step
        self.params, self.variables = params, variables
        self._act = jax.jit(self._act_rows)
        self.reset()

    def reset(self) -> None:
        """Starts a new episode: forgets the carry, the last action and reward."""
        self._carry, self._last_action, self._first = None, None, True

    def act(
        self,
        observation: PyTree,
        key: Array | None = None,
        *,
        action_mask: np.ndarray | None = None,
        reward: float | np.ndarray = 0.0,
    ) -> np.ndarray:
        """The action for one observation, or for a batch of them.

        Args:
            observation: as the env's spec says, or with a leading batch axis.
            key: samples with it; None is greedy.
            action_mask: bool `[A]` (or `[B, A]`), where the env has masks.
            reward: that came with the observation; only agents with `use_last_reward` look at it.

        Returns:
            The action, or `[B]` of them: 0-based where discrete; a Box's clipped to its bounds.

        Raises:
            ValueError: the observation's shape is not the spec's.
        """
        leaves, specs = jax.tree.leaves(observation), jax.tree.leaves(self.spec.observation)
        shapes = [np.shape(x) for x in leaves]
        single = shapes == [s.shape for s in specs]
        if not single and [s[1:] for s in shapes] != [s.shape for s in specs]:
            raise ValueError(
                f"observation has shape {shapes}; the env's is {[s.shape for s in specs]} (or a batch of it)"
            )
        flat = [np.asarray(x, s.dtype) for x, s in zip(leaves, specs, strict=True)]
        if single:
            flat = [x[None] for x in flat]
            action_mask = None if action_mask is None else np.asarray(action_mask)[None]
        batch = flat[0].shape[0]
        if self._last_action is None or len(self._last_action) != batch:
            self.reset()
            self._last_action = np.zeros((batch, *self.spec.action.shape), self.spec.action.dtype)
            self._carry = self.agent.apply({"params": self.params, **self.variables}, batch, method="initial_carry")
        observation = jax.tree.unflatten(jax.tree.structure(self.spec.observation), flat)
        reward = np.broadcast_to(np.asarray(reward, np.float32), (batch,))
        step_type = np.full(batch, FIRST if self._first else MID, np.int8)
        inputs = (observation, step_type, action_mask, self._last_action, reward)
        action, self._carry = self._act(self.params, self.variables, inputs, self._carry, key)
        self._last_action, self._first = np.asarray(action), False
        spec = self.spec.action
        action = env_action(spec, self._last_action) if isinstance(spec, Box) else self._last_action
        return action[0] if single else action

    def _act_rows(self, params: PyTree, variables: PyTree, inputs: tuple, carry: Any, key: Array | None) -> Any:
        observation, step_type, mask, last_action, last_reward = inputs
        agent = self.agent
        rows = AgentInput(
            observation=observation,
            step_type=step_type,
            action_mask=mask,
            last_action=last_action if wants(agent, "last_action") else None,
            last_reward=last_reward if wants(agent, "last_reward") else None,
        )
        context = act_context(jnp.arange(step_type.shape[0]), 1.0)
        rngs = {} if key is None else {"sample": key}
        model = {"params": params, **variables}
        action, _, _, carry = agent.apply(model, rows, carry, context, rngs=rngs, method="act")
        return action, carry


def load(
    workdir: str | Path, which: str = "latest", *, seed: int | None = None, setting: str | None = None
) -> LoadedAgent:
    """The trained agent of a run's folder.

    Args:
        workdir: folder of a run.
        which: 'latest' or 'best' checkpoint.
        seed: which of a run of several seeds.
        setting: which of a sweep, by its name in the metrics: 'learning_rate=0.001,entropy_cost=0.01'.

    Raises:
        ConfigError: no run, or no checkpoint, in that folder; a seed or setting that is missing or not in the run.
    """
    stored = load_stored(workdir, which).pick(seed, setting)
    return LoadedAgent(stored.config, stored.agent, stored.spec, stored.params, stored.variables, stored.step)


class Stored(NamedTuple):
    """What a run's folder holds; parameters and variables of many seeds have a leading axis `[N]`."""

    config: Any
    agent: Any
    spec: EnvSpec
    params: PyTree
    variables: PyTree
    step: int
    seeds: Seeds | None

    def pick(self, seed: int | None, setting: str | None) -> Stored:
        """That of one run; errors are those of `load`."""
        if self.seeds is not None:
            index = self.seeds.index(seed, setting)
            params, variables = jax.tree.map(lambda x: x[index], (self.params, self.variables))
            return self._replace(params=params, variables=variables, seeds=None)
        if setting is not None or seed not in (None, self.config.seed):
            given = f"setting {setting!r}" if setting is not None else f"seed {seed}"
            raise ConfigError(f"there is no {given}: the folder holds one run, of seed {self.config.seed}")
        return self


def load_stored(workdir: str | Path, which: str = "latest") -> Stored:
    """A run's config, agent and parameters, on one device; errors are those of `load`."""
    config = RunFolder(workdir).load_config()
    optimizer, loss, settings, learner = (
        build(config[k], f"config.{k}") for k in ("optimizer", "loss", "checkpoint", "learner")
    )
    env = env_factory(config)(1)
    with contextlib.closing(env) if isinstance(env, HostEnv) else contextlib.nullcontext():
        spec = env.spec
    agent = build_agent(config, spec)
    # The run's mesh need not fit the devices of this machine; one is enough to act.
    mesh = make_mesh(MeshSettings(data=1), jax.local_devices()[:1])
    source = build(config.source, "config.source")
    collections = Statistics.of(agent, learner).start(source.batch_size)
    seeds = make_seeds(config, source, MeshSettings(), jax.local_devices()[:1]) if is_many(config) else None
    if seeds is None:
        one = MeshSettings(data=1)
        target = init_state(agent, spec, optimizer, one, mesh, int(config.seed), loss.uses_target, True, collections)
    else:
        target = init_states(agent, spec, loss, optimizer, seeds, True, collections)
    checkpointer = Checkpointer(Path(workdir) / "checkpoints", settings.keep, settings.keep_best, True)
    with contextlib.closing(checkpointer):
        restored = checkpointer.restore(target, None, which=which)
    if restored is None:
        raise ConfigError(f"{workdir} holds no {which} checkpoint; train first, or name another --workdir")
    return Stored(config, agent, spec, restored.state.params, restored.state.variables, restored.step, seeds)

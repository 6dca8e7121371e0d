"""Evaluation on envs of its own, and trained agents read back from a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.configuration import EvalSettings
from flaxrl.envs.base import AutoReset, AutoResetState, HostEnv, JaxEnv
from flaxrl.errors import ConfigError
from flaxrl.models.agent import agent_input
from flaxrl.models.policies import row_keys
from flaxrl.trainers.plan import check
from flaxrl.trainers.setup import act_context, build_agent, env_factory, init_state
from flaxrl.types import LAST, Array, PyTree

MAX_STEPS = 108_000
"""An episode that has not ended after as many steps is cut there, and counted as unfinished."""


class Evaluator:
    """Plays whole episodes, env i from a seed of its own, the same at each call; raw scores.

    Training is not touched: other envs, other keys.

    Args:
        make_env: number of envs -> HostEnv or JaxEnv.
        agent: the Linen module.
        settings: episodes, greedy or sampled, seed.
    """

    def __init__(self, make_env: Callable[[int], HostEnv | JaxEnv], agent: Any, settings: EvalSettings):
        self._env, self._agent, self._settings = make_env(settings.episodes), agent, settings
        if isinstance(self._env, HostEnv):
            self._act = jax.jit(self._act_row)
        else:
            self._play = jax.jit(self._play_jax)

    def run(self, params: PyTree, variables: PyTree) -> dict[str, float]:
        """Plays `settings.episodes` episodes.

        Returns:
            `eval/return_mean`, `_std`, `_min`, `_max`, `eval/length_mean`, `eval/episodes`, `eval/unfinished`.
        """
        model = {"params": params, **variables}
        key = jax.random.key(self._settings.seed)
        if isinstance(self._env, HostEnv):
            returns, lengths, finished = self._play_host(self._env, model, key)
        else:
            returns, lengths, finished = jax.device_get(self._play(model, key))
        return {
            "eval/return_mean": float(np.mean(returns, dtype=np.float64)),
            "eval/return_std": float(np.std(returns, dtype=np.float64)),
            "eval/return_min": float(np.min(returns)),
            "eval/return_max": float(np.max(returns)),
            "eval/length_mean": float(np.mean(lengths, dtype=np.float64)),
            "eval/episodes": len(returns),
            "eval/unfinished": int(np.sum(~finished)),
        }

    def close(self) -> None:
        """Frees the envs."""
        if isinstance(self._env, HostEnv):
            self._env.close()

    def _act_row(self, model: PyTree, inputs: Any, carry: Any, key: Array) -> tuple[Array, Any]:
        """Actions `[N, ...]` and the new carry; greedy without a key for the stream 'sample'."""
        context = act_context(jnp.arange(self._settings.episodes), 1.0)
        rngs = {} if self._settings.greedy else {"sample": key}
        action, _, _, carry = self._agent.apply(model, inputs, carry, context, rngs=rngs, method="act")
        return action, carry

    def _initial_carry(self, model: PyTree) -> Any:
        return self._agent.apply(model, self._settings.episodes, method="initial_carry")

    def _play_jax(self, model: PyTree, key: Array) -> tuple[Array, Array, Array]:
        assert isinstance(self._env, JaxEnv)
        episodes, spec = self._settings.episodes, self._env.spec
        envs = AutoReset(self._env)
        key_reset, key_step, key_act = jax.random.split(key, 3)
        ids = jnp.arange(episodes)

        def playing(loop: tuple) -> Array:
            _, _, _, totals, t = loop
            return ~jnp.all(totals[2]) & (t < MAX_STEPS)

        def step(loop: tuple) -> tuple:
            state, carry, last_action, (returns, lengths, finished), t = loop
            inputs = agent_input(self._agent, state.timestep, last_action)
            action, carry = self._act_row(model, inputs, carry, jax.random.fold_in(key_act, t))
            state: AutoResetState = envs.step(state, action, row_keys(jax.random.fold_in(key_step, t), ids))
            answer = state.timestep
            returns = jnp.where(finished, returns, answer.episode_return)
            lengths = jnp.where(finished, lengths, answer.episode_length)
            return state, carry, action, (returns, lengths, finished | (answer.step_type == LAST)), t + 1

        action = jnp.zeros((episodes, *spec.action.shape), spec.action.dtype)
        totals = (jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, bool))
        start = (envs.reset(row_keys(key_reset, ids)), self._initial_carry(model), action, totals, jnp.int32(0))
        return jax.lax.while_loop(playing, step, start)[3]

    def _play_host(self, env: HostEnv, model: PyTree, key: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        episodes, spec = self._settings.episodes, env.spec
        timestep = env.reset(self._settings.seed)
        carry = self._initial_carry(model)
        action = np.zeros((episodes, *spec.action.shape), spec.action.dtype)
        returns, lengths, finished = np.zeros(episodes), np.zeros(episodes, np.int64), np.zeros(episodes, bool)
        for t in range(MAX_STEPS):
            inputs = agent_input(self._agent, timestep, action, np)
            device_action, carry = self._act(model, inputs, carry, jax.random.fold_in(key, t))
            action = np.asarray(device_action)
            timestep = env.step(action)
            returns = np.where(finished, returns, timestep.episode_return)
            lengths = np.where(finished, lengths, timestep.episode_length)
            finished |= np.asarray(timestep.step_type) == LAST
            if finished.all():
                break
        return returns, lengths, finished


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
            The action (0-based), or `[B]` of them.

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
        inputs = (observation, np.full(batch, 0 if self._first else 1, np.int8), action_mask, self._last_action, reward)
        action, self._carry = self._act(self.params, self.variables, inputs, self._carry, key)
        self._last_action, self._first = np.asarray(action), False
        return self._last_action[0] if single else self._last_action

    def _act_rows(self, params: PyTree, variables: PyTree, inputs: tuple, carry: Any, key: Array | None) -> Any:
        from flaxrl.types import AgentInput

        observation, step_type, mask, last_action, last_reward = inputs
        agent = self.agent
        rows = AgentInput(
            observation=observation,
            step_type=step_type,
            action_mask=mask,
            last_action=last_action if agent.use_last_action else None,
            last_reward=last_reward if agent.use_last_reward else None,
        )
        context = act_context(jnp.arange(step_type.shape[0]), 1.0)
        rngs = {} if key is None else {"sample": key}
        model = {"params": params, **variables}
        action, _, _, carry = agent.apply(model, rows, carry, context, rngs=rngs, method="act")
        return action, carry


def load(workdir: str | Path, which: str = "latest") -> LoadedAgent:
    """The trained agent of a run's folder.

    Args:
        workdir: folder of a run.
        which: 'latest' or 'best' checkpoint.

    Raises:
        ConfigError: no run, or no checkpoint, in that folder.
    """
    from flaxrl.run_folder import RunFolder
    from flaxrl.trainers.checkpoint import Checkpointer

    config = RunFolder(workdir).load_config()
    plan = check(config)
    env = env_factory(config)(1)
    spec = env.spec
    agent = build_agent(config, spec)
    target = init_state(
        agent, spec, plan.optimizer, plan.mesh_settings, plan.mesh, plan.seed, plan.loss.uses_target, abstract=True
    )
    if isinstance(env, HostEnv):
        env.close()
    checkpointer = Checkpointer(Path(workdir) / "checkpoints", plan.checkpoint.keep, plan.checkpoint.keep_best)
    restored = checkpointer.restore(target, None, which=which)
    checkpointer.close()
    if restored is None:
        raise ConfigError(f"{workdir} holds no {which} checkpoint; train first, or name another --workdir")
    return LoadedAgent(config, agent, spec, restored.state.params, restored.state.variables, restored.step)


def evaluate_workdir(workdir: str | Path, config: Any = None, which: str = "latest") -> dict[str, float]:
    """Evaluates a run's checkpoint.

    Args:
        workdir: folder of a run.
        config: gives `env` and `eval`; None takes the stored one.
        which: 'latest' or 'best' checkpoint.

    Returns:
        The evaluation's metrics, and `step`.
    """
    loaded = load(workdir, which)
    config = loaded.config if config is None else config
    evaluator = Evaluator(env_factory(config), loaded.agent, check(config).eval)
    try:
        return {"step": loaded.step} | evaluator.run(loaded.params, loaded.variables)
    finally:
        evaluator.close()

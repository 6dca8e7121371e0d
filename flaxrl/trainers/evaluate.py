"""Evaluation on envs of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from flaxrl.build import build
from flaxrl.compilation_cache import use_cache
from flaxrl.configuration import EvalSettings
from flaxrl.envs.base import AutoReset, AutoResetState, HostEnv, JaxEnv, anywhere
from flaxrl.envs.spec import env_action
from flaxrl.models.agent import agent_input
from flaxrl.models.policies import row_keys
from flaxrl.run_folder import RunFolder
from flaxrl.trainers.acting import MAX_STEPS, EvaluationStopped, choose
from flaxrl.trainers.clips import write_clip
from flaxrl.trainers.peers import settle
from flaxrl.trainers.setup import env_factory
from flaxrl.trainers.sharding import replicated
from flaxrl.trainers.video import Recorder, check_one, film
from flaxrl.trainers.writers import Writer
from flaxrl.types import LAST, Array, PyTree


class Evaluator:
    """Plays whole episodes, env i from a seed of its own, the same at each call; raw scores.

    Training is not touched: other envs, other keys.

    Args:
        make_env: number of envs -> HostEnv or JaxEnv.
        agent: the Linen module.
        settings: episodes, greedy or sampled, seed.
        stop: asked at each step of a HostEnv; True ends the evaluation with EvaluationStopped.
    """

    def __init__(
        self,
        make_env: Callable[[int], HostEnv | JaxEnv],
        agent: Any,
        settings: EvalSettings,
        stop: Callable[[], bool] = lambda: False,
    ):
        self._env, self._agent, self._settings = make_env(settings.episodes), agent, settings
        self._stop = stop
        if isinstance(self._env, HostEnv):
            self._act = jax.jit(self._act_row)
        else:
            self._play = jax.jit(self._play_jax)
        self._make_recorder = functools.partial(Recorder, make_env, agent, settings, settings.video_episodes, stop)
        self._recorder: Recorder | None = None

    def run(self, params: PyTree, variables: PyTree) -> dict[str, float]:
        """Plays `settings.episodes` episodes.

        Returns:
            `eval/return_mean`, `_std`, `_min`, `_max`, `eval/length_mean`, `eval/episodes`, `eval/unfinished`.

        Raises:
            EvaluationStopped: `stop` said so.
        """
        model = {"params": params, **variables}
        key = jax.random.key(self._settings.seed)
        if isinstance(self._env, HostEnv):
            return scores(*self._play_host(self._env, model, key))
        return scores(*jax.device_get(self._play(model, key)))

    def film(self, params: PyTree, variables: PyTree, writer: Writer, step: int) -> None:
        """Gives a writer the clip of the first `settings.video_episodes` episodes as 'eval/video'; of none, nothing.

        A film that `stop` breaks off is dropped.
        """
        if not self._settings.video_episodes:
            return
        if self._recorder is None:
            self._recorder = self._make_recorder()
        with contextlib.suppress(EvaluationStopped):
            writer.write_videos(step, {"eval/video": self._recorder.run(params, variables)[None]})

    def close(self) -> None:
        """Frees the envs."""
        if isinstance(self._env, HostEnv):
            self._env.close()
        if self._recorder is not None:
            self._recorder.close()

    def _act_row(self, model: PyTree, inputs: Any, carry: Any, key: Array) -> tuple[Array, Any]:
        ids = jnp.arange(self._settings.episodes)
        return choose(self._agent, self._settings.greedy, model, inputs, carry, key, ids)

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
            return anywhere(~totals[2]) & (t < MAX_STEPS)

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
            if self._stop():
                raise EvaluationStopped
            inputs = agent_input(self._agent, timestep, action, np)
            device_action, carry = self._act(model, inputs, carry, jax.random.fold_in(key, t))
            action = np.asarray(device_action)
            timestep = env.step(env_action(spec.action, action))
            returns = np.where(finished, returns, timestep.episode_return)
            lengths = np.where(finished, lengths, timestep.episode_length)
            finished |= np.asarray(timestep.step_type) == LAST
            if finished.all():
                break
        return returns, lengths, finished


def scores(returns: np.ndarray, lengths: np.ndarray, finished: np.ndarray) -> dict[str, float]:
    """An evaluation's metrics, from what each episode (`[N]`) brought."""
    return {
        "eval/return_mean": float(np.mean(returns, dtype=np.float64)),
        "eval/return_std": float(np.std(returns, dtype=np.float64)),
        "eval/return_min": float(np.min(returns)),
        "eval/return_max": float(np.max(returns)),
        "eval/length_mean": float(np.mean(lengths, dtype=np.float64)),
        "eval/episodes": len(returns),
        "eval/unfinished": int(np.sum(~finished)),
    }


def held_here(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree` for a program of this process alone: whole copies on one of its devices; as it is in a run of one process.

    With several processes all call it, since parameters that are split are gathered.
    """
    if jax.process_count() == 1:
        return tree
    copies = _replicate(tree, mesh)
    settle(copies)
    return jax.tree.map(lambda x: x.addressable_data(0), copies)


@functools.partial(jax.jit, static_argnums=1)
def _replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def evaluate_workdir(
    workdir: str | Path,
    config: Any = None,
    which: str = "latest",
    seed: int | None = None,
    setting: str | None = None,
    video: str | None = None,
) -> dict[str, float]:
    """Evaluates a run's checkpoint.

    Args:
        workdir: folder of a run.
        config: gives `env` and `eval`; None takes the stored one.
        which: 'latest' or 'best' checkpoint.
        seed: which of a run of several seeds, as in `flaxrl.load`; without it and `setting`, all of them.
        setting: which of a sweep.
        video: a .gif or .mp4 file that the first episodes are filmed into.

    Returns:
        The evaluation's metrics, and `step`.

    Raises:
        ConfigError: no run or checkpoint there; a video that cannot be made.
    """
    from flaxrl.trainers.loading import load_stored  # orbax: only where a checkpoint is read
    from flaxrl.trainers.seeds_program import SeedsEvaluator

    chosen = seed is not None or setting is not None
    if video is not None:
        check_one(RunFolder(workdir).load_config(), chosen)
    stored = load_stored(workdir, which)
    if chosen:
        stored = stored.pick(seed, setting)
    make: Any = Evaluator if stored.seeds is None else functools.partial(SeedsEvaluator, stored.seeds)
    use_cache()
    config = stored.config if config is None else config
    if video is not None:
        write_clip(video, film(config, stored.agent, stored.params, stored.variables))
    evaluator = make(env_factory(config), stored.agent, build(config.eval, "config.eval"))
    try:
        return {"step": stored.step} | evaluator.run(stored.params, stored.variables)
    finally:
        evaluator.close()

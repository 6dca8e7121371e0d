"""Videos of an agent: the episodes of an evaluation, played once more one by one and drawn, with their score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.build import build
from flaxrl.configuration import EvalSettings, is_many
from flaxrl.envs.base import AutoReset, AutoResetState, HostEnv, JaxEnv
from flaxrl.envs.spec import env_action
from flaxrl.errors import ConfigError
from flaxrl.models.agent import agent_input
from flaxrl.models.policies import row_keys
from flaxrl.trainers.acting import MAX_STEPS, EvaluationStopped, choose
from flaxrl.trainers.clips import FRAMES_PER_SECOND, check_path
from flaxrl.trainers.setup import env_factory
from flaxrl.types import LAST, Array, PyTree, Timestep

EPISODES = 3
"""Of a video for which the config names no number."""

_SMALL, _LARGE = 240, 480  # pixels: smaller frames are enlarged, larger ones reduced, by whole factors
_MARGIN = 3  # pixels around the score
_PAUSE = FRAMES_PER_SECOND  # frames that the end of an episode stays: a second

Row = tuple[Timestep, Callable[[], np.ndarray]]
"""A timestep `[1, ...]`, and what draws it."""


def check_video(path: str, config: Any) -> None:
    """Checks, before anything is loaded or compiled, that the agent of `config` can be filmed into a file.

    Raises:
        ConfigError: a file that cannot be written, an MP4 without ffmpeg, an env that draws nothing.
    """
    check_path(path)
    check_env(config)


def check_one(config: Any, chosen: bool) -> None:
    """Checks that one agent is to be filmed.

    Args:
        config: of the run.
        chosen: one of its seeds or settings is named.

    Raises:
        ConfigError: it has several, and none is.
    """
    if is_many(config) and not chosen:
        raise ConfigError(
            "--video films one agent, and the folder holds several: name one with --eval_seed=SEED"
            + (", --eval_setting=SETTING" if config.sweep else "")
        )


def check_env(config: Any) -> None:
    """Checks that the env of `config` draws itself.

    Raises:
        ConfigError: it does not.
    """
    build(config.env, "config.env", num_envs=1).prepare_render()


class Recorder:
    """Films episodes: number i is the evaluation's episode i, same seed and same keys, so the same score.

    Args:
        make_env: number of envs -> HostEnv or JaxEnv.
        agent: the Linen module.
        settings: of the evaluation: greedy or sampled, seed; and how many frames an episode may have.
        episodes: how many.
        stop: asked at each step; True ends the film with EvaluationStopped.
    """

    def __init__(
        self,
        make_env: Callable[[int], HostEnv | JaxEnv],
        agent: Any,
        settings: EvalSettings,
        episodes: int,
        stop: Callable[[], bool] = lambda: False,
    ):
        self._env, self._agent, self._settings, self._episodes = make_env(1), agent, settings, episodes
        self._stop = stop
        self._env.prepare_render()
        self._choose = jax.jit(functools.partial(choose, agent, settings.greedy))
        self._start, self._step = jax.jit(self._start_jax), jax.jit(self._step_jax)

    def run(self, params: PyTree, variables: PyTree) -> np.ndarray:
        """Plays and draws.

        Returns:
            uint8 `[T, H, W, 3]`: the episodes one after another, each with its score above the picture.

        Raises:
            EvaluationStopped: `stop` said so.
            ValueError: the env's `render` answers something else than a picture.
        """
        model = {"params": params, **variables}
        play = self._play_host if isinstance(self._env, HostEnv) else self._play_jax
        frames: list[np.ndarray] = []
        for i in range(self._episodes):
            frames += self._shoot(play(model, i), f"{i + 1}/{self._episodes}")
            frames += frames[-1:] * _PAUSE
        return np.stack(frames)

    def close(self) -> None:
        """Frees the env."""
        if isinstance(self._env, HostEnv):
            self._env.close()

    def _shoot(self, rows: Iterator[Row], name: str) -> list[np.ndarray]:
        """Frames of an episode: its first and last row, and every k-th between, k as small as `video_frames` allows."""
        frames: list[np.ndarray] = []
        every = 1
        for t, (timestep, draw) in enumerate(rows):
            if self._stop():
                raise EvaluationStopped
            over = timestep.step_type[0] == LAST
            if over or t % every == 0:
                score = float(timestep.episode_return[0])
                frames.append(captioned(fitted(draw(), self._env), f"{name}   step {t}   return {score:.6g}"))
            if over:
                break
            if len(frames) == self._settings.video_frames:
                frames, every = frames[::2], 2 * every
        return frames

    # -- playing ---------------------------------------------------------------------------------------------------

    def _play_host(self, model: PyTree, i: int) -> Iterator[Row]:
        env, ids = self._env, np.array([i], np.int32)
        assert isinstance(env, HostEnv)
        timestep = env.reset(self._settings.seed + i)
        carry = self._agent.apply(model, 1, method="initial_carry")
        action = np.zeros((1, *env.spec.action.shape), env.spec.action.dtype)
        key = jax.random.key(self._settings.seed)
        for t in range(MAX_STEPS):
            yield timestep, env.render
            inputs = agent_input(self._agent, timestep, action, np)
            device_action, carry = self._choose(model, inputs, carry, jax.random.fold_in(key, t), ids)
            action = np.asarray(device_action)
            timestep = env.step(env_action(env.spec.action, action))
        yield timestep, env.render

    def _play_jax(self, model: PyTree, i: int) -> Iterator[Row]:
        env = self._env
        assert isinstance(env, JaxEnv)
        ids = jnp.array([i], jnp.int32)
        state, one = self._start(ids)
        carry = self._agent.apply(model, 1, method="initial_carry")
        action = jnp.zeros((1, *env.spec.action.shape), env.spec.action.dtype)
        for t in range(MAX_STEPS):
            yield jax.device_get(state.timestep), functools.partial(env.render, one)
            state, one, carry, action = self._step(model, state, carry, action, ids, np.int32(t))
        yield jax.device_get(state.timestep), functools.partial(env.render, one)

    def _keys(self) -> tuple[Array, Array, Array]:
        """Keys of resets, steps and actions, as the evaluation has them."""
        key_reset, key_step, key_act = jax.random.split(jax.random.key(self._settings.seed), 3)
        return key_reset, key_step, key_act

    def _start_jax(self, ids: Array) -> tuple[AutoResetState, PyTree]:
        state = self._batch_of_envs.reset(row_keys(self._keys()[0], ids))
        return state, jax.tree.map(lambda x: x[0], state.env)

    def _step_jax(
        self, model: PyTree, state: AutoResetState, carry: Any, last_action: Array, ids: Array, t: Array
    ) -> tuple[AutoResetState, PyTree, Any, Array]:
        _, key_step, key_act = self._keys()
        inputs = agent_input(self._agent, state.timestep, last_action)
        key = jax.random.fold_in(key_act, t)
        action, carry = choose(self._agent, self._settings.greedy, model, inputs, carry, key, ids)
        state = self._batch_of_envs.step(state, action, row_keys(jax.random.fold_in(key_step, t), ids))
        return state, jax.tree.map(lambda x: x[0], state.env), carry, action

    @functools.cached_property
    def _batch_of_envs(self) -> AutoReset:
        assert isinstance(self._env, JaxEnv)
        return AutoReset(self._env)


def film(config: Any, agent: Any, params: PyTree, variables: PyTree) -> np.ndarray:
    """A clip of the first `config.eval.video_episodes` episodes of an evaluation: uint8 `[T, H, W, 3]`.

    Where that is 0, of `EPISODES`, or of all where there are fewer.

    Args:
        config: gives `env` and `eval`.
        agent: the Linen module.
        params: its parameters.
        variables: its other collections.
    """
    settings = build(config.eval, "config.eval")
    episodes = settings.video_episodes or min(EPISODES, settings.episodes)
    recorder = Recorder(env_factory(config), agent, settings, episodes)
    try:
        return recorder.run(params, variables)
    finally:
        recorder.close()


def fitted(picture: np.ndarray, env: Any) -> np.ndarray:
    """A picture enlarged or reduced by a whole factor, so that it is neither tiny nor huge.

    Raises:
        ValueError: it is not uint8 `[H, W, 3]`.
    """
    picture = np.asarray(picture)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        raise ValueError(
            f"{type(env).__name__}.render must answer uint8 [H, W, 3]; it is {picture.dtype} {picture.shape}"
        )
    longest = max(picture.shape[:2])
    if longest > _LARGE:
        from PIL import Image

        return np.asarray(Image.fromarray(picture).reduce(-(-longest // _LARGE)))
    factor = max(_SMALL // longest, 1)
    return np.repeat(np.repeat(picture, factor, axis=0), factor, axis=1)


def captioned(picture: np.ndarray, text: str) -> np.ndarray:
    """The picture below a black strip with a line of white text.

    Args:
        picture: uint8 `[H, W, 3]`.
        text: is made smaller until it fits the width.
    """
    from PIL import Image, ImageDraw

    width = picture.shape[1]
    strip = Image.new("RGB", (width, _strip_height(width)))
    draw = ImageDraw.Draw(strip)
    draw.fontmode = "1"  # no greys: a GIF has few colours
    size = _font_size(width)
    while size > 6 and draw.textlength(text, font=_font(size)) > width - 2 * _MARGIN:
        size -= 1
    draw.text((_MARGIN, _MARGIN), text, fill="white", font=_font(size))
    return np.concatenate([np.asarray(strip), picture])


def _font_size(width: int) -> int:
    return max(10, width // 18)


def _strip_height(width: int) -> int:
    return _font_size(width) + 2 * _MARGIN + 2


@functools.cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)

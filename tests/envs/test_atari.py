import contextlib
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from flaxrl import build
from flaxrl.envs.atari import Atari, resolve_game
from flaxrl.envs.spec import ArraySpec, Discrete
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID

ROMS = ["breakout", "ms_pacman", "pacman", "pong", "space_invaders", "up_n_down"]


class ScriptedGame:
    """A stand-in for the vector env: one game with known rewards, lives and ends."""

    def __init__(self, reward, lives, terminated):
        self.script = list(zip(reward, lives, terminated, strict=True))
        self.t = 0

    def reset(self, seed):
        return self._observation(), self._info(5)

    def step(self, action):
        reward, lives, terminated = self.script[self.t]
        self.t += 1
        return self._observation(), np.array([reward]), np.array([terminated]), np.array([False]), self._info(lives)

    def close(self):
        pass

    def _observation(self):
        return np.zeros((1, 4, 84, 84), np.uint8)

    def _info(self, lives):
        return {"lives": np.array([lives], np.int32), "episode_frame_number": np.array([4 * self.t], np.int32)}


@pytest.mark.parametrize(("on_life_loss", "zero_at"), [(True, [1, 4]), (False, [4])])
def test_episode_accounting_with_a_lost_life(monkeypatch, on_life_loss, zero_at):
    """Golden vector episode_accounting, with the reset step of the episode rule between 10 and 3."""
    game = ScriptedGame([7, 0, 4, -1, 10, 0, 3], [5, 4, 4, 5, 0, 5, 5], [0, 0, 0, 0, 1, 0, 0])
    monkeypatch.setattr(Atari, "_make", lambda self: game)
    env = Atari(num_envs=1, terminal_on_life_loss=on_life_loss)
    env.reset(0)
    rows = [env.step(np.zeros(1, int)) for _ in range(7)]
    assert [int(r.step_type[0]) for r in rows] == [MID, MID, MID, MID, LAST, FIRST, MID]
    assert (rows[4].episode_return[0], rows[4].episode_length[0]) == (20, 5)
    assert [t for t, r in enumerate(rows) if r.discount[0] == 0] == zero_at
    assert [float(r.reward[0]) for r in rows] == [7, 0, 4, -1, 10, 0, 3]
    # a life won (at 3) or a new game's lives are no loss; the next episode starts from nothing
    assert (rows[6].episode_return[0], rows[6].episode_length[0]) == (3, 1)


def test_a_life_lost_in_the_emulator_is_a_mid_row():
    env = Atari(num_envs=2, game="breakout", terminal_on_life_loss=True, env_threads=1)
    row, losses = env.reset(0), 0
    lives, random = env.lives.copy(), np.random.default_rng(0)
    for _ in range(120):
        row = env.step(random.integers(4, size=2))
        fell = (env.lives < lives) & (row.step_type != FIRST)
        np.testing.assert_array_equal(row.discount == 0, fell)
        losses += int(np.sum(fell & (row.step_type == MID)))
        lives = env.lives.copy()
    env.close()
    assert losses >= 4


def test_frame_skip_is_applied_once_and_frames_are_maxed():
    """4 emulator frames a step, and the newest frame is the maximum of the last two."""
    env = Atari(num_envs=1, game="pong", noop_max=0, env_threads=1)
    single = AtariVectorEnv(
        "pong", 1, frameskip=1, stack_num=1, noop_max=0, reward_clipping=False, use_fire_reset=False
    )
    env.reset(0)
    single.reset(seed=0)
    differs = False
    for t in range(4):
        row = env.step(np.array([2]))
        frames = [single.step(np.array([2]))[0][0, 0] for _ in range(4)]
        assert env.frame_number.tolist() == [4 * (t + 1)] and row.episode_length[0] == t + 1
        np.testing.assert_array_equal(row.observation[0, -1], np.maximum(frames[2], frames[3]))
        differs |= bool(np.any(frames[2] > frames[3]))
    assert differs, "the last frame alone would have passed"
    env.close()


def test_the_frame_limit_truncates_after_its_frames():
    assert Atari(num_envs=1).max_frames == 4 * 27_000
    env = Atari(num_envs=3, game="pong", max_frames=40, env_threads=1)
    env.reset(0)
    rows = [env.step(np.zeros(3, int)) for _ in range(11)]
    assert [int(r.step_type[0]) for r in rows] == [MID] * 9 + [LAST, FIRST]
    assert all(np.all(r.discount == 1) for r in rows) and rows[9].episode_length.tolist() == [10, 10, 10]
    env.close()


@pytest.mark.parametrize(("full", "colour"), [(False, False), (True, True)])
def test_the_spec_is_what_the_vector_env_shows(full, colour):
    env = Atari(num_envs=1, game="pong", full_action_space=full, grayscale=not colour, stack=3, image_size=30)
    assert vars(env)["_env"] is None
    assert env.spec.action == Discrete(18 if full else 6) and env.spec.frame_skip == 4
    assert env.spec.observation == ArraySpec((9 if colour else 3, 30, 30), np.dtype(np.uint8))
    row = env.reset(0)
    vector_env: AtariVectorEnv = env._env
    assert vector_env.single_action_space == gymnasium.spaces.Discrete(env.spec.mask_size)
    assert row.observation.shape == (1, *env.spec.observation.shape)
    env.close()


def test_colour_planes_keep_their_place():
    """Channel 3 * frame + plane: the newest frame's planes come last."""
    env = Atari(num_envs=1, grayscale=False, stack=2, image_size=4)
    raw = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(1, 2, 4, 4, 3)
    np.testing.assert_array_equal(env._channels_first(raw)[0, 5], raw[0, 1, :, :, 2])


def test_starts_differ_and_follow_from_the_seed():
    env = Atari(num_envs=8, game="pong", env_threads=1)
    env.reset(5)
    starts = env.frame_number.tolist()
    env.reset(6)
    assert len(set(starts)) >= 4 and max(starts) < 30
    assert env.frame_number.tolist()[:-1] == starts[1:], "env i is seeded seed + i"
    env.close()


def test_close_ends_the_threads_and_reset_starts_again():
    before = len(os.listdir("/proc/self/task"))
    env = Atari(num_envs=2, env_threads=2)
    env.close()
    env.reset(0)
    assert len(os.listdir("/proc/self/task")) > before
    env.close()
    env.close()
    assert len(os.listdir("/proc/self/task")) == before
    with pytest.raises(RuntimeError, match=r"before Atari\.reset"):
        env.step(np.zeros(2, int))
    env.reset(0)
    env.close()


@pytest.mark.parametrize("action", [[0, 6], [0, -1], [0], [0.0, 1.0]])
def test_a_wrong_action_is_an_error_not_a_hang(action):
    env = Atari(num_envs=2, env_threads=1)
    env.reset(0)
    with pytest.raises(ValueError, match=r"must be \[2\] integers 0 \.\. 5"):
        env.step(np.array(action))
    env.close()


@pytest.mark.parametrize(
    ("name", "rom"),
    [
        ("pong", "pong"),
        ("Pong", "pong"),
        ("ALE/Pong-v5", "pong"),
        ("PongNoFrameskip-v4", "pong"),
        ("ms_pacman", "ms_pacman"),
        ("MsPacman", "ms_pacman"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("SpaceInvadersDeterministic-v4", "space_invaders"),
        ("UpNDown", "up_n_down"),
    ],
)
def test_names(name, rom):
    assert resolve_game(name, ROMS) == rom


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MsPackman", "'MsPackman' is unknown; did you mean 'ms_pacman'"),
        ("ALE/Breakut-v5", "did you mean 'breakout'"),
        ("Pong-ram-v5", "is unknown"),
        ("zzzz", "known: breakout"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_game(name, ROMS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"game": "pongg"}, "game = 'pongg' is unknown; did you mean 'pong'"),
        ({"frame_skip": 0}, "frame_skip = 0 must be >= 1"),
        ({"sticky_actions": 1.5}, "sticky_actions = 1.5 must be >= 0 and <= 1"),
        ({"noop_max": -1}, "noop_max = -1 must be >= 0"),
        ({"max_frames": 0}, "max_frames = 0 must be >= 1"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        build.build(build.config_for("atari", **fields), num_envs=2)


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ConfigError, match=r"pip install 'flaxrl\[atari\]'"):
        Atari(num_envs=1)


def test_constructing_imports_no_suite():
    code = (
        "import sys; from flaxrl.envs import atari, gymnax; atari.Atari(num_envs=2); gymnax.Gymnax()\n"
        "print(sorted({'ale_py', 'gymnax', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_the_screen_is_that_of_the_game(game: str) -> None:
    """In colour, of game 0 of several, sticky actions and all: scaled down and greyed it is the last frame seen."""
    from PIL import Image

    env = Atari(num_envs=2, game=game, sticky_actions=0.5, max_frames=400, noop_max=8, fire_reset=True)
    env.prepare_render()
    random = np.random.default_rng(0)
    with contextlib.closing(env):
        timestep = env.reset(5)
        ended = 0
        for _ in range(130):
            timestep = env.step(random.integers(env.spec.mask_size, size=2))
            ended += int(timestep.step_type[0] == LAST)
        screen = env.render()
        assert (screen.dtype, screen.shape) == (np.uint8, (210, 160, 3)) and ended >= 1
        grey = np.asarray(Image.fromarray(screen).convert("L").resize((84, 84), Image.Resampling.BOX), float)
        assert (
            np.abs(grey - timestep.observation[0, -1]).mean() < 3 < np.abs(grey - timestep.observation[0, -1].T).mean()
        )
        env.reset(5)
        assert (env.render() != screen).any()


def test_a_copy_that_leaves_the_game_is_an_error() -> None:
    env = Atari(num_envs=1, game="pong", noop_max=0)
    with pytest.raises(RuntimeError, match="before Atari"):
        env.render()
    env.prepare_render()
    with contextlib.closing(env):
        env.reset(5)
        assert env._screen is not None
        env._screen._env.step(np.zeros(1, np.int32))
        with pytest.raises(RuntimeError, match="the copy of the game that is filmed left it"):
            env.step(np.zeros(1, np.int32))

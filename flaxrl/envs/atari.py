"""Atari 2600 games through ALE's threaded vector env."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxrl import checks
from flaxrl.envs.atari_screen import SCREEN, AtariScreen
from flaxrl.envs.base import HostEnv
from flaxrl.envs.next_step import NextStepRows
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.types import Timestep

_INSTALL = "env 'atari' needs the ale_py package, which brings the ROMs: pip install 'flaxrl[atari]'"


@dataclass(kw_only=True)
class Atari(HostEnv):
    """A batch of one Atari game with the usual preprocessing (Mnih et al., 2015; Machado et al., 2018).

    Observations are uint8 `[B, stack, size, size]`, channels first (`[B, 3 * stack, size, size]` in colour). Each new
    frame is the maximum over the last two emulator frames of a step. Rewards are raw: the loss clips. Episode totals
    are those of the whole game, whatever lives are lost in it; a frame limit truncates (discount 1).

    Attributes:
        num_envs: games played at once.
        game: ROM name in any usual spelling: 'pong', 'MsPacman', 'ALE/Pong-v5', 'PongNoFrameskip-v4'. Only the ROM is
            taken from it; frame skip and sticky actions are the fields below.
        frame_skip: emulator frames a step.
        stack: frames in one observation; the missing ones of a new episode are black.
        image_size: height and width, pixels.
        grayscale: luminance instead of colour.
        sticky_actions: probability that the emulator repeats the previous action, each frame.
        full_action_space: all 18 actions instead of the game's own.
        noop_max: an episode starts after a random number, below this, of no-op frames.
        fire_reset: press FIRE once at the start of an episode, where the game has that action.
        terminal_on_life_loss: discount 0 where a life is lost; the game goes on: no LAST row, no reset.
        max_frames: emulator frames an episode (the no-op start not counted) before it is truncated.
        env_threads: emulator threads; 0: as many as cores or games, whichever is less.

    Raises:
        ConfigError: a bad field, an unknown game, or ale_py missing; when constructed, without importing ale_py.
    """

    num_envs: int
    game: str = "pong"
    frame_skip: int = 4
    stack: int = 4
    image_size: int = 84
    grayscale: bool = True
    sticky_actions: float = 0.0
    full_action_space: bool = False
    noop_max: int = 30
    fire_reset: bool = False
    terminal_on_life_loss: bool = False
    max_frames: int = 108_000
    env_threads: int = 0

    def __post_init__(self) -> None:
        checks.in_range(self, "num_envs", "frame_skip", "stack", "image_size", "max_frames", low=1)
        checks.in_range(self, "noop_max", "env_threads", low=0)
        checks.in_range(self, "sticky_actions", low=0, high=1)
        self.rom = resolve_game(self.game, _rom_names())
        self._env: Any = None
        self._screen: AtariScreen | None = None
        self._rows: NextStepRows | None = None
        self.lives: np.ndarray = np.zeros(self.num_envs, np.int32)
        """Int32 `[B]`: lives left (0 where the game has none)."""
        self.frame_number: np.ndarray = np.zeros(self.num_envs, np.int32)
        """Int32 `[B]`: emulator frames since the start of the episode, its no-op start included."""

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """What the game shows and accepts; starts no vector env."""
        import ale_py
        from ale_py.roms import get_rom_path

        # The vector env is silent; a lone emulator prints a banner unless told not to.
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        emulator = ale_py.ALEInterface()
        emulator.loadROM(str(get_rom_path(self.rom)))
        actions = emulator.getLegalActionSet() if self.full_action_space else emulator.getMinimalActionSet()
        channels = self.stack * (1 if self.grayscale else 3)
        return EnvSpec(
            observation=ArraySpec((channels, self.image_size, self.image_size), np.dtype(np.uint8)),
            action=Discrete(len(actions)),
            frame_skip=self.frame_skip,
        )

    def reset(self, seed: int) -> Timestep:
        """Restarts every game, game i from `seed + i`; answers FIRST rows."""
        if self._env is None:
            self._env = self._make()
        self._rows = NextStepRows(self.spec, self.num_envs)
        observation, info = self._env.reset(seed=int(seed))
        self._read(info)
        if self._screen is not None:
            self._screen.reset(int(seed))
        return self._rows.first(self._channels_first(observation))

    def step(self, action: np.ndarray) -> Timestep:
        """One action a game, `[B]` integers; where the last answer was LAST it is ignored and FIRST answers.

        Raises:
            RuntimeError: before `reset`.
            ValueError: an action that the game does not have.
        """
        if self._env is None or self._rows is None:
            raise RuntimeError("Atari.step before Atari.reset")
        action = np.asarray(action)
        # An emulator thread that meets an unknown action dies without an answer, and the batch waits for ever.
        known = self.spec.mask_size
        if (
            action.shape != (self.num_envs,)
            or action.dtype.kind not in "iu"
            or not np.all((action >= 0) & (action < known))
        ):
            raise ValueError(f"Atari.step: action must be [{self.num_envs}] integers 0 .. {known - 1}; it is {action}")
        lives = self.lives
        observation, reward, terminated, truncated, info = self._env.step(action.astype(np.int32))
        self._read(info)
        if self._screen is not None:
            self._screen.step(int(action[0]), float(reward[0]), int(self.frame_number[0]))
        lost = self.lives < lives if self.terminal_on_life_loss else None
        return self._rows.next(self._channels_first(observation), reward, terminated, truncated, lost=lost)

    def close(self) -> None:
        """Ends the emulator threads; may be called twice."""
        if self._env is not None:
            self._env.close()
            # Dropped as well: the threads live as long as the emulator object, which the env's own close keeps.
            self._env = None
        if self._screen is not None:
            self._screen.close()

    def prepare_render(self) -> None:
        """From the next `reset` on game 0 is played a second time, with its screen in full."""
        if self._screen is None:
            self._screen = AtariScreen(lambda: self._make(num_envs=1, **SCREEN))

    def render(self) -> np.ndarray:
        """The screen of game 0 in colour, uint8 `[210, 160, 3]`; flicker is evened out as in the observation.

        Raises:
            RuntimeError: without `prepare_render` and a `reset` after it.
        """
        if self._screen is None:
            raise RuntimeError("Atari.render before Atari.prepare_render")
        return self._screen.pixels()

    def _make(self, **changes: Any) -> Any:
        """A vector env. Its own life options are off: one starts a new game, the other reports a termination."""
        from ale_py.vector_env import AtariVectorEnv

        settings: dict[str, Any] = {
            "num_envs": self.num_envs,
            "num_threads": self.env_threads,
            "max_num_frames_per_episode": self.max_frames,
            "repeat_action_probability": self.sticky_actions,
            "full_action_space": self.full_action_space,
            "autoreset_mode": "NextStep",
            "img_height": self.image_size,
            "img_width": self.image_size,
            "grayscale": self.grayscale,
            "stack_num": self.stack,
            "frameskip": self.frame_skip,
            "maxpool": True,
            "noop_max": self.noop_max,
            "episodic_life": False,
            "life_loss_info": False,
            "reward_clipping": False,
            "use_fire_reset": self.fire_reset,
        }
        return AtariVectorEnv(self.rom, **settings | changes)

    def _read(self, info: dict[str, np.ndarray]) -> None:
        self.lives, self.frame_number = info["lives"], info["episode_frame_number"]

    def _channels_first(self, observation: np.ndarray) -> np.ndarray:
        """Colour comes as `[B, stack, H, W, 3]`. ALE answers a new block each step, so nothing else is copied."""
        if self.grayscale:
            return observation
        return np.ascontiguousarray(np.moveaxis(observation, -1, 2)).reshape(-1, *self.spec.observation.shape)


def resolve_game(name: str, known: list[str]) -> str:
    """The ROM name that `name` stands for: 'ALE/MsPacman-v5' -> 'ms_pacman'.

    Args:
        name: any usual spelling.
        known: all ROM names.

    Raises:
        ConfigError: naming near matches.
    """
    core = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", name.removeprefix("ALE/"))
    plain = {k.replace("_", ""): k for k in known}
    wanted = re.sub(r"[_ ]", "", core).lower()
    if wanted in plain:
        return plain[wanted]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", core).lower()
    raise ConfigError(f"Atari.game = {name!r} is unknown; {checks.nearest(snake, known)}")


def _rom_names() -> list[str]:
    """Names of the installed ROMs, found without importing ale_py (a config must be checked fast)."""
    found = importlib.util.find_spec("ale_py")
    if found is None or found.origin is None:
        raise ConfigError(_INSTALL)
    folder = Path(os.environ.get("ALE_ROMS_DIR") or Path(found.origin).parent / "roms")
    return sorted(p.stem for p in folder.glob("*.bin"))

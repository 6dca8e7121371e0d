"""Small gymnasium envs with known answers; this module imports neither jax nor flaxrl, as workers do not."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Clock(gymnasium.Env):
    """The observation is `[t, secret of the episode]`; the reward of step t (from 1) is t; it never terminates."""

    observation_space: spaces.Space = spaces.Box(0, np.inf, (2,), np.float64)
    action_space: spaces.Space = spaces.Discrete(2)

    def __init__(self, ends_at: int | None = None, render_mode: str | None = None):
        self.ends_at, self.render_mode = ends_at, render_mode
        self.t, self.secret = 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.t, self.secret = 0, int(self.np_random.integers(1000))
        return self.observe(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        return self.observe(), float(self.t), self.t == self.ends_at, False, self.info()

    def observe(self) -> Any:
        return np.array([self.t, self.secret], np.float64)

    def info(self) -> dict[str, Any]:
        return {}


class Reuses(Clock):
    """Answers the same array again and again."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.buffer = np.zeros(2, np.float64)

    def observe(self) -> Any:
        self.buffer[:] = self.t, self.secret
        return self.buffer


class Drawn(Clock):
    """A picture that is as bright as the time."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as gymnasium has it

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        if self.ends_at == 0:
            raise ImportError("no brush is installed")
        return np.full((4, 5, 3), self.t, np.uint8)


class StartsAtTen(Clock):
    """Its actions are 10, 11 and 12; the second observation is the last action."""

    action_space = spaces.Discrete(3, start=10)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert int(action) in (10, 11, 12)
        self.secret = int(action)
        return super().step(action)


class MaskedStart(StartsAtTen):
    """Only 12 is legal."""

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([0, 0, 1])}


class Components(Clock):
    """MultiDiscrete actions with a start, `[5 or 6, -1 .. 1]`; shows the last ones."""

    observation_space = spaces.MultiDiscrete([2, 3], start=[5, -1])
    action_space = spaces.MultiDiscrete([2, 3], start=[5, -1])
    last = np.array([5, -1])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.last = np.array(action)
        return super().step(action)

    def observe(self) -> Any:
        return self.last.copy()


class Switches(Components):
    """Binary actions `[2, 2]`; shows the last ones."""

    observation_space = spaces.MultiBinary([2, 2])
    action_space = spaces.MultiBinary([2, 2])
    last = np.zeros((2, 2), np.int8)


class Continuous(Clock):
    """Box actions of given bounds; `[t, sum of the last action]`."""

    def __init__(self, low: Any = -np.inf, high: Any = np.inf, shape: tuple[int, ...] = (2,), **kwargs: Any):
        super().__init__(**kwargs)
        self.action_space = spaces.Box(low, high, shape, np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert np.isfinite(action).all()
        self.secret = float(np.sum(action))
        return super().step(action)


class Nested(Clock):
    """A tree of observations whose keys come in another order from `reset` than from `step`."""

    observation_space = spaces.Dict(
        {
            "pos": spaces.Box(-1, 1, (2,), np.float64),
            "img": spaces.Box(0, 255, (8, 8, 1), np.uint8),
            "inner": spaces.Dict({"b": spaces.Discrete(4, start=2), "a": spaces.MultiBinary(3)}),
            "pair": spaces.Tuple((spaces.Box(0, 9, (), np.int64), spaces.Box(0, 9, (1,), np.float32))),
        }
    )

    def observe(self) -> Any:
        parts = {
            "pos": np.array([self.t / 10, -self.t / 10]),
            "img": np.full((8, 8, 1), 250 + self.t, np.uint8),
            "inner": {"a": np.array([1, 0, self.t % 2], np.int8), "b": 2 + self.t % 4},
            "pair": (np.array(self.t), np.array([self.t], np.float32)),
        }
        return parts if self.t else dict(reversed(parts.items()))


class Masked(Clock):
    """At step t action t % 3 is illegal; no action is legal once it has ended."""

    action_space = spaces.Discrete(3)

    def info(self) -> dict[str, Any]:
        mask = np.ones(3, np.int8)
        mask[self.t % 3] = 0
        return {"action_mask": mask * (self.t != self.ends_at)}


class MaskedComponents(Clock):
    """One mask a component."""

    action_space = spaces.MultiDiscrete([2, 3])

    def info(self) -> dict[str, Any]:
        return {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}


class JointMask(Components):
    """Legal are the combinations whose numbers, from 0, and the time have an even sum; it checks what it receives.

    Args:
        nvec: sizes of the two components.
        later: form of the masks after the first: 'joint', or 'flat', which they must not become.
        turned: masks have their axes in the wrong order.
    """

    def __init__(self, nvec: tuple[int, ...] = (2, 3), later: str = "joint", turned: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.observation_space = self.action_space = spaces.MultiDiscrete(list(nvec), start=[5, -1])
        self.later, self.turned = later, turned

    def legal(self) -> Any:
        return (np.indices(self.action_space.nvec).sum(axis=0) + self.t) % 2 == 0  # type: ignore[attr-defined]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.legal()[tuple(np.array(action) - [5, -1])], f"{action} is illegal"
        return super().step(action)

    def info(self) -> dict[str, Any]:
        mask = self.legal()
        mask = mask.T if self.turned else mask
        return {"action_mask": mask.ravel() if self.later == "flat" and self.t else mask}


class Raises(Clock):
    """Goes wrong at step 30 of the envs whose seed says so."""

    def __init__(self, how: str = "raise", **kwargs: Any):
        super().__init__(**kwargs)
        self.how, self.steps, self.bad = how, 0, False

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        if seed is not None:
            self.bad = seed % 4 == 2
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        if self.bad and self.steps >= 30:
            if self.how == "exit":
                os._exit(7)
            if self.how.startswith("hang:"):
                pathlib.Path(self.how.removeprefix("hang:")).touch()
                time.sleep(3600)
            if self.how == "eof":
                raise EOFError("from the simulator")
            raise Unpicklable("out of fuel", lambda: None)
        return super().step(action)


class Witness(Clock):
    """Observes its process, and whether jax, flaxrl or a program other than the worker's has been loaded there."""

    observation_space = spaces.Box(0, np.inf, (4,), np.float64)

    def observe(self) -> Any:
        program = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")
        names = ("jax", "flaxrl")
        return np.array([os.getpid(), *(name in sys.modules for name in names), program != "worker.py"], np.float64)


class Unpicklable(Exception):
    """An exception that no pipe takes."""

    def __init__(self, message: str, extra: Any):
        super().__init__(message)
        self.extra = extra


def same_step_envs(
    num_envs: int,
    max_episode_steps: int,
    declared: Any = AutoresetMode.SAME_STEP,
    game: type[gymnasium.Env] = Clock,
    **kwargs: Any,
) -> Any:
    """A vector env of `game`, its own, with SAME_STEP autoreset, which `declared` may deny."""
    make = [lambda: gymnasium.wrappers.TimeLimit(game(), max_episode_steps)] * num_envs
    envs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.metadata = envs.metadata | {"autoreset_mode": declared}
    return _Spoilt(envs, **kwargs) if kwargs else envs


class _Spoilt(gymnasium.vector.VectorWrapper):
    """Loses final observations, or resets all envs whatever the mask says."""

    def __init__(self, envs: Any, loses: str = "", resets_all: bool = False):
        super().__init__(envs)
        self.loses, self.resets_all = loses, resets_all

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed, options=None if self.resets_all else options)

    def step(self, actions: Any) -> Any:
        *answer, info = self.env.step(actions)
        return *answer, {k: v for k, v in info.items() if k.removeprefix("_") != self.loses}


for _cls in (
    Clock,
    Reuses,
    Drawn,
    StartsAtTen,
    MaskedStart,
    Components,
    Switches,
    Continuous,
    Nested,
    Masked,
    MaskedComponents,
    JointMask,
    Raises,
    Witness,
):
    gymnasium.register(f"Test{_cls.__name__}-v0", entry_point=f"{__name__}:{_cls.__name__}", max_episode_steps=3)
gymnasium.register(
    "TestSameStep-v0",
    entry_point=f"{__name__}:Clock",
    vector_entry_point=f"{__name__}:same_step_envs",
    max_episode_steps=3,
)

"""Any env of gymnasium's registry, on the host."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flaxrl import checks
from flaxrl.envs.base import HostEnv
from flaxrl.envs.gymnasium_rows import AUTORESETS, GymnasiumRows, info_keys
from flaxrl.envs.gymnasium_spaces import action_spec, component_sizes, is_joint, observation_spec
from flaxrl.envs.spec import EnvSpec
from flaxrl.envs.worker import infos, vector_env
from flaxrl.envs.workers import Workers
from flaxrl.errors import ConfigError
from flaxrl.types import Timestep


@dataclass(kw_only=True)
class Gymnasium(HostEnv):
    """A batch of one gymnasium env, under the episode rule: a time limit truncates, final observations are rows.

    Observations: Box keeps its dtype (64 bit becomes float32), Discrete and MultiDiscrete become one-hot float32, Dict
    and Tuple are trees. Actions: Discrete (with start), MultiDiscrete, MultiBinary (components of two), Box of floats.
    Rewards are raw.

    Attributes:
        num_envs: envs played at once.
        id: registered id, 'CartPole-v1', or 'package.module:EnvId-v0', which imports the module first.
        max_steps: steps before an episode is truncated; None keeps the id's own limit.
        kwargs: arguments of the env's constructor, e.g. `{'map_name': '8x8'}` for FrozenLake.
        workers: processes that share the envs (of one actor thread); 0 steps them in this one. A fast env is best at 0.
        stall_seconds: the run ends when a worker process gives no answer for so long.
        vectorized: use the vector env that is registered with the id (gymnasium's `vector_entry_point`).
        autoreset: mode that gymnasium's vector env runs in: 'next_step', 'same_step' or 'disabled'. The rows mean the
            same in each; the last two play and throw away one step and one reset more an episode. A `vectorized` env
            says itself which one it has, in `metadata['autoreset_mode']`.
        action_mask: the env's info carries an `action_mask`, True or 1 where legal: `[A]`. For MultiDiscrete and
            MultiBinary `[sum(nvec)]` or a tuple of one mask a component; or an array of shape `nvec`, joint over their
            combinations, which makes the actions one flat Discrete(prod(nvec)).

    Raises:
        ConfigError: when constructed, fields out of range; on the first use of `spec` or `reset`, an unknown id or
            argument, a space without a spec, a vector env of unknown layout: constructing does not import gymnasium.
    """

    num_envs: int
    id: str = "CartPole-v1"
    max_steps: int | None = None
    kwargs: dict = field(default_factory=dict)
    workers: int = 0
    stall_seconds: float = 300.0
    vectorized: bool = False
    autoreset: str = "next_step"
    action_mask: bool = False

    def __post_init__(self) -> None:
        checks.in_range(self, "num_envs", "max_steps", low=1)
        checks.non_negative(self, "workers")
        checks.positive(self, "stall_seconds")
        checks.choice(self, "autoreset", AUTORESETS)
        if self.vectorized and self.workers:
            raise ConfigError(
                f"Gymnasium.workers = {self.workers}: with vectorized = True the env itself decides; use workers = 0"
            )
        if self.vectorized and self.autoreset != "next_step":
            raise ConfigError(
                f"Gymnasium.autoreset = {self.autoreset!r}: with vectorized = True the env itself decides; leave it out"
            )
        self._envs: Any = None
        self._rows: GymnasiumRows | None = None
        self._drawn = False

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """What one env observes and accepts."""
        observation, action, joint = self._first_look
        return EnvSpec(observation_spec(observation, self.id), action_spec(action, self.id, joint), self.action_mask)

    @property
    def _spaces(self) -> tuple[Any, Any]:
        """Gymnasium's spaces of one env: (observation, action)."""
        return self._first_look[:2]

    @functools.cached_property
    def _first_look(self) -> tuple[Any, Any, bool]:
        """Gymnasium's spaces of one env, (observation, action), and whether its action masks are joint."""
        if self.vectorized:
            self._envs = envs = self._envs or self._make_vectorized()
            action = envs.single_action_space
            joint = self._joint(action, lambda: infos(envs.reset(seed=0)[1], self.num_envs, ("action_mask",))[0])
            return envs.single_observation_space, action, joint
        with self._creation():
            env = self._maker()()
        with contextlib.closing(env):
            joint = self._joint(env.action_space, lambda: env.reset(seed=0)[1])
            return env.observation_space, env.action_space, joint

    def _joint(self, action: Any, first_info: Callable[[], dict[str, Any]]) -> bool:
        """Whether masks over actions of several components are joint, which only the first one tells."""
        if not self.action_mask:
            return False
        if hasattr(action, "low"):
            raise ConfigError(f"Gymnasium.action_mask = True: actions of {self.id!r} are continuous; use False")
        sizes = component_sizes(action)
        return len(sizes) > 1 and is_joint(first_info().get("action_mask"), sizes)

    def reset(self, seed: int) -> Timestep:
        """Restarts every env, env i from `seed + i` (`vectorized`: what it makes of `seed`); answers FIRST rows."""
        spec, spaces = self.spec, self._spaces
        if self._envs is None:
            self._envs = self._make()
        if self._rows is None:
            mode = self._own_mode() if self.vectorized else self._mode
            self._rows = GymnasiumRows(self._envs, spec, spaces, self.num_envs, mode)
        return self._rows.reset(int(seed))

    def step(self, action: np.ndarray) -> Timestep:
        """One action an env, `[B, ...]`; where the last answer was LAST it is ignored and FIRST answers.

        Raises:
            RuntimeError: before `reset`.
            ValueError: actions of another shape.
            WorkerError: an env raised in its process or hangs, or the process ended.
        """
        if self._rows is None:
            raise RuntimeError("Gymnasium.step before Gymnasium.reset")
        return self._rows.step(action)

    def close(self) -> None:
        """Closes the envs and ends their processes; may be called twice."""
        envs, self._envs, self._rows = self._envs, None, None
        if envs is not None:
            envs.close()

    def prepare_render(self) -> None:
        """From the next `reset` on the envs are in this process, and made to answer pixels; one is tried.

        Raises:
            ConfigError: this id has no 'rgb_array', a package that draws it is missing, or it is a vector env.
        """
        if self.vectorized:
            raise ConfigError("Gymnasium.vectorized = True draws nothing: a vector env is not asked for pictures")
        self._drawn = True
        with self._creation("drawn"), contextlib.closing(self._maker()()) as env:
            if "rgb_array" not in (env.metadata.get("render_modes") or ()):
                raise ConfigError(f"Gymnasium.id = {self.id!r} draws nothing: its render_modes have no 'rgb_array'")
            env.reset()
            env.render()

    def render(self) -> np.ndarray:
        """Gymnasium's picture of env 0, uint8 `[H, W, 3]`.

        Raises:
            RuntimeError: without `prepare_render` and a `reset` after it.
        """
        if not self._drawn or self._envs is None:
            raise RuntimeError("Gymnasium.render before Gymnasium.prepare_render and reset")
        return np.asarray(self._envs.envs[0].render(), np.uint8)

    # -- making --------------------------------------------------------------------------------------------------------

    def _registered(self) -> Any:
        """Gymnasium's entry for the id; its module is imported where the id names one."""
        import gymnasium

        module, _, name = self.id.rpartition(":")
        if module:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or not (module + ".").startswith(error.name + "."):
                    raise
                raise ConfigError(f"Gymnasium.id = {self.id!r}: no module {error.name!r} on the Python path") from error
        if name not in gymnasium.registry:
            raise ConfigError(f"Gymnasium.id = {self.id!r} is unknown; {_near(name, list(gymnasium.registry))}")
        return gymnasium.registry[name]

    def _arguments(self) -> dict[str, Any]:
        limit = {} if self.max_steps is None else {"max_episode_steps": self.max_steps}
        return self.kwargs | limit | ({"render_mode": "rgb_array"} if self._drawn else {})

    def _maker(self) -> Callable[[], Any]:
        """Makes one env, in this process or another: the registry's entry travels with it."""
        import gymnasium

        return functools.partial(gymnasium.make, self._registered(), **self._arguments())

    @contextlib.contextmanager
    def _creation(self, done: str = "made") -> Iterator[None]:
        """Tells in one line what kept an env from being made, or drawn."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            given = f" with kwargs {self.kwargs}" if self.kwargs else ""
            raise ConfigError(
                f"Gymnasium: {self.id}{given} cannot be {done}: {type(error).__name__}: {error}"
            ) from error

    @property
    def _mode(self) -> str:
        """The autoreset mode; where env 0 is looked at, the one that shows an episode's end before the next begins."""
        return "next_step" if self._drawn else self.autoreset

    def _make(self) -> Any:
        """The vector env: gymnasium's in this process, or workers; or the env's own."""
        if self.vectorized:
            return self._make_vectorized()
        make, workers = self._maker(), 0 if self._drawn else min(self.workers, self.num_envs)
        if workers:
            keys = info_keys(self._mode, self.action_mask)
            return Workers(
                make, self._spaces[0], self.num_envs, workers, AUTORESETS[self._mode], keys, self.stall_seconds
            )
        with self._creation():
            return vector_env(make, self.num_envs, AUTORESETS[self._mode])

    def _make_vectorized(self) -> Any:
        import gymnasium

        entry = self._registered()
        if entry.vector_entry_point is None:
            raise ConfigError(f"Gymnasium.vectorized = True: {self.id!r} has no vector_entry_point; use False")
        with self._creation():
            envs = gymnasium.make_vec(
                entry, self.num_envs, vectorization_mode="vector_entry_point", **self._arguments()
            )
        if envs.num_envs != self.num_envs:
            envs.close()
            raise ConfigError(f"Gymnasium: {self.id} made {envs.num_envs} envs where {self.num_envs} were asked for")
        return envs

    def _own_mode(self) -> str:
        """The autoreset mode that a vector env declares; it is never guessed."""
        declared = self._envs.metadata.get("autoreset_mode")
        value = getattr(declared, "value", declared)
        modes = {v: k for k, v in AUTORESETS.items()}
        if value not in modes:
            raise ConfigError(
                f"Gymnasium.id = {self.id!r}: its vector env's metadata['autoreset_mode'] is {declared!r}; it must be "
                "a gymnasium.vector.AutoresetMode, so that final observations are found"
            )
        return modes[value]


def _near(name: str, known: list[str]) -> str:
    hint = checks.nearest(name, known)
    return hint if hint.startswith("did") else "gymnasium.pprint_registry() lists what is registered"

"""Gymnasium's spaces as specs, its observations as rows, and actions as it wants them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flaxrl.envs.spec import ActionSpec, ArraySpec, Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.types import PyTree

_AS_FLOAT32 = (np.float64, np.int64, np.uint64)
"""Dtypes that the device does not keep: it would halve the first silently, and wrap large numbers of the others."""


def observation_spec(space: Any, env_id: str) -> PyTree:
    """ArraySpecs of an observation space: nested dicts (sorted keys) and tuples of them.

    A Box keeps its dtype (64 bit: float32). Discrete, and each component of MultiDiscrete, becomes one-hot float32;
    MultiBinary keeps its int8.

    Raises:
        ConfigError: a space that has no fixed shape (Text, Sequence, Graph, OneOf) or is not gymnasium's.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: observation_spec(space[key], env_id) for key in sorted(space.spaces)}
    if isinstance(space, spaces.Tuple):
        return tuple(observation_spec(part, env_id) for part in space.spaces)
    if isinstance(space, spaces.Discrete):
        return ArraySpec((int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        return ArraySpec((int(space.nvec.sum()),))
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        dtype = np.dtype(space.dtype)
        return ArraySpec(tuple(space.shape), np.dtype(np.float32) if dtype in _AS_FLOAT32 else dtype)
    raise ConfigError(
        f"Gymnasium.id = {env_id!r}: observation space {space} has no fixed shape; known: Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict, Tuple (gymnasium.wrappers.FlattenObservation and others make one)"
    )


def rows_of(space: Any, spec: PyTree, observation: Any, count: int) -> PyTree:
    """Observations of a batch as rows carry them, always in new arrays.

    Args:
        space: of one env.
        spec: its `observation_spec`.
        observation: gymnasium's tree of arrays `[B, ...]`, keys in any order; where B is 1, without it too.
        count: B.

    Raises:
        ValueError: what is not in the space.
    """
    if isinstance(spec, dict):
        return {key: rows_of(space[key], spec[key], observation[key], count) for key in spec}
    if isinstance(spec, tuple):
        return tuple(rows_of(*parts, count) for parts in zip(space.spaces, spec, observation, strict=True))
    sizes = _sizes(space)
    if sizes is None:
        return np.array(observation, spec.dtype).reshape(count, *spec.shape)
    values = np.asarray(observation).reshape(count, len(sizes)) - np.ravel(space.start)
    if np.any((values < 0) | (values >= sizes)):
        raise ValueError(f"an observation is not in its space {space}: {observation}")
    hot = np.zeros((count, *spec.shape), spec.dtype)
    np.put_along_axis(hot, values + np.cumsum(sizes) - sizes, 1, axis=1)
    return hot


def _sizes(space: Any) -> np.ndarray | None:
    """Values of each component `[K]` of a Discrete or MultiDiscrete space, else None."""
    if hasattr(space, "nvec"):
        return np.ravel(space.nvec)
    return np.array([space.n]) if hasattr(space, "start") else None


def action_spec(space: Any, env_id: str, joint: bool = False) -> ActionSpec:
    """The action spec of an action space; arrays of any rank are one vector.

    Args:
        space: gymnasium's.
        env_id: for the message.
        joint: the env's masks are joint (`is_joint`): each combination of the components is one action of a Discrete,
            the last component running fastest.

    Raises:
        ConfigError: Dict, Tuple and other spaces, Box of whole numbers.
    """
    from gymnasium import spaces

    sizes = component_sizes(space)
    if sizes:
        return Discrete(math.prod(sizes)) if joint else MultiDiscrete(sizes)
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        low, high = (np.ravel(x).astype(np.float32).tolist() for x in (space.low, space.high))
        return Box(tuple(low), tuple(high))
    raise ConfigError(
        f"Gymnasium.id = {env_id!r}: action space {space} is none of Discrete, MultiDiscrete, MultiBinary and Box of "
        "floats; a gymnasium.ActionWrapper can make it one"
    )


def component_sizes(space: Any) -> tuple[int, ...]:
    """Actions of each component of a MultiDiscrete or MultiBinary space; () for any other."""
    from gymnasium import spaces

    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in np.ravel(space.nvec))
    return (2,) * int(math.prod(space.shape)) if isinstance(space, spaces.MultiBinary) else ()


def is_joint(mask: Any, sizes: tuple[int, ...]) -> bool:
    """Whether an action mask is one over all combinations of several components: an array of shape `sizes`."""
    return len(sizes) > 1 and not isinstance(mask, tuple) and np.shape(mask) == sizes


def actions_for(space: Any, action: np.ndarray, joint: bool = False) -> np.ndarray:
    """Actions of a batch in gymnasium's dtype, shape and numbering.

    Args:
        space: of one env.
        action: `[B, ...]` as the action spec numbers them: from `start` on for Discrete, else from 0.
        joint: as `action_spec` has it.
    """
    if joint:
        action = np.stack(np.unravel_index(action, component_sizes(space)), axis=-1)
    shaped = np.asarray(action).reshape(-1, *space.shape)
    if hasattr(space, "nvec"):
        shaped = shaped + space.start
    if hasattr(space, "low"):  # bounds that rounding to float32 has moved
        shaped = np.clip(shaped, space.low, space.high)
    return shaped.astype(space.dtype)


def idle_actions(space: Any, count: int) -> np.ndarray:
    """Actions `[B, ...]` that the envs accept, always the same, for steps whose result is thrown away."""
    if hasattr(space, "low"):
        one = np.clip(np.zeros(space.shape), space.low, space.high)
    else:
        one = np.zeros(space.shape) + getattr(space, "start", 0)
    return np.broadcast_to(one, (count, *space.shape)).astype(space.dtype)

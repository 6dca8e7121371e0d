"""What an env observes and accepts."""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class ArraySpec:
    """One observation leaf.

    Attributes:
        shape: without the batch.
        dtype: of rows; what a simulator gives as float64 is stored and fed as float32.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32

    def zeros(self, *lead: int) -> np.ndarray:
        """Zeros with leading dimensions `lead`."""
        return np.zeros((*lead, *self.shape), self.dtype)


@dataclass(frozen=True)
class Discrete:
    """Actions `start .. start + n - 1` in the env; logits, masks and stored actions are 0-based.

    Attributes:
        n: number of actions, A.
        start: what the env calls the first one.
        shape: of one action: a scalar.
        dtype: of stored actions.
    """

    n: int
    start: int = 0

    shape: tuple[int, ...] = ()
    dtype: Any = np.int32


@dataclass(frozen=True)
class MultiDiscrete:
    """Several discrete components; masks are concatenated, `[B, sum(nvec)]`.

    Attributes:
        nvec: number of actions of each component.
        dtype: of stored actions.
    """

    nvec: tuple[int, ...]
    dtype: Any = np.int32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return (len(self.nvec),)


@dataclass(frozen=True)
class Box:
    """Continuous actions with bounds (possibly infinite) per dimension.

    Attributes:
        low: lower bound of each dimension.
        high: upper bound of each dimension.
        dtype: of actions.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    dtype: Any = np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return (len(self.low),)


ActionSpec = Discrete | MultiDiscrete | Box


def env_action(spec: ActionSpec, action: Any) -> Any:
    """Actions as the env takes them, of numpy or jax: numbered from `start`; a Box's clipped to its bounds.

    What is stored and learned from stays as the policy drew it: the density of a clipped action is not that of the
    sample.

    Args:
        spec: of the env.
        action: `[..., *spec.shape]`, 0-based where discrete.
    """
    if isinstance(spec, Discrete) and spec.start:
        return action + spec.start
    if isinstance(spec, Box) and np.isfinite([spec.low, spec.high]).any():
        lead = (1,) * (action.ndim - 1)
        low, high = (np.asarray(x, action.dtype).reshape(*lead, -1) for x in (spec.low, spec.high))
        return action.clip(low, high)
    return action


def any_legal(spec: ActionSpec, action_mask: Any) -> Any:
    """Whether there is an action to take: bool `[...]`, of numpy or jax.

    Args:
        spec: of the env.
        action_mask: bool `[..., A]`; of MultiDiscrete actions `[..., sum(nvec)]`, where each component needs one of
            its own.
    """
    sizes = spec.nvec if isinstance(spec, MultiDiscrete) else (action_mask.shape[-1],)
    ends = itertools.accumulate(sizes)
    legal = [action_mask[..., end - size : end].any(axis=-1) for size, end in zip(sizes, ends, strict=True)]
    return functools.reduce(operator.and_, legal)


@dataclass(frozen=True)
class EnvSpec:
    """Everything an agent needs to know about an env.

    Attributes:
        observation: tree of ArraySpec.
        action: Discrete, MultiDiscrete or Box.
        action_mask: whether timesteps carry an action mask.
        frame_skip: frames of the underlying simulator a step.
    """

    observation: Any
    action: ActionSpec
    action_mask: bool = False
    frame_skip: int = 1

    def zeros(self, *lead: int) -> Any:
        """An all-zero observation with leading dimensions `lead`."""
        return jax.tree.map(lambda s: s.zeros(*lead), self.observation)

    @property
    def mask_size(self) -> int:
        """Length of one action mask."""
        if isinstance(self.action, Discrete):
            return self.action.n
        if isinstance(self.action, MultiDiscrete):
            return sum(self.action.nvec)
        raise ValueError(f"{self.action} has no action mask")

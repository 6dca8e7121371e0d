"""Rows of the episode rule from what a vector env with NEXT_STEP autoreset answers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxrl.envs.spec import EnvSpec
from flaxrl.types import FIRST, LAST, MID, PyTree, Timestep


class NextStepRows:
    """Step types, discounts and episode totals of a batch of host envs that reset on the step after a done.

    Every array of a Timestep is new, except observations that already have the spec's dtype: those are the caller's.
    """

    def __init__(self, spec: EnvSpec, num_envs: int):
        self.spec = spec
        self.num_envs = num_envs
        self.over = np.zeros(num_envs, bool)
        """Bool `[B]`: the last answer was LAST, so the next action is ignored."""
        self._return = np.zeros(num_envs, np.float64)
        self._length = np.zeros(num_envs, np.int32)

    def first(self, observation: PyTree, action_mask: np.ndarray | None = None) -> Timestep:
        """FIRST rows of every env, whatever went before.

        Args:
            observation: tree of arrays `[B, ...]`.
            action_mask: bool `[B, A]` or None.
        """
        self.over = np.ones(self.num_envs, bool)
        nothing = np.zeros(self.num_envs, bool)
        return self.next(observation, np.zeros(self.num_envs), nothing, nothing, action_mask)

    def next(
        self,
        observation: PyTree,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        action_mask: np.ndarray | None = None,
        lost: np.ndarray | None = None,
    ) -> Timestep:
        """Rows that answer one action an env: FIRST where the last answer was LAST.

        Args:
            observation: tree of arrays `[B, ...]`.
            reward: raw, `[B]`.
            terminated: bool `[B]`.
            truncated: bool `[B]`.
            action_mask: bool `[B, A]` or None.
            lost: bool `[B]`, a life was lost: discount 0 although the episode may go on. None: no lives.
        """
        first = self.over
        reward = np.where(first, 0, reward).astype(np.float32)
        ends = terminated if lost is None else terminated | lost
        self.over = (terminated | truncated) & ~first
        self._return = np.where(first, 0, self._return + reward)
        self._length = np.where(first, 0, self._length + 1).astype(np.int32)
        return Timestep(
            observation=jax.tree.map(_convert, self.spec.observation, observation),
            reward=reward,
            discount=np.where(ends & ~first, 0, 1).astype(np.float32),
            step_type=np.where(first, FIRST, np.where(self.over, LAST, MID)).astype(np.int8),
            action_mask=action_mask,
            episode_return=self._return.astype(np.float32),
            episode_length=self._length.copy(),
        )


def _convert(spec: Any, x: Any) -> np.ndarray:
    return np.asarray(x).astype(spec.dtype, copy=False)

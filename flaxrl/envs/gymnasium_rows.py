"""Gymnasium's three autoreset modes as the one episode rule."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxrl.envs.gymnasium_spaces import actions_for, component_sizes, idle_actions, is_joint, rows_of
from flaxrl.envs.next_step import NextStepRows
from flaxrl.envs.spec import Discrete, EnvSpec
from flaxrl.envs.worker import infos
from flaxrl.errors import ConfigError
from flaxrl.types import PyTree, Timestep

AUTORESETS = {"next_step": "NextStep", "same_step": "SameStep", "disabled": "Disabled"}
"""Names that a config may give as `autoreset` -> values of gymnasium's AutoresetMode."""


def info_keys(autoreset: str, action_mask: bool) -> tuple[str, ...]:
    """Keys of the info that rows are made of."""
    return ("action_mask",) * action_mask + ("final_obs",) * (autoreset == "same_step")


class GymnasiumRows:
    """Steps a vector env and answers rows: final observation on a LAST row, FIRST with reward 0 after it.

    With 'next_step' the vector env works like this itself. With 'same_step' it answers the final observation in its
    info, in place of which it shows the next episode's first one, and with 'disabled' it waits to be reset. In both,
    the step whose action is to be ignored is played with an action that is always the same, and the env is reset after
    it (gymnasium's `reset_mask`), so that the episode begins where FIRST says.

    Args:
        envs: gymnasium's vector env, or Workers.
        spec: of one env.
        spaces: gymnasium's, of one env: (observation, action).
        num_envs: B.
        autoreset: one of AUTORESETS.
    """

    def __init__(self, envs: Any, spec: EnvSpec, spaces: tuple[Any, Any], num_envs: int, autoreset: str):
        self._envs, self._spec, self._num_envs, self._autoreset = envs, spec, num_envs, autoreset
        self._observation_space, self._action_space = spaces
        self._sizes = component_sizes(self._action_space)
        self._joint = bool(self._sizes) and isinstance(spec.action, Discrete)
        self._keys = info_keys(autoreset, spec.action_mask)
        self._idle = idle_actions(self._action_space, num_envs)
        self._rows = NextStepRows(spec, num_envs)

    def reset(self, seed: int) -> Timestep:
        """FIRST rows of all envs; `seed` is the first env's, of which the vector env makes the others'."""
        self._rows = NextStepRows(self._spec, self._num_envs)
        observation, info = self._envs.reset(seed=seed)
        nowhere = np.zeros(self._num_envs, bool)
        return self._rows.first(self._converted(observation), self._masks(self._infos(info), nowhere))

    def step(self, action: np.ndarray) -> Timestep:
        """Rows that answer one action an env, `[B, ...]`."""
        expected = (self._num_envs, *self._spec.action.shape)
        if np.shape(action) != expected:
            raise ValueError(f"Gymnasium.step: actions must be {list(expected)}; they are {list(np.shape(action))}")
        given, over = actions_for(self._action_space, action, self._joint), self._rows.over
        restarts = self._autoreset != "next_step" and bool(over.any())
        if restarts:
            given[over] = self._idle[over]
            if self._autoreset == "disabled":  # it refuses to step an env that is over
                self._envs.reset(options={"reset_mask": over.copy()})
        observation, reward, terminated, truncated, info = self._envs.step(given)
        shown, details = self._converted(observation), self._infos(info)
        ended = (np.asarray(terminated, bool) | np.asarray(truncated, bool)) & ~over
        if restarts:
            shown = self._restart(over, shown, details)
        if self._autoreset == "same_step":
            for i in np.flatnonzero(ended):
                self._put_final(shown, details[i], int(i))
        return self._rows.next(
            shown,
            np.asarray(reward),
            np.asarray(terminated, bool),
            np.asarray(truncated, bool),
            self._masks(details, ended),
        )

    def _restart(self, over: np.ndarray, shown: PyTree, details: list[dict[str, Any]]) -> PyTree:
        """Resets the envs that are over; their infos in `details` are replaced."""
        observation, info = self._envs.reset(options={"reset_mask": over.copy()})
        fresh = self._converted(observation)
        for before, after in zip(jax.tree.leaves(shown), jax.tree.leaves(fresh), strict=True):
            if not np.array_equal(before[~over], after[~over], equal_nan=before.dtype.kind == "f"):
                raise ConfigError(
                    f"Gymnasium: the vector env, of autoreset mode {self._autoreset!r}, does not keep to "
                    "options['reset_mask']: its reset changed other envs too; use one with 'next_step'"
                )
        new = self._infos(info)
        for i in np.flatnonzero(over):
            details[i] = new[i]
        return fresh

    def _put_final(self, shown: PyTree, details: dict[str, Any], i: int) -> None:
        """Writes env i's final observation over the next episode's first one."""
        if details.get("final_obs") is None:
            raise ConfigError(
                f"Gymnasium: env {i}'s episode ended in autoreset mode 'same_step', and its info has no 'final_obs'; "
                "the observation that is shown belongs to the next episode"
            )
        final = rows_of(self._observation_space, self._spec.observation, details["final_obs"], 1)
        for row, x in zip(jax.tree.leaves(shown), jax.tree.leaves(final), strict=True):
            row[i] = x[0]

    def _converted(self, observation: Any) -> PyTree:
        return rows_of(self._observation_space, self._spec.observation, observation, self._num_envs)

    def _infos(self, info: Any) -> list[dict[str, Any]]:
        return info if isinstance(info, list) else infos(info, self._num_envs, self._keys)

    def _masks(self, details: list[dict[str, Any]], ended: np.ndarray) -> np.ndarray | None:
        """Action masks, bool `[B, A]`; a LAST row, whose action nobody takes, may be without."""
        if not self._spec.action_mask:
            return None
        masks = np.ones((self._num_envs, self._spec.mask_size), bool)
        for i, (found, last) in enumerate(zip(details, ended, strict=True)):
            own = found.get("final_action_mask" if last and self._autoreset == "same_step" else "action_mask")
            if own is not None:
                masks[i] = self._mask(own, i)
            elif not last:
                raise ConfigError(
                    f"Gymnasium.action_mask = True: the info of env {i} has no 'action_mask'; give it in reset and step"
                )
        return masks

    def _mask(self, own: Any, i: int) -> np.ndarray:
        """Env i's mask as a bool vector."""
        mask = np.concatenate([np.ravel(x) for x in own]) if isinstance(own, tuple) else np.ravel(own)
        size, sizes = self._spec.mask_size, self._sizes
        if is_joint(own, sizes) == self._joint and len(mask) == size:
            return mask.astype(bool)
        rule = f"{size} entries, one for each action"
        if self._joint:
            rule = f"the shape {sizes} on every row, as on the first"
        elif sizes:
            rule += f" of each component in turn; or, on every row, the shape {sizes}, one for each combination"
        given = f"is a tuple of {len(own)} masks" if isinstance(own, tuple) else f"has the shape {np.shape(own)}"
        raise ConfigError(
            f"Gymnasium.action_mask = True: info['action_mask'] of env {i} {given}, {len(mask)} entries in all; it "
            f"must have {rule}"
        )

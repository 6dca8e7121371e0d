"""Discrete(n, start=k): the env gets k .. k+n-1, the agent and what is stored stay 0-based."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import flaxrl
from flaxrl import ArraySpec, Discrete, EnvSpec, JaxEnv, Trainer
from flaxrl.envs.fake import HostScripted
from tests.small_runs import host_config, rows, small_config


class FromTen(JaxEnv):
    """Pays 1 for an action in 10 .. 12, -100 for any other; an episode is 4 actions."""

    def __init__(self) -> None:
        self.spec = EnvSpec(observation=ArraySpec((1,)), action=Discrete(3, start=10))

    def reset(self, key: Any) -> Any:
        return jnp.int32(0), jnp.zeros(1), None

    def step(self, state: Any, action: Any, key: Any) -> Any:
        right = (action >= 10) & (action <= 12)
        state = state + 1
        return state, jnp.zeros(1), jnp.where(right, 1.0, -100.0), state >= 4, jnp.bool_(False), None


class HostFromTen(HostScripted):
    """A scripted env that numbers its three actions from 10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec = EnvSpec(observation=self.spec.observation, action=Discrete(3, start=10))

    def step(self, action: np.ndarray) -> Any:
        assert np.isin(action, (10, 11, 12)).all(), action
        return super().step(action - 10)


def test_in_jax(tmp_path: Path) -> None:
    Trainer(small_config(2, flaxrl.config_for(f"{__name__}:FromTen")), tmp_path).run()
    assert rows(tmp_path)[-1]["eval/return_mean"] == 4.0 and rows(tmp_path)[-1]["actor/episode_return"] == 4.0


def test_on_the_host(tmp_path: Path) -> None:
    Trainer(host_config(2, env=flaxrl.config_for(f"{__name__}:HostFromTen")), tmp_path).run()
    assert rows(tmp_path)[-1]["eval/episodes"] == 2


class OnlyTwelve(FromTen):
    """Only its last action is legal, the third of a mask that is numbered from 0; it pays 1 for no other."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = dataclasses.replace(self.spec, action_mask=True)

    def reset(self, key: Any) -> Any:
        state, observation, _ = super().reset(key)
        return state, observation, jnp.array([False, False, True])

    def step(self, state: Any, action: Any, key: Any) -> Any:
        state, observation, _, *ends, _ = super().step(state, action, key)
        return state, observation, jnp.where(action == 12, 1.0, -100.0), *ends, jnp.array([False, False, True])


class HostOnlyTwelve(HostFromTen):
    """The same on the host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec = dataclasses.replace(self.spec, action_mask=True)

    def step(self, action: np.ndarray) -> Any:
        assert (action == 12).all(), action
        return super().step(action)

    def _mask(self) -> np.ndarray:
        return np.tile([False, False, True], (self.num_envs, 1))


def test_masks_stay_0_based_in_jax(tmp_path: Path) -> None:
    env = flaxrl.config_for(f"{__name__}:OnlyTwelve")
    Trainer(small_config(2, env, loss=flaxrl.config_for("ppo")), tmp_path).run()
    assert rows(tmp_path)[-1]["eval/return_mean"] == 4.0 and rows(tmp_path)[-1]["actor/episode_return"] == 4.0


def test_masks_stay_0_based_on_the_host(tmp_path: Path) -> None:
    Trainer(host_config(2, env=flaxrl.config_for(f"{__name__}:HostOnlyTwelve")), tmp_path).run()
    assert rows(tmp_path)[-1]["eval/episodes"] == 2

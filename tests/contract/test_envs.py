"""Every adapter passes the env contract, and a broken env does not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from env_contract import check_host_env, check_jax_env, check_rows

from flaxrl.envs.atari import Atari
from flaxrl.envs.fake import Counting, HostScripted, Memory, Scripted
from flaxrl.envs.gymnasium import Gymnasium
from flaxrl.envs.gymnax import Gymnax
from flaxrl.envs.jumanji import Jumanji
from flaxrl.envs.next_step import NextStepRows
from flaxrl.types import FIRST, LAST

MODULE = "tests.envs.gymnasium_envs"

JAX_ENVS = {
    "scripted": Scripted(),
    "scripted_partial": Scripted(episode_length=3, time_limit=True, num_actions=4, mask="partial"),
    "memory": Memory(length=3),
    "cartpole": Gymnax("CartPole-v1"),
    "catch": Gymnax("catch"),
    "breakout": Gymnax("Breakout-MinAtar", max_steps=12),
    "pendulum": Gymnax("pendulum", max_steps=6),
    "memory_chain": Gymnax("memory_chain", kwargs={"num_bits": 3}, params={"memory_length": 4}),
    "frozen_lake": Gymnax("FrozenLake-misc"),
    "four_rooms": Gymnax("four_rooms", max_steps=7),
    "maze": Jumanji("maze", max_steps=9),
    "maze_fixed": Jumanji("maze-fixed", observation="maze_vector", max_steps=9),
    "snake": Jumanji("snake", kwargs={"num_rows": 5, "num_cols": 5}),
    "game_2048": Jumanji("game_2048", kwargs={"board_size": 2}),
    "cleaner": Jumanji(
        "cleaner",
        max_steps=7,
        kwargs={
            "generator": {
                "name": "jumanji.environments.routing.cleaner.generator:RandomGenerator",
                "num_rows": 5,
                "num_cols": 5,
                "num_agents": 2,
            }
        },
    ),
    "minesweeper": Jumanji("minesweeper"),
}

HOST_ENVS = {
    "scripted": lambda: HostScripted(num_envs=3),
    "time_limit": lambda: HostScripted(num_envs=3, time_limit=True, episode_length=3),
    "partial": lambda: HostScripted(num_envs=3, mask="partial"),
    "empty_on_last": lambda: HostScripted(num_envs=3, mask="empty_on_last"),
    "empty": lambda: HostScripted(num_envs=3, mask="empty"),
    "count": lambda: HostScripted(num_envs=3, reward="count"),
    "image": lambda: HostScripted(num_envs=3, image=True),
    "float64": lambda: HostScripted(num_envs=3, float64=True),
    "atari": lambda: Atari(num_envs=2, game="ms_pacman", max_frames=32),
    "atari_colour": lambda: Atari(
        num_envs=2,
        game="pong",
        max_frames=32,
        grayscale=False,
        image_size=20,
        stack=2,
        sticky_actions=0.25,
        env_threads=1,
    ),
    "cartpole": lambda: Gymnasium(num_envs=3, max_steps=12),
    "cartpole_vectorized": lambda: Gymnasium(num_envs=3, vectorized=True, max_steps=12),
    "pendulum": lambda: Gymnasium(num_envs=2, id="Pendulum-v1", max_steps=7),
    "gymnasium_same_step": lambda: Gymnasium(num_envs=3, id=f"{MODULE}:TestClock-v0", autoreset="same_step"),
    "gymnasium_disabled": lambda: Gymnasium(num_envs=3, id=f"{MODULE}:TestClock-v0", autoreset="disabled"),
    "gymnasium_own_vector": lambda: Gymnasium(num_envs=3, id=f"{MODULE}:TestSameStep-v0", vectorized=True),
    "gymnasium_start": lambda: Gymnasium(num_envs=2, id=f"{MODULE}:TestStartsAtTen-v0"),
    "gymnasium_workers": lambda: Gymnasium(num_envs=3, id=f"{MODULE}:TestClock-v0", workers=2),
}


@pytest.mark.parametrize("name", JAX_ENVS)
def test_jax_env(name):
    check_jax_env(JAX_ENVS[name], steps=24)


@pytest.mark.parametrize("env", [Counting(episode_length=4), Jumanji("maze-empty", kwargs={"size": 3})])
def test_jax_env_without_randomness(env):
    check_jax_env(env, varies=False)


@pytest.mark.parametrize("name", HOST_ENVS)
def test_host_env(name):
    check_host_env(HOST_ENVS[name], steps=24)


def _rows(**fields):
    """Rows of three Scripted episodes with one field rewritten: `f(row index, row) -> array`."""
    rows = check_host_env(lambda: HostScripted(num_envs=2))
    return [dataclasses.replace(r, **{k: f(t, r) for k, f in fields.items()}) for t, r in enumerate(rows)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_type": lambda t, r: np.where(r.step_type == FIRST, 1, r.step_type).astype(np.int8)}, "FIRST"),
        ({"step_type": lambda t, r: np.where(r.step_type == LAST, 1, r.step_type).astype(np.int8)}, "no episode ended"),
        ({"reward": lambda t, r: r.reward + np.float32(1)}, "episode_return|reward must be 0"),
        ({"discount": lambda t, r: r.discount * np.float32(0.99)}, "discount"),
        ({"discount": lambda t, r: np.where(t == 2, 0, r.discount).astype(np.float32)}, "without an episode end"),
        ({"episode_length": lambda t, r: r.episode_length + np.int32(1)}, "episode_length"),
        ({"episode_return": lambda t, r: r.reward}, "episode_return"),
        ({"observation": lambda t, r: r.observation.astype(np.float64)}, "float64"),
        ({"action_mask": lambda t, r: np.ones((2, 3), bool)}, "mask"),
    ],
)
def test_broken_rows_are_caught(fields, message):
    with pytest.raises(AssertionError, match=message):
        check_rows(HostScripted(num_envs=2).spec, _rows(**fields))


class ReusesItsBuffer(HostScripted):
    """Answers the same array again and again."""

    def step(self, action):
        row = super().step(action)
        self._buffer = getattr(self, "_buffer", row.observation)
        self._buffer[...] = row.observation
        return dataclasses.replace(row, observation=self._buffer)


class ListensOnLast(HostScripted):
    """Lets the action that is to be ignored choose the next episode."""

    def step(self, action):
        if self._rows is not None and self._rows.over[0]:
            self._random[0] = np.random.default_rng(int(action[0]))
        return super().step(action)


class OneSeed(HostScripted):
    """Seeds every env alike (a classic)."""

    def reset(self, seed):
        super().reset(seed)
        self._random = [np.random.default_rng(seed) for _ in range(self.num_envs)]
        self._restart(np.ones(self.num_envs, bool))
        self._rows = NextStepRows(self.spec, self.num_envs)
        return self._rows.first(self._observe(), self._mask())


@pytest.mark.parametrize(
    ("cls", "message"),
    [(ReusesItsBuffer, "belong to the caller"), (ListensOnLast, "not ignored"), (OneSeed, "same episodes")],
)
def test_broken_host_envs_are_caught(cls, message):
    with pytest.raises(AssertionError, match=message):
        check_host_env(lambda: cls(num_envs=4, num_actions=9))


class ChangesItsType(Scripted):
    """Its first observation has another dtype than the later ones."""

    def reset(self, key):
        state, observation, mask = super().reset(key)
        return state, observation.astype(jnp.int32), mask


def test_a_changing_dtype_is_caught():
    with pytest.raises(AssertionError, match="row 0: observation int32"):
        check_jax_env(ChangesItsType())

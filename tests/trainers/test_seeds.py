"""The actors of all processes play different episodes, with other random numbers (and one process the same)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from flaxrl.trainers import actors as actors_module
from flaxrl.trainers.actors import ActorThreads

ENVS = 12


class Recorder:
    """In an Actor's place: what it was given; its first unroll is its last."""

    made: list[Recorder]

    def __init__(self, env: Any, act: Any, env_ids: np.ndarray, seed: int, **_: Any):
        self.ids, self.seeds = env_ids.tolist(), [seed + i for i in range(len(env_ids))]
        self.made.append(self)

    def unroll(self, model: Any, updates: int, key: Any) -> None:
        self.key = tuple(jax.random.key_data(key).tolist())

    def close(self) -> None:
        pass


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(processes, threads, seed, first update) -> what all actors were given, in order of process and thread."""

    def given(count: int, threads: int, seed: int = 3, first_update: int = 0) -> list[Recorder]:
        Recorder.made = []
        monkeypatch.setattr(actors_module, "Actor", Recorder)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        for process in range(count):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            source: Any = ActorThreads(num_envs=ENVS, threads=threads)
            source._runtime = SimpleNamespace(seed=seed)
            source._act = source._blocks = None
            source._devices, source._first_update = jax.devices()[:1], first_update
            source._key = jax.random.fold_in(jax.random.key(seed), 1)
            source._make_env = source._newest_ready = lambda: SimpleNamespace(updates=0, close=lambda: None)
            source._model_for = lambda thread, published: None
            source._put = lambda thread, unrolled, stop=source._stop: stop.set()
            for thread in range(threads):
                source._stop.clear()
                source._work(thread)
                assert source._error is None, source._error
        monkeypatch.undo()
        return Recorder.made

    return given


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_two_envs_or_actors_of_a_run_are_alike(play: Any, count: int, threads: int) -> None:
    actors = play(count, threads)
    assert len(actors) == count * threads and len({a.key for a in actors}) == len(actors)
    assert list(itertools.chain(*(a.ids for a in actors))) == list(range(ENVS))
    seeds = list(itertools.chain(*(a.seeds for a in actors)))
    assert len(set(seeds)) == ENVS


def test_env_seeds_do_not_depend_on_how_many_processes_there_are(play: Any) -> None:
    one, three = ([seed for a in play(count, 1) for seed in a.seeds] for count in (1, 3))
    assert one == three
    assert [a.seeds for a in play(2, 2)] == [a.seeds for a in play(2, 2)]


def test_another_run_and_a_resumed_one_play_other_episodes(play: Any) -> None:
    runs = [play(2, 1), play(2, 1, seed=4), play(2, 1, first_update=10)]
    assert len({seed for run in runs for a in run for seed in a.seeds}) == 3 * ENVS
    assert len({a.key for run in runs for a in run}) == 6

"""Stopped and resumed is bit for bit not stopped, for each thing that a run carries along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from learner_setups import host

from flaxrl import Trainer, config_for
from tests.small_runs import assert_same, every, host_config, rows, small_config, stop, train

KERNELS = (("kernel", "fsdp"),)
LSTM = config_for("lstm", features=8, initial_state="learned")


def recurrent(updates: int) -> Any:
    """LSTM whose episodes end within unrolls, shuffled minibatches of whole sequences, four devices."""
    return _run(
        updates, core=LSTM, learner=config_for("learner", epochs=2, minibatches=2), mesh=config_for("mesh", data=4)
    )


def sharded(updates: int) -> Any:
    """The same with sharded parameters and moments, in pieces, a warm-up before the linear schedule."""
    optimizer = config_for("optimizer", learning_rate=1e-2, schedule="linear", warmup_fraction=0.4)
    mesh, learner = config_for("mesh", data=2, fsdp=2, rules=KERNELS), config_for("learner", accumulation=2)
    return _run(updates, core=LSTM, mesh=mesh, learner=learner, optimizer=optimizer)


def steps(updates: int) -> Any:
    """Shuffled single steps over several epochs, in bfloat16."""
    learner, mesh = config_for("learner", epochs=3, minibatches=4), config_for("mesh", data=2)
    config = _run(updates, loss=config_for("surrogate:Surrogate"), learner=learner, mesh=mesh)
    config.model.dtype = "bfloat16"
    return config


def normalised(updates: int) -> Any:
    """Running statistics of observations and returns, over episodes that unrolls cut; B over four devices."""
    learner = config_for("learner", epochs=2, minibatches=2, reward_scaling=0.9)
    config = _run(updates, learner=learner, mesh=config_for("mesh", data=4))
    config.model.normalize_observations = True
    return config


def game(updates: int) -> Any:
    """A gymnax game, whose env states hold more than Scripted's; inputs with last action and reward."""
    config = _run(updates, env=config_for("gymnax", game="Catch-bsuite"), core=config_for("gru", features=8))
    config.model.use_last_action = config.model.use_last_reward = True
    return config


def _run(updates: int, **fields: Any) -> Any:
    """Updates of 32 steps, two a call; log, evaluation and checkpoint every two of them."""
    source = config_for("jax_rollout", num_envs=8, unroll_length=4, updates_per_call=2)
    made = small_config(updates, source=source, **(every(8) | fields))
    made.total_steps = updates * 32
    return made


def told(workdir: Path) -> list[dict[str, float]]:
    """What was logged, without what a clock measured."""
    counted = ("time/updates", "time/frames")
    return [{k: v for k, v in line.items() if not k.startswith("time/") or k in counted} for line in rows(workdir)]


@pytest.mark.parametrize(
    "config",
    # In the slow tests the compiler takes all its passes.
    [normalised, *[pytest.param(f, marks=pytest.mark.slow) for f in (normalised, recurrent, sharded, steps, game)]],
    ids=lambda f: f.__name__,
)
def test_resumed_is_uninterrupted(tmp_path: Path, config: Any) -> None:
    """2 N updates are N, a stop, and N: state, env states, recurrent states, keys, counters, schedules, statistics."""
    whole = train(config(8), tmp_path / "whole")
    stop(config(8), tmp_path / "parts", 4)
    parts = train(config(8), tmp_path / "parts")
    assert int(parts.state.updates) == 8 and parts.steps == 256
    assert_same(parts.state, whole.state)
    assert bool(parts.state.variables) == (config is normalised)
    assert_same(parts.data, whole.data)
    ours, theirs = told(tmp_path / "parts"), told(tmp_path / "whole")
    assert [line["step"] for line in ours] == [64, 128, 192, 256]
    # Everything that is told is the same number: the learning rate, and the evaluation that was due at the stop.
    assert ours == theirs and all("eval/return_mean" in line for line in ours)
    rates = [line["loss/learning_rate"] for line in theirs]
    assert len(set(rates)) == 4


@pytest.mark.slow
def test_the_same_seed_and_mesh_give_the_same_numbers(tmp_path: Path) -> None:
    one, two = (train(recurrent(4), tmp_path / name) for name in "ab")
    assert_same(one.state, two.state)
    assert_same(one.data, two.data)
    assert told(tmp_path / "a") == told(tmp_path / "b")


class Noting(Trainer):
    """Keeps the state that the first update starts from."""

    start: Any = None

    def _call(self) -> None:
        if self.start is None:
            self.start = host(self.state)
        super()._call()


def test_host_envs_go_on_with_everything_but_their_episodes(tmp_path: Path) -> None:
    """The state that a resumed run starts from is the one that was saved; its envs start new episodes."""
    config = host_config(4, core=LSTM, **every(1))
    stop(config, tmp_path, 2)
    saved = Trainer(host_config(2, core=LSTM, **every(1)), tmp_path)
    saved.run()  # restores, and has nothing left to do
    resumed = Noting(config, tmp_path)
    resumed.run()
    assert_same(resumed.start, host(saved.state))
    assert [line["step"] for line in rows(tmp_path)] == [8, 16, 24, 32]
    rates = [line["loss/learning_rate"] for line in rows(tmp_path)]
    assert rates == pytest.approx([0.01 * (1 - i / 4) for i in range(4)])
    assert jax.tree.leaves(resumed.data) == []


def test_a_linear_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    """At update 40 of 100 the rate is 6e-4 of 1e-3, in the first line of the resumed run."""
    optimizer = config_for("optimizer", learning_rate=1e-3, schedule="linear")
    log = config_for("log", every=1, writers=("json_lines",))
    config = small_config(100, optimizer=optimizer, log=log)
    stop(config, tmp_path, 40)
    assert rows(tmp_path)[-1]["loss/learning_rate"] == pytest.approx(6.1e-4, rel=1e-5)
    trainer = Trainer(config, tmp_path)
    trainer.run()
    lines = rows(tmp_path)
    assert lines[40]["step"] == 41 * 8 and lines[40]["loss/learning_rate"] == pytest.approx(6e-4, rel=1e-5)
    # float32 rounds the fraction done, so to 6e-8 of the rate at the start
    rates = [1e-3 * (1 - k / 100) for k in range(100)]
    assert [line["loss/learning_rate"] for line in lines] == pytest.approx(rates, rel=0, abs=2e-10)
    assert int(trainer.state.step) == int(trainer.state.updates) == 100

"""The Trainer: what a run leaves behind, and what ends it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from flaxrl import ConfigError, Trainer, TrainingError, cli, config_for, load
from flaxrl.trainers import trainer as trainer_module
from flaxrl.trainers.checkpoint import Checkpointer
from tests.small_runs import (
    STEPS,
    all_finite,
    assert_same,
    every,
    host_config,
    rows,
    saved_meta,
    saved_steps,
    small_config,
    train,
)

CONFIGS = {"jax": small_config, "host": host_config}


def started_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """Threads started since and still running; those of earlier tests may end at any time."""
    return set(threading.enumerate()) - before


@pytest.mark.parametrize("threads", [None, 0, 2])
def test_run_logs_evaluates_saves_and_leaves_nothing_running(tmp_path: Path, threads: int | None) -> None:
    before = set(threading.enumerate())
    cadence = every(3)
    config = small_config(7, **cadence) if threads is None else host_config(7, threads, **cadence)
    trainer = Trainer(config, tmp_path / "run")
    last = trainer.run()
    assert not started_since(before)
    lines = rows(tmp_path / "run")
    # 7 is no multiple of 3: the end is logged, evaluated and saved all the same.
    assert [line["step"] for line in lines] == [24, 48, 56] and saved_steps(tmp_path / "run") == [24, 48, 56]
    assert all(0 <= line["eval/return_mean"] <= 5 and line["eval/episodes"] == 2 for line in lines)
    assert all(0 <= line["actor/episode_return"] <= 5 and line["actor/episode_length"] == 5 for line in lines[:2])
    assert all(np.isfinite(line["loss/total"]) for line in lines)
    assert last == lines[0] | lines[1] | lines[2]
    assert saved_meta(tmp_path / "run")["steps"] == 56 and int(trainer.state.updates) == 7 and trainer.finished


def test_seed_decides_the_run(tmp_path: Path) -> None:
    def kernel(name: str, seed: int) -> np.ndarray:
        config = host_config(2)
        config.seed = seed
        return np.asarray(jax.tree.leaves(train(config, tmp_path / name).state.params)[-1])

    first = kernel("a", 3)
    np.testing.assert_array_equal(kernel("b", 3), first)
    assert not np.array_equal(kernel("c", 4), first)


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_evaluation_does_not_touch_training(tmp_path: Path, kind: str) -> None:
    evaluated = train(CONFIGS[kind](4, eval=config_for("eval", every=STEPS, episodes=2)), tmp_path / "a")
    plain = train(CONFIGS[kind](4), tmp_path / "b")
    assert sum("eval/return_mean" in line for line in rows(tmp_path / "a")) == 4
    assert_same(evaluated.state, plain.state)
    assert_same(evaluated.data, plain.data)


def test_best_and_latest_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returns = iter([5.0, 4.0, 3.0, 2.0, 1.0])

    class Stub:
        def __init__(self, *_: Any): ...

        def run(self, *_: Any) -> dict[str, float]:
            return {"eval/return_mean": next(returns)}

        def film(self, *_: Any) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(trainer_module, "Evaluator", Stub)
    cadence = every(2, checkpoint=config_for("checkpoint", every=2 * STEPS, keep=1))
    train(small_config(8, **cadence), tmp_path / "run")
    assert saved_steps(tmp_path / "run", "best") == [16] and saved_steps(tmp_path / "run") == [64]
    assert load(tmp_path / "run").step == 64 and load(tmp_path / "run", "best").step == 16
    resumed = Trainer(small_config(9, **cadence), tmp_path / "run")
    resumed.run()
    assert resumed.steps == 72 and [line["step"] for line in rows(tmp_path / "run")] == [16, 32, 48, 64, 72]


def test_nan_rewards_are_counted_and_then_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # T = 4: the 100th step of the env is in update 25, so updates 25, 26 and 27 are lost.
    env = config_for("tests.faulty_envs:NaNFrom", nan_from=100)
    settings = every(1, learner=config_for("learner", max_skipped=3), eval=config_for("eval", episodes=2))
    with pytest.raises(SystemExit) as exit_, cli.one_line_errors():
        Trainer(host_config(60, env=env, **settings), tmp_path / "run").run()
    assert exit_.value.code == 1
    out, err = capsys.readouterr()
    assert "skipped 1 of the 1 gradient steps up to step 200, the last 1 in a row" in out
    assert "not finite in the last 3 gradient steps (step 216," in err and err.count("\n") == 1
    assert [line["loss/skipped"] for line in rows(tmp_path / "run")] == [0.0] * 24 + [1.0] * 3
    agent = load(tmp_path / "run")
    assert agent.step == 208 and all_finite(agent.params)


def test_one_nan_reward_costs_one_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = config_for("host_scripted", nan_at=7)
    trainer = train(host_config(5, env=env, learner=config_for("learner", max_skipped=2)), tmp_path / "run")
    assert "skipped 1 of the 5 gradient steps up to step 40, the last 0 in a row" in capsys.readouterr().out
    assert (int(trainer.state.updates), int(trainer.state.step)) == (5, 4) and all_finite(trainer.state)


@pytest.mark.parametrize(("kind", "env"), [("jax", "scripted"), ("host", "host_scripted")])
def test_empty_action_masks(tmp_path: Path, kind: str, env: str) -> None:
    """No legal action on the final row is fine, anywhere else it ends the run with env and step."""
    trainer = train(CONFIGS[kind](3, env=config_for(env, mask="empty_on_last")), tmp_path / "last")
    assert all_finite(trainer.state.params) and int(trainer.state.step) == 3
    with pytest.raises(TrainingError, match="env 0 gave an action mask without a legal action at step 0"):
        train(CONFIGS[kind](3, env=config_for(env, mask="empty")), tmp_path / "all")


class Watched(Trainer):
    """Tells a function of each update."""

    def __init__(self, config: Any, workdir: Path, watch: Any):
        super().__init__(config, workdir)
        self.watch = watch

    def _call(self) -> None:
        super()._call()
        self.watch(self.updates)


@pytest.mark.parametrize(("kind", "threads"), [("jax", 0), ("host", 0), ("host", 1)])
def test_nothing_compiles_once_everything_has_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, threads: int
) -> None:
    """Between updates 5 and 12 there are four logs, evaluations and checkpoints; the first of each were before."""
    compiled: dict[int, int] = {}

    def watch(updates: int) -> None:
        compiled[updates] = sum(r.getMessage().startswith("Compiling") for r in caplog.records)

    config = small_config(12, **every(2)) if kind == "jax" else host_config(12, threads, **every(2))
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        Watched(config, tmp_path / "run", watch).run()
    assert compiled[1] > 0 and compiled[5] == compiled[12]


def memory_used(config: Any, workdir: Path, at: tuple[int, int]) -> list[float]:
    """Resident MiB after some updates of a run, and after more of them."""
    process, used = psutil.Process(), []

    def watch(updates: int) -> None:
        if updates in at:
            used.append(process.memory_info().rss / 2**20)

    Watched(config, workdir, watch).run()
    return used


def test_memory_does_not_grow(tmp_path: Path) -> None:
    """PPO, a log every update."""
    settings = every(1, eval=config_for("eval", episodes=2), checkpoint=config_for("checkpoint", every=None))
    config = small_config(
        600, loss=config_for("ppo"), learner=config_for("learner", epochs=2, minibatches=2), **settings
    )
    early, late = memory_used(config, tmp_path / "run", (200, 600))
    assert late - early < 1.0  # MiB; keeping the metrics of 400 updates would take more than 2


@pytest.mark.slow
def test_memory_does_not_grow_in_a_long_run_that_does_everything(tmp_path: Path) -> None:
    """PPO on a game of gymnax, a line of metrics each update, an evaluation and a checkpoint each hundred."""
    cadence = every(100, log=config_for("log", every=STEPS), checkpoint=config_for("checkpoint", every=100 * STEPS))
    settings = cadence | {"loss": config_for("ppo"), "learner": config_for("learner", epochs=2, minibatches=2)}
    config = small_config(2000, config_for("gymnax", game="CartPole-v1"), **settings)
    early, late = memory_used(config, tmp_path / "run", (500, 2000))
    assert late - early < 0.02 * early


def test_steps_go_beyond_31_bits(tmp_path: Path) -> None:
    first = train(small_config(1), tmp_path / "run")
    updates = 2**31 // STEPS - 2
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    state = first.state.replace(updates=jnp.int32(updates))
    checkpointer.save(updates * STEPS, state, first.data, {"updates": updates})
    checkpointer.close()
    train(small_config(updates + 4, **every(1)), tmp_path / "run")
    lines = rows(tmp_path / "run")
    # At the step that it goes on from, only the evaluation that was due there.
    assert [line["step"] - 2**31 for line in lines[1:]] == [-16, -8, 0, 8, 16] and "eval/return_mean" in lines[1]
    assert all(0 <= line["loss/learning_rate"] < 1e-6 and np.isfinite(line["loss/total"]) for line in lines[2:])
    assert load(tmp_path / "run").step == 2**31 + 16 == saved_meta(tmp_path / "run")["frames"]


def test_failed_set_up_leaves_no_trace(tmp_path: Path) -> None:
    """A config that cannot be set up claims no folder and leaves no thread."""
    before = set(threading.enumerate())
    wrong = host_config(2, env=config_for("scripted"))
    with pytest.raises(ConfigError, match="use config_for\\('jax_rollout'\\)"):
        Trainer(wrong, tmp_path / "run").run()
    with pytest.raises(ConfigError, match="use config_for\\('actor_threads'\\)"):
        Trainer(small_config(2, env=config_for("host_scripted")), tmp_path / "run").run()
    assert not started_since(before) and not (tmp_path / "run").exists()


def test_failing_env_is_raised_and_all_threads_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="HostScripted fails at step 6"):
        train(host_config(20, 2, env=config_for("host_scripted", fail_at=6)), tmp_path / "run")
    assert not started_since(before)


def test_run_may_be_called_again(tmp_path: Path) -> None:
    trainer = train(host_config(2, 1), tmp_path / "run")
    assert trainer.run() == {}
    trainer.config.total_steps = 4 * STEPS
    assert trainer.run()["step"] == 4 * STEPS and int(trainer.state.updates) == 4

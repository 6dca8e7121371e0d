"""A run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from absl import logging

from flaxrl import ConfigError, Trainer, config_for
from tests.small_runs import (
    STEPS,
    Stopped,
    assert_same,
    every,
    host_config,
    rows,
    saved_steps,
    small_config,
    stop,
    train,
)


def crash() -> None:
    raise OSError("as if killed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """The run that nothing stops: 6 updates, logged, evaluated and saved every 2."""
    folder = tmp_path_factory.mktemp("whole")
    return train(small_config(6, **every(2)), folder), folder


# In the slow tests the compiler takes all its passes.
@pytest.mark.parametrize("stops", [(2,), (1, 5), *[pytest.param(s, marks=pytest.mark.slow) for s in ((2,), (1, 5))]])
def test_interrupted_run_ends_bit_for_bit_the_same(
    tmp_path: Path, whole: tuple[Trainer, Path], stops: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, optimizer state, counters, env states and their keys, metrics of whole intervals, evaluations."""
    config = small_config(6, **every(2))
    for at in stops:
        stop(config, tmp_path, at)
        assert f"SIGTERM: saved at step {at * STEPS}; the same command goes on" in capsys.readouterr().out
    trainer = train(config, tmp_path)
    assert f"resumed at step {stops[-1] * STEPS} (update {stops[-1]})" in capsys.readouterr().out
    assert_same(trainer.state, whole[0].state)
    assert_same(trainer.data, whole[0].data)
    ours, theirs = rows(tmp_path), rows(whole[1])
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == [16, 32, 48]
    returns = [r["eval/return_mean"] for r in theirs]
    # Also the one that was due when it was told to stop: the next start makes up for it.
    assert [r.get("eval/return_mean") for r in ours] == returns


def test_crashed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, whole: tuple[Trainer, Path]) -> None:
    config = small_config(6, **every(2))
    with pytest.raises(OSError, match="as if killed"):
        Stopped(config, tmp_path, 5, crash).run()
    assert saved_steps(tmp_path) == [16, 32]
    trainer = train(config, tmp_path)
    assert_same(trainer.state, whole[0].state)
    assert [r["step"] for r in rows(tmp_path)] == [16, 32, 48]


@pytest.mark.parametrize("broken", ["evaluate.Evaluator.run", "checkpoint.Checkpointer.save_best"])
def test_an_evaluation_that_a_kill_broke_off_is_made_up_for(
    tmp_path: Path, whole: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """With all that it leaves: its metrics, and the parameters where they are the best."""
    config = small_config(6, **every(2, checkpoint=config_for("checkpoint", every=16, keep=20, keep_best=20)))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="as if killed"):
        patched.setattr(f"flaxrl.trainers.{broken}", lambda *_: crash())
        train(config, tmp_path)
    assert saved_steps(tmp_path) == [16] and saved_steps(tmp_path, "best") == []
    assert train(config, tmp_path).finished
    returns, expected = ([r["eval/return_mean"] for r in rows(folder)] for folder in (tmp_path, whole[1]))
    assert returns == expected and saved_steps(tmp_path, "best")[0] == 16


def test_a_run_that_goes_back_evaluates_again_what_it_forgot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the second evaluation of a step whose first one a damaged checkpoint made void."""
    config = small_config(4, **every(2))
    train(config, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "latest" / "32")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="as if killed"):
        patched.setattr("flaxrl.trainers.evaluate.Evaluator.run", lambda *_: crash())
        train(config, tmp_path)
    train(config, tmp_path)
    assert ["eval/return_mean" in r for r in rows(tmp_path)] == [True, True]


def test_a_finished_run_is_evaluated_once_whatever_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(2, log=config_for("log", every=STEPS, writers=()))
    train(config, tmp_path)
    monkeypatch.setattr("flaxrl.trainers.evaluate.Evaluator.run", lambda *_: crash())
    assert Trainer(config, tmp_path).run() == {}


def test_host_envs_start_anew_but_counters_and_schedules_go_on(tmp_path: Path) -> None:
    config = host_config(6, **every(1))
    stop(config, tmp_path, 3)
    trainer = train(config, tmp_path)
    lines = rows(tmp_path)
    assert [r["step"] for r in lines] == [8 * i for i in range(1, 7)]
    # Linear from 0.01 to 0, by the number of updates done before: 1 - 0/6, 1 - 1/6, ...
    assert [r["loss/learning_rate"] for r in lines] == pytest.approx([0.01 * (1 - i / 6) for i in range(6)])
    assert (int(trainer.state.updates), int(trainer.state.step), trainer.steps) == (6, 6, 48)
    assert [r["time/frames"] for r in lines] == [r["step"] for r in lines]


def test_unfinished_save_is_passed_over_and_its_step_can_be_saved(
    tmp_path: Path, whole: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, warned = small_config(6, **every(2)), []
    stop(config, tmp_path, 3)
    (tmp_path / "checkpoints" / "latest" / "48").mkdir()
    monkeypatch.setattr(logging, "warning", lambda text, *arguments: warned.append(text % arguments))
    trainer = train(config, tmp_path)
    assert len(warned) == 1 and "latest/48 is passed over" in warned[0]
    assert saved_steps(tmp_path) == [16, 24, 32, 48]
    assert_same(trainer.state, whole[0].state)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    train(small_config(1), tmp_path)
    wider = small_config(1)
    wider.model.torso.hidden = (9, 9)
    with pytest.raises(ConfigError, match=r"model.torso.hidden \(8,\) -> \(9, 9\)"):
        Trainer(wider, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["model"]["torso"]["hidden"] = [9, 9]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"params/head/policy/kernel is float32\[8,3\] in the checkpoint"):
        Trainer(wider, tmp_path).run()


def test_finished_run_has_nothing_to_do_until_it_gets_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_config(2), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert Trainer(small_config(2), tmp_path).run() == {}
    assert "nothing left to do" in capsys.readouterr().out and (tmp_path / "metrics.jsonl").read_text() == before
    longer = train(small_config(3), tmp_path)
    assert longer.steps == 24 and [r["step"] for r in rows(tmp_path)] == [16, 24]

"""Known answers of public envs: minutes in all, so `pytest -m slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

import flaxrl
from flaxrl import config_for
from tests.learning.shipped import shipped

pytestmark = pytest.mark.slow


def test_cartpole(tmp_path: Path) -> None:
    """475 of 500 counts as solved; the mean of 100 greedy episodes with the final parameters."""
    config = shipped("impala_gymnax", "CartPole-v1")
    assert config.total_steps <= 500_000
    config.eval.episodes = 100
    assert flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] >= 475


def test_catch(tmp_path: Path) -> None:
    config = shipped("impala_gymnax", "Catch-bsuite")
    config.eval.episodes = 100
    assert flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] >= 0.99


def test_breakout_minatar(tmp_path: Path) -> None:
    """A policy that closes before it has seen the whole game stays at 5 to 7; three seeds reached 20 to 28."""
    config = shipped("impala_gymnax", "Breakout-MinAtar")
    assert config.total_steps <= 2_000_000
    config.eval.episodes = 100
    assert flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] >= 10


@pytest.mark.parametrize(("core", "low", "high"), [("lstm", 0.95, 1.0), ("feed_forward", -0.5, 0.5)])
def test_memory_needs_a_memory(tmp_path: Path, core: str, low: float, high: float) -> None:
    """A cue is asked for 6 steps later: with an LSTM the return is 1, without memory 0 (the mean of 100 episodes)."""
    config = flaxrl.run_config(
        seed=0,
        total_steps=150_000,
        env=config_for("memory", length=6),
        mesh=config_for("mesh", data=1),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(16,)),
            core=config_for("lstm", features=16) if core == "lstm" else config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("vtrace", discount=0.99, entropy_cost=0.01),
        optimizer=config_for("optimizer", learning_rate=5e-3, max_grad_norm=1.0),
        source=config_for("jax_rollout", num_envs=32, unroll_length=16, updates_per_call=10),
        log=config_for("log", every=50_000, writers=()),
        eval=config_for("eval", episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )
    assert low <= flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] <= high

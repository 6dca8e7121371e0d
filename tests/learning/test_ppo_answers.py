"""Known answers of public envs to PPO: minutes in all, so `pytest -m slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

import flaxrl
from tests.learning.shipped import shipped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "low"),
    [("ppo_cartpole", 475), ("ppo_acrobot", -95), ("ppo_pendulum", -220), ("ppo_maze", 1.0)],
)
def test_ppo(tmp_path: Path, name: str, low: float) -> None:
    """The mean of 100 greedy episodes with the final parameters."""
    config = shipped(name)
    assert config.eval.episodes == 100
    assert flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] >= low


def test_a_squashed_policy_learns_too(tmp_path: Path) -> None:
    config = shipped("ppo_pendulum")
    config.model.head.distribution = "tanh_gaussian"
    assert flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] >= -250


def test_statistics_do_not_keep_it_from_learning(tmp_path: Path) -> None:
    """Observations and rewards relative to their running deviation."""
    config = shipped("ppo_pendulum")
    config.model.normalize_observations, config.learner.reward_scaling = True, 0.9
    assert flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] >= -250


@pytest.mark.parametrize(("core", "low", "high"), [("gru", 400, 500), ("feed_forward", 0, 200)])
def test_positions_alone_need_a_memory(tmp_path: Path, core: str, low: float, high: float) -> None:
    config = shipped("ppo_recurrent", core)
    assert low <= flaxrl.Trainer(config, tmp_path).run()["eval/return_mean"] <= high

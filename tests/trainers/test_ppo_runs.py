"""PPO through the Trainer: single steps and sequences, on and off policy, every optional field, meshes, resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flaxrl import ConfigError, config_for
from flaxrl.models.normalization import STATISTICS
from flaxrl.trainers.plan import check
from flaxrl.trainers.sharding import PER_ENV
from flaxrl.trainers.statistics import RETURNS
from tests.small_runs import all_finite, assert_same, every, rows, small_config, stop, train


def ppo_config(updates: int = 3, recurrent: bool = False, loss: Any = None, **fields: Any) -> Any:
    source = config_for("jax_rollout", num_envs=fields.pop("num_envs", 4), unroll_length=fields.pop("time", 4))
    defaults = {
        "loss": config_for("ppo", **({"minibatch": "sequences"} if recurrent else {}), **(loss or {})),
        "learner": config_for("learner", epochs=2, minibatches=2),
    }
    core = config_for("gru", features=8) if recurrent else config_for("feed_forward")
    config = small_config(1, config_for("scripted", mask="partial"), source, core, **(defaults | every(2) | fields))
    with config.unlocked():
        config.total_steps = updates * source.num_envs * source.unroll_length
        config.log.every = 1
    return config


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_first_minibatch_has_the_acting_ratio(tmp_path: Path, recurrent: bool) -> None:
    train(ppo_config(recurrent=recurrent), tmp_path)
    found = [row for row in rows(tmp_path) if "loss/total" in row]
    assert len(found) == 3
    for row in found:
        assert row["loss/first_ratio_deviation"] < 1e-5
        assert row["loss/skipped"] == 0
    assert any(row["loss/kl_behaviour"] > 0 for row in found), "later minibatches have moved"


OPTIONAL = ("target_kl", "value_clip", "clip_final", "entropy_cost_final", "max_abs_reward")
ALTERNATING = {name: 0.1 if i % 2 else None for i, name in enumerate(OPTIONAL)}
SETTINGS = {
    "off": dict.fromkeys(OPTIONAL),
    "on": dict.fromkeys(OPTIONAL, 0.1),
    "odd": ALTERNATING,
    "even": {name: 0.1 if value is None else None for name, value in ALTERNATING.items()},
}


@pytest.mark.parametrize("setting", ["off", "on", *[pytest.param(s, marks=pytest.mark.slow) for s in ("odd", "even")]])
def test_optional_fields_compile_on_and_off(tmp_path: Path, setting: str) -> None:
    """Those of the loss, and the clips of gradients, of scaled rewards and of normalised observations."""
    clip = {"off": None, "even": None, "on": 0.5, "odd": 0.5}[setting]
    learner = config_for("learner", epochs=2, minibatches=2, reward_scaling=0.9, reward_clip=clip)
    optimizer = config_for("optimizer", max_grad_norm=clip)
    config = ppo_config(updates=1, loss=SETTINGS[setting], learner=learner, optimizer=optimizer)
    config.model.normalize_observations, config.model.observation_clip = True, clip
    trainer = train(config, tmp_path)
    assert all_finite(trainer.state.params)
    assert rows(tmp_path)[-1]["loss/skipped"] == 0


def test_a_target_kl_ends_the_epochs(tmp_path: Path) -> None:
    config = ppo_config(updates=2, loss={"target_kl": 1e-9}, learner=config_for("learner", epochs=5, minibatches=2))
    trainer = train(config, tmp_path)
    # The first epoch's second minibatch has moved already.
    assert [row["loss/epochs"] for row in rows(tmp_path) if "loss/epochs" in row] == [1.0, 1.0]
    assert int(trainer.state.step) == 4


def test_one_env_one_row_one_minibatch(tmp_path: Path) -> None:
    """The advantage of one sample is left as it is."""
    config = ppo_config(5, learner=config_for("learner"), num_envs=1, time=1, mesh=config_for("mesh", data=1))
    trainer = train(config, tmp_path)
    assert int(trainer.state.step) == 5 and all_finite(trainer.state.params)


def test_rows_that_do_not_split_are_refused() -> None:
    config = ppo_config(learner=config_for("learner", minibatches=8), num_envs=11, time=12)
    with config.unlocked():
        config.mesh = config_for("mesh", data=1)
    with pytest.raises(ConfigError, match="132 samples a device do not split into 8 minibatches: 132 % 8 = 4"):
        check(config)


def test_single_steps_are_nothing_to_a_recurrent_agent() -> None:
    config = ppo_config(recurrent=True)
    config.loss.minibatch = "steps"
    with pytest.raises(ConfigError, match=r"set config\.loss\.minibatch = 'sequences'"):
        check(config)


@pytest.mark.parametrize("recurrent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, recurrent: bool) -> None:
    """Parameters, moments, counters, running statistics, env states and what the agent remembers."""
    learner = config_for("learner", epochs=2, minibatches=2, reward_scaling=0.9)
    config = ppo_config(6, recurrent, {"clip_final": 0.1, "target_kl": 0.05}, learner=learner)
    config.model.normalize_observations = True
    whole = train(config, tmp_path / "whole")
    stop(config, tmp_path / "part", 3)
    resumed = train(config, tmp_path / "part")
    assert set(whole.state.variables) == {STATISTICS, RETURNS, PER_ENV}
    assert_same(resumed.state, whole.state)
    assert_same(resumed.data, whole.data)


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False, True])
def test_sequences_learn_the_same_on_four_devices(tmp_path: Path, recurrent: bool) -> None:
    """One minibatch and one epoch, so that no shuffle differs: parameters agree."""
    found = []
    for data in (1, 4):
        config = ppo_config(2, recurrent, {"minibatch": "sequences"} if not recurrent else None)
        with config.unlocked():
            config.learner, config.mesh = config_for("learner"), config_for("mesh", data=data)
        found.append(jax.device_get(train(config, tmp_path / str(data)).state.params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *found)

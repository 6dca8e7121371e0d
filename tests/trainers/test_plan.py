"""Rules between fields, checked before anything compiles: what does not fit the devices or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flaxrl import ConfigError, config_for
from flaxrl.build import build
from flaxrl.trainers.plan import check
from tests.small_runs import host_config, small_config


def with_envs(num_envs: int, host: bool = False, **fields: Any) -> Any:
    """A run of that many envs on all four devices."""
    make = host_config if host else small_config
    config = make(1, mesh=config_for("mesh"), **fields)
    config.source.num_envs = num_envs
    return config


@pytest.mark.parametrize("host", [False, True])
def test_envs_must_split_over_devices(host: bool) -> None:
    with pytest.raises(ConfigError, match=r"6 envs do not split into 4 devices \(cpu\): 6 % 4 = 2; nearest: 4 or 8"):
        check(with_envs(6, host))
    plan = check(with_envs(8, host))
    assert plan.mesh.size == 4 and "T 4 x B 8 = 32 steps an update" in plan.lines()[1]


def test_minibatches_must_split_what_a_device_has() -> None:
    learner = config_for("learner", minibatches=3)
    with pytest.raises(ConfigError, match=r"2 sequences a device do not split into 3 minibatches: 2 % 3 = 2"):
        check(with_envs(8, learner=learner))
    steps = config_for("surrogate:Surrogate")
    with pytest.raises(ConfigError, match=r"8 samples a device do not split into 3 minibatches: 8 % 3 = 2; nearest: 6"):
        check(with_envs(8, learner=learner, loss=steps))
    check(with_envs(12, learner=learner, loss=steps))


def test_single_steps_are_nothing_to_a_recurrent_agent() -> None:
    with pytest.raises(ConfigError, match=r"Surrogate shuffles single steps, which a recurrent agent cannot"):
        check(with_envs(8, loss=config_for("surrogate:Surrogate"), core=config_for("gru")))


@pytest.mark.parametrize("value", [5.0, None])
def test_a_clip_of_scaled_rewards_needs_them_scaled(value: float | None) -> None:
    with pytest.raises(ConfigError, match=rf"reward_clip = {value} clips scaled rewards, .* set loss.max_abs_reward"):
        build(config_for("learner", reward_clip=value))
    assert build(config_for("learner", reward_clip=value, reward_scaling=0.9)).reward_clip == value


def test_a_target_kl_needs_epochs_to_end() -> None:
    loss = config_for("ppo", target_kl=0.1)
    with pytest.raises(ConfigError, match=r"PPO.target_kl = 0.1 ends .* learner.epochs = 1 leaves none; nearest: "):
        check(with_envs(8, loss=loss))
    check(with_envs(8, loss=loss, learner=config_for("learner", epochs=2)))

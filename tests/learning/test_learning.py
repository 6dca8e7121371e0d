"""Agents learn what they can, seconds each: scripted envs whose best return is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flaxrl
from flaxrl import config_for


def config(env: Any, source: Any, steps: int) -> Any:
    return flaxrl.run_config(
        seed=0,
        total_steps=steps,
        env=env,
        mesh=config_for("mesh", data=1),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(16,)),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("vtrace", discount=0.9, entropy_cost=0.003),
        optimizer=config_for("optimizer", learning_rate=2e-2),
        source=source,
        log=config_for("log", every=steps, writers=()),
        eval=config_for("eval", episodes=8),
        checkpoint=config_for("checkpoint", every=None),
    )


@pytest.mark.parametrize("time_limit", [False, True])
def test_named_action_is_learned_in_jax(tmp_path: Path, time_limit: bool) -> None:
    source = config_for("jax_rollout", num_envs=8, unroll_length=10, updates_per_call=10)
    env = config_for("scripted", episode_length=6, num_actions=4, time_limit=time_limit)
    assert flaxrl.Trainer(config(env, source, 16_000), tmp_path).run()["eval/return_mean"] == 6.0


def test_named_action_is_learned_with_actor_threads(tmp_path: Path) -> None:
    source = config_for("actor_threads", num_envs=8, unroll_length=10, threads=2)
    env = config_for("host_scripted", episode_length=6, num_actions=4)
    assert flaxrl.Trainer(config(env, source, 16_000), tmp_path).run()["eval/return_mean"] == 6.0

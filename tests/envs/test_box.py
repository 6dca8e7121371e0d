"""Continuous actions: the env gets them within its bounds, and what is stored stays as the policy drew it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxrl
from flaxrl import ArraySpec, Box, EnvSpec, JaxEnv, Trainer, config_for
from flaxrl.envs.fake import HostScripted
from flaxrl.envs.spec import Discrete, env_action
from flaxrl.losses.vtrace import VTrace
from flaxrl.models.heads import PolicyValue
from tests.small_runs import all_finite, host_config, rows, small_config

BOUNDS = {
    "bounded": ((-0.1, -0.2), (0.1, 0.2)),
    "unbounded": ((-np.inf, -np.inf), (np.inf, np.inf)),
    "half": ((-0.1, -np.inf), (np.inf, np.inf)),
}


class Reach(JaxEnv):
    """Pays 1 for an action within bounds, -100 for any other; an episode is 4 actions."""

    def __init__(self, bounds: str = "bounded") -> None:
        self.low, self.high = BOUNDS[bounds]
        self.spec = EnvSpec(observation=ArraySpec((1,)), action=Box(self.low, self.high))

    def reset(self, key: Any) -> Any:
        return jnp.int32(0), jnp.zeros(1), None

    def step(self, state: Any, action: Any, key: Any) -> Any:
        right = jnp.all((action >= jnp.asarray(self.low)) & (action <= jnp.asarray(self.high)))
        state = state + 1
        return state, jnp.zeros(1), jnp.where(right, 1.0, -100.0), state >= 4, jnp.bool_(False), None


class HostReach(HostScripted):
    """A scripted env on the host whose actions are a bounded vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec = EnvSpec(observation=self.spec.observation, action=Box(*BOUNDS["bounded"]))

    def step(self, action: np.ndarray) -> Any:
        low, high = (np.asarray(x, np.float32) for x in BOUNDS["bounded"])
        assert action.dtype == np.float32 and (low <= action).all() and (action <= high).all(), action
        return super().step(np.zeros(len(action), np.int32))


class Watched(VTrace):
    """V-trace that also tells how many stored actions lie outside the bounds."""

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Any, rngs: Any) -> Any:
        value, out = super().__call__(unroll, params, target_params, batch, rngs)
        outside = jnp.any(jnp.abs(batch.action) > jnp.asarray([0.1, 0.2]).reshape(1, 1, 2), axis=-1)
        metric = flaxrl.masked_mean(outside.astype(jnp.float32), batch.mask)
        return value, out.replace(metrics=out.metrics | {"outside": metric})


class Far(PolicyValue):
    """A policy whose mean starts at 20."""

    def __call__(self, x: Any, action_mask: Any, value_features: Any = None) -> Any:
        output = super().__call__(x, action_mask, value_features)
        params = output.policy_params
        return output.replace(policy_params=params | {"mean": params["mean"] + 20.0})


PPO = "ppo"
VTRACE = f"{__name__}:Watched"


def with_head(config: Any, loss: str = VTRACE, **head: Any) -> Any:
    with config.unlocked():
        config.model.head = config_for(head.pop("name", "policy_value"), **head)
        config.loss = config_for(loss)
    return config


def run(config: Any, workdir: Path) -> dict[str, Any]:
    trainer = Trainer(config, workdir)
    trainer.run()
    assert all_finite(trainer.state.params)
    return rows(workdir)[-1]


@pytest.mark.parametrize("xp", [np, jnp])
def test_env_action(xp):
    spec = Box((-1.0, -np.inf, 0.0), (1.0, np.inf, np.inf))
    action = xp.asarray([[3.7, 9.0, -2.0], [-5.0, -9.0, 2.0]], dtype=np.float32)
    clipped = env_action(spec, action)
    assert clipped.tolist() == [[1, 9, 0], [-1, -9, 2]] and clipped.dtype == np.float32
    assert isinstance(clipped, type(action)) and float(action[0, 0]) == np.float32(3.7)
    assert env_action(spec, action[0]).tolist() == [1, 9, 0]
    free = Box((-np.inf,), (np.inf,))
    assert env_action(free, action) is action and env_action(Discrete(3), action) is action


def test_an_env_in_jax_gets_clipped_actions_and_the_loss_the_drawn_ones(tmp_path: Path) -> None:
    config = with_head(small_config(2, config_for(f"{__name__}:Reach")))
    row = run(config, tmp_path)
    assert row["eval/return_mean"] == 4.0 and row["actor/episode_return"] == 4.0
    assert row["loss/outside"] > 0.5  # of a standard normal: 0.99
    # one step on its own policy: the importance ratio is 1
    assert abs(row["loss/rho_mean"] - 1) < 1e-5 and row["loss/kl_behaviour"] < 1e-9
    agent = flaxrl.load(tmp_path)
    drawn = np.stack([agent.act(np.zeros(1), jax.random.key(i)) for i in range(20)])
    assert (
        drawn.dtype == np.float32
        and (np.abs(drawn) <= np.asarray([0.1, 0.2], np.float32)).all()
        and np.ptp(drawn) > 0.1
    )


def test_a_host_env_gets_clipped_actions(tmp_path: Path) -> None:
    row = run(with_head(host_config(2, env=config_for(f"{__name__}:HostReach"))), tmp_path)
    assert row["eval/episodes"] == 2 and row["loss/outside"] > 0.5


def ratio_is_one(row: dict[str, Any], loss: str) -> bool:
    """Whether the policy that learns is the one that acted, in the last update's first minibatch."""
    return row["loss/first_ratio_deviation"] <= 1e-5 if loss == PPO else abs(row["loss/rho_mean"] - 1) < 1e-5


@pytest.mark.parametrize(
    ("bounds", "distribution", "loss"),
    [
        ("unbounded", "gaussian", PPO),
        ("unbounded", "tanh_gaussian", VTRACE),
        pytest.param("half", "gaussian", VTRACE, marks=pytest.mark.slow),
        pytest.param("half", "tanh_gaussian", PPO, marks=pytest.mark.slow),
    ],
)
def test_infinite_bounds_are_never_scaled_with(bounds: str, distribution: str, loss: str, tmp_path: Path) -> None:
    env = config_for(f"{__name__}:Reach", bounds=bounds)
    row = run(with_head(small_config(3, env), loss, distribution=distribution), tmp_path)
    assert row["actor/episode_return"] == 4.0 and row["loss/skipped"] == 0
    assert ratio_is_one(row, loss)


@pytest.mark.parametrize("loss", [VTRACE, PPO])
def test_a_saturated_policy_learns_without_nan(tmp_path: Path, loss: str) -> None:
    config = small_config(3, config_for(f"{__name__}:Reach"))
    row = run(with_head(config, loss, name=f"{__name__}:Far", distribution="tanh_gaussian"), tmp_path)
    assert row["actor/episode_return"] == 4.0 and row["loss/skipped"] == 0
    assert ratio_is_one(row, loss)


def test_a_distribution_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    config = with_head(small_config(2, config_for(f"{__name__}:Reach")), distribution="categorical")
    with pytest.raises(flaxrl.ConfigError, match=r"model.head: PolicyValue.distribution = 'categorical' does not"):
        Trainer(config, tmp_path).run()

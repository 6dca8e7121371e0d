"""Evaluation: whole episodes, raw scores, greedy, on envs of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl import ConfigError, EnvSpec, HostEnv, config_for
from flaxrl.build import build
from flaxrl.configuration import EvalSettings
from flaxrl.envs.spec import Discrete
from flaxrl.trainers import evaluate as evaluate_module
from flaxrl.trainers.evaluate import Evaluator, evaluate_workdir
from flaxrl.trainers.setup import act_context, build_agent, env_factory, example_input
from tests.small_runs import every, host_config, rows, small_config, train

CONFIGS = {"jax": small_config, "host": host_config}


def constant_agent(config: Any, favourite: int) -> tuple[Any, Any, EnvSpec]:
    """The config's agent with parameters that prefer one action a little, whatever it sees."""
    spec = env_factory(config)(1).spec
    agent = build_agent(config, spec)
    context = act_context(jnp.zeros(1), 0.0)
    variables = agent.init(jax.random.key(0), example_input(agent, spec), None, context, method="act")
    params = jax.tree.map(jnp.zeros_like, variables["params"])
    assert isinstance(spec.action, Discrete)
    params["head"]["policy"]["bias"] = 0.1 * jax.nn.one_hot(favourite, spec.action.n)
    return agent, params, spec


@pytest.mark.parametrize(("kind", "env"), [("jax", "scripted"), ("host", "host_scripted")])
def test_greedy_takes_the_preferred_action_and_sampling_does_not(kind: str, env: str) -> None:
    """Six steps of a cycle of three: any constant action is right exactly twice."""
    config = CONFIGS[kind](env=config_for(env, episode_length=6))
    agent, params, _ = constant_agent(config, 1)
    greedy = Evaluator(env_factory(config), agent, EvalSettings(episodes=8))
    metrics = greedy.run(params, {})
    assert metrics == {
        "eval/return_mean": 2.0,
        "eval/return_std": 0.0,
        "eval/return_min": 2.0,
        "eval/return_max": 2.0,
        "eval/length_mean": 6.0,
        "eval/episodes": 8,
        "eval/unfinished": 0,
    }
    sampling = Evaluator(env_factory(config), agent, EvalSettings(episodes=8, greedy=False))
    sampled = sampling.run(params, {})
    assert sampled["eval/return_std"] > 0
    assert sampling.run(params, {}) == sampled  # the same envs and keys at each call
    other = Evaluator(env_factory(config), agent, EvalSettings(episodes=8, greedy=False, seed=7)).run(params, {})
    assert other != sampled


@pytest.mark.parametrize(("kind", "env"), [("jax", "scripted"), ("host", "host_scripted")])
def test_endless_episodes_are_cut_and_counted(monkeypatch: pytest.MonkeyPatch, kind: str, env: str) -> None:
    monkeypatch.setattr(evaluate_module, "MAX_STEPS", 4)
    config = CONFIGS[kind](env=config_for(env, episode_length=6))
    agent, params, _ = constant_agent(config, 1)
    metrics = Evaluator(env_factory(config), agent, EvalSettings(episodes=3)).run(params, {})
    assert metrics["eval/unfinished"] == 3 and metrics["eval/length_mean"] == 4.0


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_scores_are_raw_although_the_loss_clips(tmp_path: Path, kind: str) -> None:
    """An episode of 0 + 1 + 2 + 3 + 4 = 10; clipped to 1 it would be 4."""
    loss = config_for("vtrace", max_abs_reward=1.0)
    env = {"jax": config_for("counting", episode_length=5), "host": config_for("host_scripted", reward="count")}[kind]
    train(CONFIGS[kind](2, env=env, loss=loss), tmp_path)
    (line,) = rows(tmp_path)
    assert line["eval/return_mean"] == 10.0
    assert line["actor/episode_return"] == 10.0


class Witness(HostEnv):
    """Passes on to another env; all of its kind are listed."""

    made: list[Witness] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, inner: HostEnv):
        self.inner, self.spec, self.num_envs, self.seeds, self.closed = inner, inner.spec, inner.num_envs, [], False
        Witness.made.append(self)

    def reset(self, seed: int) -> Any:
        self.seeds.append(seed)
        return self.inner.reset(seed)

    def step(self, action: np.ndarray) -> Any:
        return self.inner.step(action)

    def close(self) -> None:
        self.closed = True


def test_envs_are_its_own_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Witness.made.clear()

    def factory(config: Any) -> Any:
        return lambda num_envs: Witness(build(config.env, num_envs=num_envs))

    monkeypatch.setattr("flaxrl.trainers.trainer.env_factory", factory)
    train(host_config(4, **every(2)), tmp_path)
    played = [env for env in Witness.made if env.seeds]
    assert [len(env.seeds) for env in played] == [1, 2]  # the actor's is never reset by the two evaluations
    assert played[0].seeds[0] != played[1].seeds[0] and played[1].seeds[0] == played[1].seeds[1]
    assert all(env.closed for env in Witness.made)


def test_a_folder_is_evaluated_as_the_run_did(tmp_path: Path) -> None:
    last = train(small_config(2), tmp_path).last_metrics
    metrics = evaluate_workdir(tmp_path)
    assert metrics.pop("step") == 16
    assert metrics == {k: v for k, v in last.items() if k.startswith("eval/")}
    more = small_config(2, eval=config_for("eval", episodes=5))
    assert evaluate_workdir(tmp_path, more)["eval/episodes"] == 5
    assert evaluate_workdir(tmp_path, which="best")["step"] == 16
    with pytest.raises(ConfigError, match="holds no run"):
        evaluate_workdir(tmp_path / "nowhere")

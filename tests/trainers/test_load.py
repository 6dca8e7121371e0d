"""flaxrl.load: a trained agent answers observations as it did in its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxrl
from flaxrl import ConfigError, config_for
from flaxrl.types import FIRST, MID, AgentInput
from tests.small_runs import assert_same, host_config, small_config, train

SEQUENCE = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an agent with memory that also sees its last action and reward; two updates long."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config(2, core=config_for("lstm", features=4))
    with config.unlocked():
        config.model.use_last_action = config.model.use_last_reward = True
    train(config, folder)
    return folder


@pytest.fixture
def agent(workdir: Path) -> flaxrl.LoadedAgent:
    """The agent, its policy made decided so that different states give different actions."""
    loaded = flaxrl.load(workdir)
    loaded.params = jax.tree.map(lambda x: 3.0 * x, loaded.params)
    loaded.params["head"]["policy"]["kernel"] *= 100.0
    return loaded


def unrolled(agent: flaxrl.LoadedAgent, actions: list[int], rewards: np.ndarray) -> list[int]:
    """Greedy actions of the model unrolled over SEQUENCE as a loss does, after the given actions and rewards."""
    inputs = AgentInput(
        observation=jnp.asarray(SEQUENCE)[:, None],
        step_type=jnp.asarray([FIRST] + [MID] * (len(SEQUENCE) - 1), jnp.int8)[:, None],
        last_action=jnp.asarray([0, *actions[:-1]], jnp.int32)[:, None],
        last_reward=jnp.asarray(rewards)[:, None],
    )
    output = agent.agent.apply({"params": agent.params}, inputs, None)[0]
    return np.argmax(output.policy_params[:, 0], axis=-1).tolist()


def test_it_remembers_as_the_unrolled_model_does(agent: flaxrl.LoadedAgent) -> None:
    rewards = np.linspace(-1, 1, len(SEQUENCE), dtype=np.float32)
    rewards[0] = 0.0
    played = [int(agent.act(x, reward=r)) for x, r in zip(SEQUENCE, rewards, strict=True)]
    assert len(set(played)) > 1 and played == unrolled(agent, played, rewards)
    forgetful = []
    for x, r in zip(SEQUENCE, rewards, strict=True):
        agent.reset()
        forgetful.append(int(agent.act(x, reward=r)))
    assert forgetful != played
    agent.reset()
    assert [int(agent.act(x, reward=r)) for x, r in zip(SEQUENCE, rewards, strict=True)] == played


def test_single_and_batch(agent: flaxrl.LoadedAgent) -> None:
    single = agent.act(SEQUENCE[0])
    assert np.shape(single) == () and single.dtype == np.int32
    batch = agent.act(SEQUENCE)  # another batch size: a new episode for each
    assert batch.shape == (12,) and batch[0] == single
    second = agent.act(SEQUENCE[::-1])
    agent.reset()
    assert agent.act(SEQUENCE).tolist() == batch.tolist() and agent.act(SEQUENCE[::-1]).tolist() == second.tolist()


def test_a_key_samples(workdir: Path) -> None:
    agent = flaxrl.load(workdir)  # hardly trained: nearly uniform
    many = np.repeat(SEQUENCE[:1], 60, axis=0)
    greedy = agent.act(many)
    agent.reset()
    first, again, other = [], [], []
    for seed, out in ((0, first), (0, again), (1, other)):
        agent.reset()
        out.extend(agent.act(many, jax.random.key(seed)).tolist())
    assert len(set(greedy.tolist())) == 1
    assert set(first) == {0, 1, 2} and first == again != other


@pytest.mark.parametrize(
    "observation",
    [np.zeros(5), np.zeros((2, 5)), np.zeros((1, 1, 4)), [0.0, 0.0, 0.0, 0.0], {"a": np.zeros(4), "b": 0}],
)
def test_wrong_shape_is_named(agent: flaxrl.LoadedAgent, observation: Any) -> None:
    with pytest.raises(ValueError, match=r"observation has shape .*; the env's is \[\(4,\)\] \(or a batch of it\)"):
        agent.act(observation)


def test_illegal_actions_are_not_taken(tmp_path: Path) -> None:
    train(host_config(1, env=config_for("host_scripted", mask="partial")), tmp_path)
    agent = flaxrl.load(tmp_path)
    for legal in range(3):
        assert agent.act(SEQUENCE[0], action_mask=np.arange(3) == legal) == legal
    masks = np.eye(3, dtype=bool)
    assert agent.act(SEQUENCE[:3], jax.random.key(0), action_mask=masks).tolist() == [0, 1, 2]


def test_the_run_may_have_had_other_devices(workdir: Path, tmp_path: Path) -> None:
    """A run's mesh and batch need not fit the machine that only acts."""
    shutil.copytree(workdir, tmp_path / "copy")
    stored = json.loads((tmp_path / "copy" / "config.json").read_text())
    stored["mesh"]["data"] = 64
    (tmp_path / "copy" / "config.json").write_text(json.dumps(stored))
    agent = flaxrl.load(tmp_path / "copy")
    assert agent.act(SEQUENCE[0]) == flaxrl.load(workdir).act(SEQUENCE[0])
    assert agent.step == 16 and agent.config.mesh.data == 64


def test_observations_are_normalised_as_in_the_run(tmp_path: Path) -> None:
    """With the run's statistics, as a checkpoint keeps them, and whatever else `variables` hold."""
    config = small_config(2, learner=config_for("learner", reward_scaling=0.9))
    config.model.normalize_observations = True
    trainer = train(config, tmp_path)
    agent = flaxrl.load(tmp_path)
    assert_same(agent.variables, trainer.state.variables)
    moments = agent.variables["statistics"]["normalizer"]["observation"]
    agent.params["head"]["policy"]["kernel"] *= 1000.0
    plain = agent.agent.clone(normalize_observations=False)
    mean, deviation = np.asarray(moments.mean)[None], np.sqrt(moments.variance)[None]
    inputs = AgentInput((SEQUENCE - mean) / deviation, np.full(12, FIRST, np.int8))

    def greedy(model: Any, variables: Any, inputs: AgentInput) -> Any:
        return model.apply(variables, inputs, None, None, method="act")[0].tolist()

    expected = greedy(plain, {"params": agent.params}, inputs)
    assert agent.act(SEQUENCE).tolist() == expected
    assert expected != greedy(plain, {"params": agent.params}, inputs.replace(observation=SEQUENCE))


def test_nothing_to_load_is_one_clear_line(workdir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        flaxrl.load(tmp_path)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="holds no latest checkpoint; train first"):
        flaxrl.load(tmp_path)
    with pytest.raises(ConfigError, match="'bets' is unknown; did you mean 'best'"):
        flaxrl.load(workdir, "bets")

"""bfloat16: products in half the bits, everything that is kept, added up or told in float32."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_setups import VECTOR, host, key, learner, made_up_trajectory, make_agent, mesh_of

from flaxrl import ConfigError, config_for, load
from flaxrl.envs.base import JaxEnv
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.models.agent import Agent
from flaxrl.models.cores import GRU, LSTM, FeedForward
from flaxrl.models.heads import PolicyValue
from flaxrl.models.policies import Sampled
from flaxrl.models.torsos import MLP
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import example_input
from tests.small_runs import rows, small_config, train

ADAM = Optimizer("adam", learning_rate=1e-3, max_grad_norm=1.0)
PICTURES = EnvSpec(ArraySpec((36, 36, 2), np.uint8), Discrete(3))
TORSOS = {
    "mlp": (VECTOR, {"hidden": (8,), "layer_norm": True}),
    "nature_cnn": (PICTURES, {"hidden": 8}),
    "impala_resnet": (PICTURES, {"channels": (4, 4), "blocks": 1, "hidden": 8}),
    "minatar_cnn": (PICTURES, {"features": 4, "hidden": 8}),
}
CORES = ["feed_forward", "lstm", "gru"]


def agent_of(torso: str, core: str, dtype: str | None = "bfloat16") -> tuple[Any, EnvSpec]:
    spec, fields = TORSOS[torso]
    return make_agent(spec, core, torso=config_for(torso, **fields), torso_chunk=None, dtype=dtype), spec


def floats(tree: Any) -> set[str]:
    """Types of the numbers with a fraction in a tree."""
    return {x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


# -- one switch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("torso", "core"), [(t, "feed_forward") for t in TORSOS] + [("mlp", c) for c in CORES[1:]])
def test_everything_but_the_products_is_float32(torso: str, core: str) -> None:
    """Parameters, outputs, recurrent state, loss, metrics, gradients' effect and optimizer state; and it learns."""
    agent, spec = agent_of(torso, core)
    state, update, mesh = learner(agent, spec, ADAM)
    batch = made_up_trajectory(agent, spec, mesh, 3, 2)
    variables = {"params": state.params}
    carry = jax.eval_shape(lambda v: agent.apply(v, 2, method="initial_carry"), variables)
    forward = jax.jit(lambda v, c: agent.apply(v, batch.inputs, c))
    assert floats(jax.eval_shape(forward, variables, carry)) == {"float32"}
    assert floats(carry) <= {"float32"} and floats(state) == {"float32"}
    new, out = jax.eval_shape(update, state, batch, key())
    assert floats((new, out)) == {"float32"}
    # What goes to the compiler: all products of torso and core in bfloat16, the head's two in float32.
    products = re.findall(
        r"dot_general.* : \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)", forward.lower(variables, carry).as_text()
    )
    wide = [p for p in products if p != ("bf16", "bf16")]
    assert wide == [("f32", "f32")] * 2 and len(products) > 2


@pytest.mark.parametrize("core", CORES)
def test_values_are_near_those_of_float32(core: str) -> None:
    """The same parameters serve both; bfloat16 has 8 bits, so products differ by some 0.4 %."""
    (half, spec), (full, _) = agent_of("minatar_cnn", core), agent_of("minatar_cnn", core, None)
    state = learner(full, spec, ADAM)[0]
    batch = made_up_trajectory(full, spec, mesh_of()[1], 6, 4)
    carry = jax.tree.map(lambda x: x[0], batch.carry)
    a, b = (jax.jit(agent.apply)({"params": state.params}, batch.inputs, carry) for agent in (half, full))
    for x, y in zip(jax.tree.leaves(host(a)), jax.tree.leaves(host(b)), strict=True):
        assert 1e-5 < np.abs(x - y).max() < 0.03 * max(1.0, np.abs(y).max())


def test_compiled_text_has_bfloat16() -> None:
    agent, spec = agent_of("mlp", "lstm")
    variables = {"params": learner(agent, spec, ADAM)[0].params}
    batch = made_up_trajectory(agent, spec, mesh_of()[1], 3, 2)
    carry = jax.tree.map(lambda x: x[0], batch.carry)
    text = jax.jit(agent.apply).lower(variables, batch.inputs, carry).compile().as_text()
    assert text is not None and "bf16[" in text


def test_the_switch_of_the_agent_and_those_of_its_parts() -> None:
    def parts(dtype: str | None, torso: str = "float32", core: Any = FeedForward()) -> list[Any]:  # noqa: B008
        agent = Agent(MLP((4,), dtype=torso), core, PolicyValue(Discrete(2)), Sampled(), Discrete(2), dtype=dtype)
        return [getattr(m, "dtype", None) for m in (agent.torso, agent.core)]

    assert parts(None) == ["float32", None] and parts(None, "bfloat16", LSTM(3)) == ["bfloat16", "float32"]
    assert parts("bfloat16") == ["bfloat16", None] and parts("bfloat16", core=GRU(3)) == ["bfloat16", "bfloat16"]
    assert parts("float32", "bfloat16", GRU(3, dtype="bfloat16")) == ["float32", "float32"]
    with pytest.raises(ConfigError, match=r"Agent.dtype = 'bfloat' is unknown; did you mean 'bfloat16'"):
        parts("bfloat")
    with pytest.raises(ConfigError, match=r"LSTM.dtype = 'float8' is unknown"):
        LSTM(3, dtype="float8")


class Plain(nn.Module):
    """A torso that knows no dtype."""

    @nn.compact
    def __call__(self, observation: Any) -> Any:
        return nn.Dense(4)(observation)


def test_a_part_that_cannot_follow_the_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: Agent.dtype = 'bfloat16' needs .*: Plain has no field dtype"):
        make_agent(torso=config_for(f"{__name__}:Plain"), dtype="bfloat16")
    make_agent(torso=config_for(f"{__name__}:Plain"))


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class Ones(JaxEnv):
    """Every action pays 1; an episode has `episode_length` of them."""

    episode_length: int = 5000

    def __post_init__(self) -> None:
        self.spec = EnvSpec(ArraySpec((1,)), Discrete(2))

    def reset(self, key: Any) -> Any:
        return jnp.zeros((), jnp.int32), jnp.zeros((1,)), None

    def step(self, state: Any, action: Any, key: Any) -> Any:
        state, never = state + 1, jnp.zeros((), bool)
        return state, jnp.ones((1,)), jnp.ones(()), state >= self.episode_length, never, None


def half(config: Any) -> Any:
    """`config` with the switch on."""
    config.model.dtype = "bfloat16"
    return config


@pytest.mark.parametrize("core", ["feed_forward", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_long_episode_is_added_up_exactly(tmp_path: Path, core: str) -> None:
    """In bfloat16 256 + 1 is 256."""
    source = config_for("jax_rollout", num_envs=2, unroll_length=501, updates_per_call=10)
    env = config_for(f"{__name__}:Ones")
    config = half(small_config(1, env, source, config_for(core)))
    config.total_steps = 10 * 501 * 2
    train(config, tmp_path)
    (line,) = rows(tmp_path)
    assert line["actor/episode_return"] == line["eval/return_mean"] == 5000.0
    assert line["actor/episode_length"] == line["eval/length_mean"] == 5000.0
    assert line["time/frames"] == 10020 and line["loss/skipped"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("core", ["feed_forward", "lstm"])
def test_it_learns(tmp_path: Path, core: str) -> None:
    """Chance is 5/3, the best is 5."""
    source = config_for("jax_rollout", num_envs=16, unroll_length=12, updates_per_call=20)
    config = half(
        small_config(1, source=source, core=config_for(core), optimizer=config_for("optimizer", learning_rate=0.02))
    )
    config.total_steps, config.eval.episodes = 200 * 16 * 12, 20
    trainer = train(config, tmp_path)
    assert rows(tmp_path)[-1]["eval/return_mean"] > 4.5
    assert floats(trainer.state) == {"float32"} and floats(trainer.data) == {"float32"}
    agent = load(tmp_path)
    assert agent.agent.torso.dtype == "bfloat16" and floats(agent.params) == {"float32"}
    assert int(agent.act(host(example_input(agent.agent, agent.spec).observation)[0])) in range(3)

"""Gradient accumulation: the numbers of the whole batch, in the memory of a piece."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_setups import IMAGE, VECTOR, assert_close, host, key, learner, made_up_trajectory, make_agent, mesh_of
from surrogate import Spread, Surrogate

from flaxrl import ConfigError, config_for
from flaxrl.losses.vtrace import VTrace
from flaxrl.trainers.accumulation import in_pieces, pieces_of
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.plan import check
from flaxrl.trainers.sharding import bind_unroll
from tests.small_runs import small_config, train

SGD, ADAM = Optimizer("sgd", learning_rate=1.0), Optimizer("adam", learning_rate=1e-2)
TIME, BATCH = 6, 16

# name: (loss, core, settings); masks are uneven over envs and shards, and LSTMs are reset within the unroll
LEARNERS = {
    "vtrace-lstm": (VTrace(), "lstm", {}),
    "vtrace-lstm-minibatches": (VTrace(), "lstm", {"epochs": 2, "minibatches": 2}),
    "normalised-steps": (Surrogate(), "feed_forward", {"epochs": 2, "minibatches": 3}),
    "spread-gru": (Spread(), "gru", {"minibatches": 2}),
}


def learned(name: str, optimizer: Optimizer, devices: int, accumulation: int, updates: int = 1) -> Any:
    """Parameters, metrics and priorities after `updates` updates."""
    loss, core, settings = LEARNERS[name]
    agent = make_agent(core=core)
    settings = settings | {"loss": loss, "accumulation": accumulation}
    state, update, mesh = learner(agent, VECTOR, optimizer, data=devices, **settings)
    out = None
    for i in range(updates):
        state, out = update(state, made_up_trajectory(agent, VECTOR, mesh, TIME, BATCH, seed=i), key(i))
    assert out is not None and float(out.metrics["loss/skipped"][0]) == 0
    return host((state.params, out.metrics, out.priorities))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "lstm" in n else ()) for n in LEARNERS])
def test_pieces_change_neither_gradient_nor_metrics(name: str, devices: int) -> None:
    """With SGD of rate 1 the parameters show the gradient."""
    whole, pieces = (learned(name, SGD, devices, n) for n in (1, 2))
    assert_close(whole, pieces, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_pieces_do_not_change_training(devices: int) -> None:
    whole, pieces = (learned("vtrace-lstm", ADAM, devices, n, updates=3) for n in (1, 4))
    assert_close(whole, pieces, 1e-5)


def test_rows_come_back_in_order_and_streams_differ_by_piece() -> None:
    class Echo:
        def apply(self, variables: Any, inputs: Any, carry: Any, rngs: Any) -> Any:
            noise = jax.random.uniform(rngs["noise"], inputs.step_type.shape)
            return ({"rows": inputs.observation[..., 0], "carry": carry[0][None, :, 0], "noise": noise},)

    agent, mesh = make_agent(), mesh_of(2)[1]
    batch = made_up_trajectory(agent, VECTOR, mesh, TIME, BATCH)
    unroll = bind_unroll(Echo(), {}, mesh, pieces=4)
    out: Any = host(jax.jit(lambda k: unroll({}, batch, {"noise": k}))(key()))
    np.testing.assert_array_equal(out["rows"], host(batch.inputs.observation)[..., 0])
    np.testing.assert_array_equal(out["carry"], host(batch.carry[0])[..., 0])
    # 2 devices x 4 pieces of 2 rows, each with noise of its own
    assert len({x.tobytes() for x in out["noise"].T}) == BATCH


def test_number_of_pieces() -> None:
    # At least as many as asked for, of equal size: preparation may see rows that they don't divide.
    asked = {(12, 1): 1, (12, 4): 4, (12, 5): 6, (12, 7): 12, (12, 50): 12, (7, 2): 7, (1, 3): 1}
    assert {given: pieces_of(*given) for given in asked} == asked


def test_one_piece_is_no_loop() -> None:
    x = jnp.ones((TIME, BATCH))
    text = str(jax.make_jaxpr(lambda x: in_pieces(lambda i, c, r: i, 1, x, (), {}))(x))
    assert "scan" not in text and "scan" in str(jax.make_jaxpr(lambda x: in_pieces(lambda i, c, r: i, 2, x, (), {}))(x))


def test_memory_falls() -> None:
    """What the compiler allocates for intermediates; without chunks in the torso, which save memory of their own."""
    torso = config_for("minatar_cnn", features=16, hidden=16)
    agent = make_agent(IMAGE, "feed_forward", torso=torso, torso_chunk=0)

    def temporary(accumulation: int) -> float:
        state, update, mesh = learner(agent, IMAGE, SGD, accumulation=accumulation)
        batch = made_up_trajectory(agent, IMAGE, mesh, 16, 32)
        analysis = update.lower(state, batch, key()).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole, pieces = temporary(1), temporary(8)
    assert pieces < whole / 4


class Dropped(nn.Module):
    """A torso with dropout, on while a key is given."""

    @nn.compact
    def __call__(self, observation: Any) -> Any:
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.Dense(8)(observation))


def test_dropout_reaches_the_pieces() -> None:
    agent = make_agent(core="feed_forward", torso=config_for(f"{__name__}:Dropped"))
    state, update, mesh = learner(agent, VECTOR, SGD, accumulation=2)
    batch = made_up_trajectory(agent, VECTOR, mesh, TIME, BATCH)
    before = host(state)
    one, other = (host(update(jax.tree.map(jnp.array, before), batch, key(i))[0].params) for i in (0, 1))
    assert not np.array_equal(one["torso"]["Dense_0"]["kernel"], other["torso"]["Dense_0"]["kernel"])


# -- the config --------------------------------------------------------------------------------------------------------


def config(accumulation: int, minibatches: int = 2, **fields: Any) -> Any:
    made = small_config(1, **fields)
    made.source.num_envs = 12
    made.learner.minibatches, made.learner.accumulation = minibatches, accumulation
    return made


def test_pieces_must_divide_a_minibatch_on_a_device() -> None:
    check(config(3))
    message = r"6 sequences of a minibatch on a device do not split into 4 pieces \(learner.accumulation\): 6 % 4 = 2"
    with pytest.raises(ConfigError, match=message):
        check(config(4))
    steps = {"loss": config_for("surrogate:Surrogate"), "mesh": config_for("mesh", data=2)}
    check(config(4, 3, **steps))  # 4 x 12 rows on 2 devices, 3 minibatches: 8
    with pytest.raises(ConfigError, match=r"8 samples of a minibatch on a device do not split into 3 pieces"):
        check(config(3, 3, **steps))
    with pytest.raises(ConfigError, match=r"config.learner: LearnerSettings.accumulation = 0 must be > 0"):
        check(config(0))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["vtrace", "surrogate:Surrogate"])
def test_a_run_in_pieces(tmp_path: Any, loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Acting, preparing and learning together give the parameters of the run that is not split."""
    fields = {"loss": config_for(loss), "mesh": config_for("mesh", data=2)}
    whole, pieces = (train(config(n, 1, **fields), tmp_path / str(n)) for n in (1, 2))
    assert "1 minibatch(es) in 2 pieces" in capsys.readouterr().out
    assert_close(host(whole.state.params), host(pieces.state.params), 1e-5)

"""A torso a leaf: which one, in which order, fed with what."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.build import build, config_for
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.models.dict_torso import DictTorso
from flaxrl.models.torsos import MLP, MinAtarCNN, NatureCNN
from flaxrl.trainers.setup import example_input

KEY = jax.random.key(0)


def observation(rows: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "pos": rng.normal(size=(rows, 2)).astype(np.float32),
        "img": rng.integers(0, 256, (rows, 8, 8, 1), np.uint8),
    }


def test_the_order_of_keys_has_no_part_in_it():
    torso, seen = DictTorso(), observation()
    y, variables = torso.init_with_output(KEY, seen)
    turned = dict(reversed(seen.items()))
    assert list(turned) != list(seen)
    np.testing.assert_array_equal(torso.apply(variables, turned), y)
    assert set(variables["params"]) == {"torso_img", "torso_pos"}


def test_features_are_those_of_each_leaf_in_sorted_order():
    """The image is read as bytes, as by a torso of its own, whatever lies beside it."""
    seen = observation()
    y, variables = DictTorso().init_with_output(KEY, seen)
    image: Any = MinAtarCNN().apply({"params": variables["params"]["torso_img"]}, seen["img"])
    position: Any = MLP().apply({"params": variables["params"]["torso_pos"]}, seen["pos"])
    np.testing.assert_allclose(y, jnp.concatenate([image, position], axis=-1), rtol=1e-6)
    scaled: Any = MinAtarCNN().apply({"params": variables["params"]["torso_img"]}, seen["img"].astype(np.float32) / 255)
    np.testing.assert_allclose(image, scaled, rtol=1e-4, atol=1e-4)


def test_torsos_by_name_and_nested_leaves():
    block = config_for(
        "dict_torso",
        torsos={"pos": config_for("mlp", hidden=(5,)), "inner/b": config_for("mlp", hidden=(4,))},
    )
    torso = build(block, "config.model.torso")
    assert hash(torso) == hash(build(block))
    seen = {"pos": observation()["pos"], "inner": {"b": np.ones((3, 1), np.float32), "a": np.ones((3,), np.int32)}}
    y, variables = torso.init_with_output(KEY, seen)
    assert y.shape == (3, 64 + 4 + 5)
    assert set(variables["params"]) == {"torso_inner_a", "torso_inner_b", "torso_pos"}
    assert variables["params"]["torso_pos"]["Dense_0"]["kernel"].shape == (2, 5)


def test_torsos_by_kind():
    shapes = {
        "atari": jax.ShapeDtypeStruct((1, 84, 84, 4), jnp.uint8),
        "grid": jax.ShapeDtypeStruct((1, 10, 10, 4), jnp.bool_),
        "tiny": jax.ShapeDtypeStruct((1, 2, 2, 1), jnp.uint8),
        "field": jax.ShapeDtypeStruct((1, 10, 10, 4), jnp.float32),
    }
    params = jax.eval_shape(DictTorso().init, KEY, shapes)["params"]
    assert [sum(k.startswith("Conv") for k in params[f"torso_{n}"]) for n in shapes] == [3, 1, 0, 0]


def test_rows_at_once_on_a_cpu():
    torso = DictTorso({"b": MLP(), "c": NatureCNN()})
    vector, image = np.zeros((1, 2), np.float32), np.zeros((1, 40, 40, 1), np.uint8)
    assert torso.cpu_chunk({"b": vector, "c": image}) == NatureCNN.cpu_chunk
    assert DictTorso().cpu_chunk({"a": image, "b": vector}) == NatureCNN.cpu_chunk
    assert DictTorso().cpu_chunk({"b": vector}) is None


def test_in_an_agent_with_one_dtype():
    spec = EnvSpec({"pos": ArraySpec((2,)), "img": ArraySpec((40, 40, 1), np.uint8)}, Discrete(3))
    agent = build(
        config_for(
            "agent",
            torso=config_for("dict_torso", torsos={"pos": config_for("mlp", hidden=(5,))}),
            value_torso=config_for("dict_torso"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
            dtype="bfloat16",
        ),
        action_spec=spec.action,
    )
    rows = jax.tree.map(lambda x: x[None], example_input(agent, spec, 40))
    variables = jax.eval_shape(agent.init, KEY, rows, None)
    output, _ = jax.eval_shape(agent.apply, variables, rows, None)
    assert output.value.dtype == jnp.float32 and output.value.shape == (1, 40)
    assert "bf16" in str(jax.make_jaxpr(agent.apply)(variables, rows, None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DictTorso({"imgs": MLP()}).init(KEY, observation()),
            "DictTorso.torsos: the observation has no leaf 'imgs'; did you mean 'img'",
        ),
        (lambda: DictTorso(dtype="float8"), "DictTorso.dtype = 'float8' is unknown"),
        (
            lambda: DictTorso().init(KEY, {"a": {"b": np.ones((1, 2))}, "a_b": np.ones((1, 2))}),
            r"DictTorso: .* \['a'\]\['b'\] and \['a_b'\] would both be named 'torso_a_b'; rename a key",
        ),
        (
            lambda: DictTorso({"a/b": MLP()}).cpu_chunk({"a": {"b": np.ones((1, 2))}, "a/b": np.ones((1, 2))}),
            r"\['a'\]\['b'\] and \['a/b'\] would both be named",
        ),
        (
            lambda: build(config_for("dict_torso", torsos={"pos": config_for("mlp", hidden=(0,))}), "config.torso"),
            r"config.torso.torsos.pos: MLP.hidden = \(0,\) must be >= 1",
        ),
        (
            lambda: build(config_for("dict_torso", torsos={"pos": "mlp"}), "config.torso"),
            "config.torso.torsos.pos must be a block with a name",
        ),
    ],
)
def test_one_line_for_a_mistake(make, message):
    with pytest.raises(ConfigError, match=message):
        make()

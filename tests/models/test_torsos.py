"""Torsos: shapes, layouts, pixel scaling, parameters; and chunks of rows against the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from flaxrl import build
from flaxrl.errors import ConfigError
from flaxrl.models import torsos
from flaxrl.models.chunking import apply_in_chunks

KEY = jax.random.key(0)


class Parent(nn.Module):
    """Holds a torso as an agent does."""

    torso: nn.Module
    chunk: int | None = None
    recompute: bool = False

    def __call__(self, observation: Any) -> Any:
        return apply_in_chunks(self.torso, observation, self.chunk, self.recompute)


class Noisy(nn.Module):
    """A small torso with dropout and parameters."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(64)(nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x))


def images(rows: int, channels: int = 4, size: int = 84) -> Any:
    return np.random.default_rng(0).integers(0, 256, (rows, size, size, channels), np.uint8)


def init(module: nn.Module, x: Any) -> Any:
    """Variables of the module's shapes: compiling the initialisers would take longer than the test."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(module.init, KEY, x)
    return jax.tree.map(lambda s: (rng.normal(size=s.shape) / np.sqrt(np.prod(s.shape[:-1]))).astype(s.dtype), shapes)


def apply(module: nn.Module, variables: Any, x: Any, **kwargs: Any) -> Any:
    return jax.jit(module.apply)(variables, x, **kwargs)


def step(module: nn.Module, variables: Any, x: Any) -> Any:
    """Features and gradients in one compilation."""

    def loss(variables: Any) -> Any:
        y: Any = module.apply(variables, x)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)
    return y, gradients


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, float(np.max(np.abs(b)))))

    jax.tree.map(check, a, b)


SMALL = {
    "nature": (torsos.NatureCNN(hidden=16), images(5, size=36)),
    "resnet": (torsos.ImpalaResNet(channels=(4,), blocks=1, hidden=16), images(5, size=11)),
    "minatar": (torsos.MinAtarCNN(hidden=16), images(5, channels=6, size=10) > 127),
    "mlp": (torsos.MLP(layer_norm=True), {"a": images(5, size=3), "b": np.ones((5, 2), np.float32)}),
}


@pytest.mark.parametrize("name", SMALL)
def test_features_are_float32_in_any_dtype(name: str) -> None:
    module, x = SMALL[name]
    variables = init(module, x)
    y = apply(module, variables, x)
    assert y.ndim == 2 and y.shape[0] == 5 and y.dtype == jnp.float32
    rounded, gradients = step(module.clone(dtype="bfloat16"), variables, x)
    assert rounded.dtype == jnp.float32
    close(rounded, y, 0.05)
    assert not np.array_equal(rounded, y)  # it did compute in less
    assert all(g.dtype == jnp.float32 and np.all(np.isfinite(g)) for g in jax.tree.leaves((variables, gradients)))


def test_shapes_of_the_published_networks() -> None:
    def count(module: nn.Module, shape: tuple[int, ...], dtype: Any = jnp.uint8) -> int:
        variables = jax.eval_shape(module.init, KEY, jax.ShapeDtypeStruct(shape, dtype))
        return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(variables))

    # 8*8*4*32+32 + 4*4*32*64+64 + 3*3*64*64+64 + 7*7*64*512+512
    assert count(torsos.NatureCNN(), (1, 84, 84, 4)) == 8224 + 32832 + 36928 + 1606144
    # sections (4 -> 16), (16 -> 32), (32 -> 32) with 4 more convolutions each, then 11*11*32 -> 256
    sections = (592 + 4 * 2320) + (4640 + 4 * 9248) + 5 * 9248
    assert count(torsos.ImpalaResNet(), (1, 84, 84, 4)) == sections + 11 * 11 * 32 * 256 + 256
    # 3*3*4*16+16 + 8*8*16*128+128
    assert count(torsos.MinAtarCNN(), (1, 10, 10, 4), jnp.bool_) == 592 + 131200
    assert count(torsos.MLP(), (1, 4), jnp.float32) == 5 * 64 + 65 * 64


@pytest.mark.parametrize("name", ["nature", "resnet"])
def test_channels_first_is_the_transposed_observation(name: str) -> None:
    module, x = SMALL[name]
    first, turned = module.clone(channels_first=True), x.transpose(0, 3, 1, 2)
    variables = init(first, turned)
    assert jax.eval_shape(module.init, KEY, x) == jax.eval_shape(first.init, KEY, turned)
    close(step(first, variables, turned), step(module, variables, x))


def test_bytes_alone_are_scaled() -> None:
    assert torsos.pixel_scale(jnp.zeros(1, jnp.uint8)) == 1 / 255
    assert torsos.pixel_scale(jnp.zeros(1)) == torsos.pixel_scale(jnp.zeros(1, bool)) == 1


@pytest.mark.parametrize(
    ("x", "flat"),
    [
        (np.array([0, 51, 255], np.uint8), [[0], [0.2], [1]]),
        (np.array([[[True], [False]]]), [[1, 0]]),
        (np.array([[[-7, 300]]], np.int32), [[-7, 300]]),
        (np.array([[2.5, -1.0]]), [[2.5, -1]]),
    ],
    ids=["bytes", "bool", "int", "float"],
)
def test_an_mlp_flattens_any_array(x: Any, flat: Any) -> None:
    if x.dtype == np.float64:
        x = x.astype(np.float32)
    y: Any = torsos.MLP(()).apply({}, x)
    np.testing.assert_allclose(y, flat, rtol=1e-6)
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constant_images(dtype: str) -> None:
    module = torsos.NatureCNN(hidden=16, dtype=dtype)
    x = np.stack([np.full((36, 36, 4), v, np.uint8) for v in (0, 127, 254, 255)])
    variables = init(module, x)
    variables = jax.tree.map(lambda p: p if p.ndim > 1 else np.zeros_like(p), variables)
    y = np.asarray(apply(module, variables, x))
    assert np.all(np.isfinite(y)) and np.all(y[0] == 0.0)
    as_floats = (x.astype(np.float32) / np.float32(255)).astype(np.float32)
    close(y, apply(module, variables, as_floats), 1e-6 if dtype == "float32" else 0.02)
    if dtype == "float32":
        assert np.any(y[2] != y[3])


@pytest.mark.parametrize("name", ["nature", "resnet"])
def test_a_cpu_sees_no_convolution(name: str) -> None:
    module, x = SMALL[name]
    parent = Parent(module, 2)
    variables = jax.eval_shape(parent.init, KEY, x)
    update = jax.jit(jax.value_and_grad(lambda v: jnp.sum(jnp.asarray(parent.apply(v, x)))))
    text = update.trace(variables).lower(lowering_platforms=("cpu",)).as_text()
    assert "convolution" not in text and "reduce_window" not in text and "select_and_scatter" not in text


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_chunks_change_nothing(name: str, recompute: bool) -> None:
    module, x = SMALL[name]
    # 5 rows: 2 pieces of 3 or 3 pieces of 2, each with a row to spare, or 5 pieces of 1.
    whole, parts = Parent(module), Parent(module, {"nature": 3, "resnet": 2, "minatar": 1, "mlp": 4}[name], recompute)
    variables = init(whole, x)
    assert jax.eval_shape(parts.init, KEY, x) == jax.eval_shape(whole.init, KEY, x)
    assert "while" in jax.jit(parts.apply).lower(variables, x).as_text()
    close(step(parts, variables, x), step(whole, variables, x))


def test_chunks_save_memory_and_recomputation_more() -> None:
    module = torsos.NatureCNN(hidden=16)
    x = images(64, size=36)
    variables = init(module, x[:1])

    def temporary(parent: nn.Module) -> int:
        step = jax.jit(jax.grad(lambda v: jnp.sum(jnp.asarray(parent.apply(v, x)))))
        memory: Any = step.lower({"params": {"torso": variables["params"]}}).compile().memory_analysis()
        return memory.temp_size_in_bytes

    whole, kept, again = (temporary(p) for p in (Parent(module), Parent(module, 4), Parent(module, 4, True)))
    assert again < 0.75 * kept and kept < 0.75 * whole


def test_chunks_leave_the_initialiser_alone() -> None:
    module, x = SMALL["mlp"]
    whole, parts = jax.jit(Parent(module).init)(KEY, x), jax.jit(Parent(module, 2).init)(KEY, x)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_one_piece_is_the_torso_itself() -> None:
    module, x = SMALL["minatar"]
    parent = Parent(module, 5)
    assert "while" not in jax.jit(parent.apply).lower(init(parent, x), x).as_text()
    with pytest.raises(ConfigError, match="chunk = 0 must be >= 1"):
        init(Parent(module, 0), x)


def test_chunks_draw_different_dropout() -> None:
    parent, x = Parent(Noisy(), 2), np.ones((4, 32), np.float32)
    variables = init(parent, x)
    rngs = {"dropout": jax.random.key(1)}
    y = np.asarray(apply(parent, variables, x, rngs=rngs))
    assert not np.allclose(y[:2], y[2:])
    np.testing.assert_array_equal(apply(parent, variables, x, rngs=rngs), y)
    assert np.allclose(np.ptp(np.asarray(apply(parent, variables, x)), axis=0), 0.0)


def test_chunks_inside_shard_map_reduce_gradients_once() -> None:
    devices = jax.devices()[:4]
    assert len(devices) > 1, "tests run with several virtual CPU devices"
    module, _ = SMALL["minatar"]
    x = images(5 * len(devices), channels=6, size=10) > 127
    parent = Parent(module, 2)
    variables = init(parent, x)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    rows, replicated = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(parent.apply, mesh=mesh, in_specs=(replicated, rows), out_specs=rows)
    update = jax.jit(jax.grad(lambda v, x: jnp.sum(jnp.sin(jnp.asarray(sharded(v, x)))))).lower(variables, x).compile()
    close(update(variables, x), step(Parent(module), variables, x)[1])
    text = str(update.as_text())
    before_entry, entry = text[: text.index("ENTRY")], text[text.index("ENTRY") :]
    assert "while(" in entry and entry.count(" all-reduce(") + entry.count(" all-reduce-start(") == 1
    assert " all-reduce" not in before_entry and "all-gather" not in text  # not one a chunk


def test_chunks_under_vmap_over_seeds() -> None:
    module, x = SMALL["minatar"]
    variables = jax.tree.map(lambda p: np.stack([p, 2 * p]), init(Parent(module), x))

    def per_seed(parent: nn.Module) -> Any:
        f = jax.grad(lambda v: jnp.sum(jnp.sin(parent.apply(v, x))))  # type: ignore[arg-type]
        return jax.jit(jax.vmap(f))(variables)

    close(per_seed(Parent(module, 2)), per_seed(Parent(module)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torsos.MLP(activation="rleu"), "MLP.activation = 'rleu' is unknown; did you mean 'relu'?"),
        (lambda: torsos.MLP(hidden=(64, 0)), r"MLP.hidden = \(64, 0\) must be >= 1"),
        (lambda: torsos.NatureCNN(dtype="float23"), "NatureCNN.dtype = 'float23' is unknown; did you mean 'float32'?"),
        (lambda: torsos.NatureCNN(kernel_scale=0.0), "NatureCNN.kernel_scale = 0.0 must be > 0"),
        (lambda: torsos.ImpalaResNet(channels=()), "ImpalaResNet.channels = "),
        (lambda: torsos.MinAtarCNN(kernel_init="ortogonal"), "MinAtarCNN.kernel_init = 'ortogonal' is unknown"),
    ],
)
def test_bad_fields(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_images_of_the_wrong_rank() -> None:
    with pytest.raises(
        ConfigError, match=r"NatureCNN takes images \[N, H, W, C\]; the observation's shape is \(5, 4\)"
    ):
        torsos.NatureCNN().init(KEY, np.zeros((5, 4), np.float32))


@pytest.mark.parametrize("name", ["mlp", "nature_cnn", "impala_resnet", "minatar_cnn"])
def test_torsos_are_built_from_config(name: str) -> None:
    block = build.config_for(name)
    assert isinstance(build.build(block), build.resolve(name))
    assert "dtype" in block and "kernel_scale" in block

"""Conv and max_pool_half against flax's own: values, gradients, parameters, and what they lower to."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from flaxrl.errors import ConfigError
from flaxrl.models.convolution import Conv, max_pool_half

# height, width, channels, features, kernel, stride, padding
SHAPES = {
    "nature_1": (84, 84, 4, 32, 8, 4, "VALID"),
    "nature_2": (20, 20, 32, 64, 4, 2, "VALID"),
    "nature_3": (9, 9, 64, 64, 3, 1, "VALID"),
    "resnet_1": (84, 84, 4, 16, 3, 1, "SAME"),
    "resnet_odd": (11, 11, 32, 32, 3, 1, "SAME"),
    "minatar": (10, 10, 6, 16, 3, 1, "VALID"),
    "rest": (23, 21, 3, 5, 4, 2, "VALID"),
    "stride_beside_kernel": (9, 12, 3, 5, 3, 2, "SAME"),
    "blocks_same": (10, 13, 3, 5, 4, 2, "SAME"),
    "tuples": (12, 9, 3, 5, (4, 3), (2, 1), "SAME"),
    "pointwise": (5, 6, 3, 7, 1, 1, "SAME"),
}


def twins(case: str, **kwargs: Any) -> tuple[nn.Module, nn.Module, Any, Any]:
    """Ours, flax's, their common variables, and an input."""
    h, w, c, features, kernel, stride, padding = SHAPES[case]
    size = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    ours = Conv(features, kernel, stride, padding, bias_init=nn.initializers.normal(), **kwargs)
    flax = nn.Conv(features, size, stride, padding, bias_init=nn.initializers.normal())
    x = jax.random.normal(jax.random.key(1), (2, h, w, c))
    return ours, flax, jax.jit(flax.init)(jax.random.key(0), x), x


def gradients(module: nn.Module, variables: Any, x: Any) -> Any:
    return jax.jit(jax.grad(loss(module), argnums=(0, 1)))(variables, x)


def loss(module: nn.Module) -> Any:
    def f(variables: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(module.apply(variables, x)))  # type: ignore[arg-type]

    return f


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    def check(a: Any, b: Any) -> None:
        scale = max(1.0, float(jnp.max(jnp.abs(b))))
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)

    jax.tree.map(check, a, b)


SLOW = ("nature_2", "nature_3", "resnet_odd", "blocks_same", "pointwise")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in SHAPES])
def test_values_and_gradients_are_those_of_flax(case: str) -> None:
    ours, flax, variables, x = twins(case)
    close(jax.jit(ours.apply)(variables, x), jax.jit(flax.apply)(variables, x))
    close(gradients(ours, variables, x), gradients(flax, variables, x))


@pytest.mark.parametrize("case", ["nature_1", "resnet_1", "stride_beside_kernel", "tuples"])
def test_channels_first_is_the_transposed_input(case: str) -> None:
    last, _, variables, x = twins(case)
    first = twins(case, channels_first=True)[0]
    turned = x.transpose(0, 3, 1, 2)
    close(jax.jit(first.apply)(variables, turned), jax.jit(last.apply)(variables, x))  # another order of sums
    want = gradients(last, variables, x)
    close(gradients(first, variables, turned), (want[0], want[1].transpose(0, 3, 1, 2)))


@pytest.mark.parametrize("case", SHAPES)
def test_parameters_are_those_of_flax(case: str) -> None:
    ours, _, variables, x = twins(case)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ours.init)(jax.random.key(0), x), variables)


@pytest.mark.parametrize("case", ["nature_2", "resnet_odd"])
def test_under_transformations(case: str) -> None:
    ours, flax, variables, x = twins(case)
    several = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), variables)
    xs = jnp.stack([x, x + 1])

    def total(module: nn.Module, loop: Any) -> Any:
        def f(variables: Any) -> Any:
            return jnp.sum(loop(jax.checkpoint(lambda x: loss(module)(variables, x)), xs))

        return jax.jit(jax.vmap(jax.grad(f)))(several)

    close(total(ours, jax.lax.map), total(flax, lambda f, xs: f(xs[0]) + f(xs[1])))


@pytest.mark.parametrize("case", ["nature_1", "nature_3", "resnet_odd", "stride_beside_kernel"])
def test_a_cpu_sees_no_convolution_and_others_do(case: str) -> None:
    ours, _, variables, x = twins(case)
    traced = jax.jit(jax.value_and_grad(loss(ours), argnums=(0, 1))).trace(variables, x)
    on_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "convolution" not in on_cpu
    assert "dot_general" in on_cpu
    elsewhere = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert elsewhere.count("stablehlo.convolution") >= 3  # forward, by kernel, by input
    assert "dot_general" not in elsewhere


@pytest.mark.parametrize("kind", ["uint8", "bool", "int32", "float32"])
@pytest.mark.parametrize("case", ["nature_1", "resnet_1", "rest"])
def test_scaled_inputs_of_any_type(case: str, kind: str) -> None:
    """Equal to flax on the scaled floats, in value and gradient by kernel and bias."""
    _, flax, variables, x = twins(case)
    ours = twins(case, input_scale=1 / 255)[0]
    x = np.random.default_rng(0).integers(0, 2 if kind == "bool" else 256, x.shape).astype(kind)
    scaled = x.astype(np.float32) / np.float32(255)
    close(jax.jit(ours.apply)(variables, x), jax.jit(flax.apply)(variables, scaled))

    def by_kernel(module: nn.Module, x: Any) -> Any:
        return jax.jit(jax.grad(loss(module)))(variables, x)

    close(by_kernel(ours, x), by_kernel(flax, scaled))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_bytes_in_half_precision(dtype: str) -> None:
    """As near to float32 as flax's own: a sum over bytes that are not scaled yet would overflow."""
    ours, flax, variables, x = twins("nature_1", dtype=dtype, input_scale=1 / 255)
    x = np.random.default_rng(0).integers(0, 256, (64, *x.shape[1:]), np.uint8)

    def by_kernel(module: nn.Module, x: Any) -> Any:
        return jax.jit(jax.grad(lambda v: jnp.mean(jnp.asarray(module.apply(v, x), jnp.float32)) * 50))(variables)

    got = by_kernel(ours, x)
    close(got, by_kernel(flax, x.astype(np.float32) / 255), {"float16": 2e-3, "bfloat16": 2e-2}[dtype])


def test_bytes_are_gathered_as_bytes() -> None:
    ours, _, variables, x = twins("nature_1", channels_first=True)
    trace = jax.jit(jax.grad(loss(ours))).trace(variables, x.transpose(0, 3, 1, 2).astype(np.uint8))
    text = trace.lower(lowering_platforms=("cpu",)).as_text()
    # Four bytes move as one word, and only whole cells become floats, in the forward and in the backward pass.
    assert len(re.findall(r"stablehlo.transpose.*tensor<2x21x21x4x4xui32>", text)) == 2
    conversions = re.findall(r"stablehlo.convert.*\(tensor<([x\d]+)xui8>\) -> tensor<[x\d]+xf32>", text)
    assert conversions == ["2x21x21x64"] * 2


def test_an_unused_input_gradient_is_not_computed() -> None:
    ours, _, variables, x = twins("nature_1")

    def products(argnums: Any) -> int:
        f = jax.jit(jax.grad(loss(ours), argnums=argnums))
        text = str(f.lower(variables, x).compile().as_text())
        return text.count(" dot(") + text.count("__onednn$matmul") + text.count("fusion_kind=dot")

    assert products(0) == products((0, 1)) - 1


def test_bfloat16_is_finite_and_near() -> None:
    ours, flax, variables, x = twins("nature_2", dtype="bfloat16")
    y: Any = jax.jit(ours.apply)(variables, x)
    assert y.dtype == jnp.bfloat16
    close(y.astype(jnp.float32), jax.jit(flax.apply)(variables, x), 0.05)
    got = jax.tree.leaves(gradients(ours, variables, x))
    assert all(g.dtype == jnp.float32 and np.all(np.isfinite(g)) for g in got)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": 0}, "Conv.features = 0 must be >= 1"),
        ({"strides": (1, 0)}, r"Conv.strides = \(1, 0\) must be >= 1"),
        ({"padding": "same"}, "Conv.padding = 'same' is unknown; did you mean 'SAME'?"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Conv(**fields)


def test_bad_inputs() -> None:
    with pytest.raises(ConfigError, match=r"shape \(10, 10, 3\)"):
        Conv().init(jax.random.key(0), jnp.zeros((10, 10, 3)))
    with pytest.raises(ConfigError, match=r"needs images as large; they are \(4, 9\)"):
        Conv(kernel_size=8, padding="VALID").init(jax.random.key(0), jnp.zeros((1, 4, 9, 3)))


def flax_pool(x: Any) -> Any:
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


@pytest.mark.parametrize("size", [(84, 84), (21, 21), (42, 11), (1, 2)])
def test_max_pool(size: tuple[int, int]) -> None:
    @jax.jit
    def check(x: Any, g: Any) -> Any:
        want, pull = jax.vjp(flax_pool, x)
        got, ours = jax.vjp(max_pool_half, x)
        return (got, ours(g)[0]), (want, pull(g)[0])

    h, w = size
    g = jax.random.normal(jax.random.key(1), (2, -(-h // 2), -(-w // 2), 3))
    for levels in (3, 1000):  # with three levels nearly every window has ties
        x = jax.random.randint(jax.random.key(0), (2, h, w, 3), -levels, 0).astype(jnp.float32)
        got, want = check(x, g)
        np.testing.assert_array_equal(got[0], want[0])
        close(got[1], want[1], 1e-6)


def test_max_pool_by_hand() -> None:
    # Width 4, stride 2, padded by one on the right: windows {0,1,2} and {2,3}. Ties go to the first.
    x = jnp.array([5.0, 5.0, 7.0, 7.0]).reshape(1, 1, 4, 1)
    y, g = jax.jit(lambda x: (max_pool_half(x), jax.grad(lambda x: max_pool_half(x).sum())(x)))(x)
    assert y.ravel().tolist() == [7.0, 7.0]
    assert g.ravel().tolist() == [0.0, 0.0, 2.0, 0.0]


def test_max_pool_lets_nan_through() -> None:
    pool = jax.jit(max_pool_half)
    for i in range(3):  # windows of rows and columns {0,1} and {1,2}
        x = np.ones((1, 3, 3, 1), np.float32)
        x[0, i, i] = np.nan
        y = np.asarray(pool(x))[0, :, :, 0]
        assert np.isnan(y[1, 1]) == (i > 0)
        assert np.isnan(y[0, 0]) == (i < 2)


def test_max_pool_gradient_has_no_select_and_scatter() -> None:
    x = jnp.ones((1, 8, 8, 2))
    text = jax.jit(jax.grad(lambda x: max_pool_half(x).sum())).lower(x).as_text()
    assert "select_and_scatter" not in text and "reduce_window" not in text

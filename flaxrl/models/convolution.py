"""Convolution and max pooling with the parameters and values of flax's, and lowerings that are fast on a CPU.

XLA's CPU backend runs a convolution inside `scan` or `while` about ten times slower than outside, and its convolution
gradients fall behind a matrix product's severalfold. So on a CPU, forward and backward are matrix products
(`matmul_convolution`); other platforms keep `lax.conv_general_dilated`. The platform is chosen when the program is
lowered, so one traced function serves both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from flaxrl import checks
from flaxrl.errors import ConfigError
from flaxrl.models import matmul_convolution
from flaxrl.models.dense import add_bias
from flaxrl.models.matmul_convolution import Geometry, as_numbers
from flaxrl.types import Array, PyTree


def vary_like(tree: PyTree, like: PyTree) -> PyTree:
    """Marks `tree` as varying over the mesh axes that `like` varies over; does nothing outside `jax.shard_map`.

    Inside a `shard_map`, mixing replicated parameters with sharded data makes their gradient a sum over the shards,
    taken where the two meet. Where they meet inside a loop body, that is one collective an iteration. Called before
    the loop, this moves it to one after the loop.

    Args:
        tree: arrays, typically parameters.
        like: arrays, typically the batch.
    """
    axes: frozenset[str] = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(like)))

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _varying_axes(x: Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    # Older versions of jax call it `vma`.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _lax_forward(x: Array, kernel: Array, geometry: Geometry) -> Array:
    layout = ("NCHW" if geometry.channels_first else "NHWC", "HWIO", "NHWC")
    x = as_numbers(x, kernel.dtype, geometry)
    return lax.conv_general_dilated(x, kernel, geometry.strides, geometry.pads, dimension_numbers=layout)


def _lax_kernel_gradient(x: Array, kernel: Array, g: Array, geometry: Geometry) -> Array:
    return jax.vjp(lambda k: _lax_forward(x, k, geometry), kernel)[1](g)[0]


def _matmul_backward(x: Array, kernel: Array, g: Array, geometry: Geometry) -> tuple[Array, Array]:
    by_input = matmul_convolution.input_gradient(x, kernel, g, geometry)
    return by_input, matmul_convolution.kernel_gradient(x, kernel, g, geometry)


def _lax_backward(x: Array, kernel: Array, g: Array, geometry: Geometry) -> tuple[Array, Array]:
    return jax.vjp(lambda x, k: _lax_forward(x, k, geometry), x, kernel)[1](g)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """The convolution; its own derivative rule keeps (x, kernel) alone, and not each platform's intermediates."""
    return lax.platform_dependent(
        x,
        kernel,
        cpu=functools.partial(matmul_convolution.forward, geometry=geometry),
        default=functools.partial(_lax_forward, geometry=geometry),
    )


def _convolve_forward(x: Array, kernel: Array, geometry: Geometry) -> tuple[Array, tuple[Array, Array]]:
    return _convolve(x, kernel, geometry), (x, kernel)


def _convolve_backward(geometry: Geometry, residuals: tuple[Array, Array], g: Array) -> tuple[Any, Array]:
    x, _ = residuals
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        dkernel = lax.platform_dependent(
            *residuals,
            g,
            cpu=functools.partial(matmul_convolution.kernel_gradient, geometry=geometry),
            default=functools.partial(_lax_kernel_gradient, geometry=geometry),
        )
        return np.zeros(x.shape, jax.dtypes.float0), dkernel
    return lax.platform_dependent(
        *residuals,
        g,
        cpu=functools.partial(_matmul_backward, geometry=geometry),
        default=functools.partial(_lax_backward, geometry=geometry),
    )


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


class Conv(nn.Module):
    """A 2-D convolution: `nn.Conv` with the same parameters (`kernel` `[kh, kw, C, F]`, `bias` `[F]`) and values.

    Values and reverse-mode gradients equal `nn.Conv`'s to rounding, under jit, vmap, grad, scan, checkpoint and
    shard_map. Forward-mode derivatives (`jax.jvp`) are not defined.

    Attributes:
        features: output channels F.
        kernel_size: height and width, or one number for both.
        strides: vertical and horizontal, or one number for both.
        padding: 'SAME' or 'VALID'.
        use_bias: adds a bias per channel.
        channels_first: the input is `[N, C, H, W]`; the output is channels-last all the same.
        input_scale: multiplies the input; images of bytes stay bytes until their numbers are needed.
        dtype: computation dtype; parameters are float32.
        kernel_init: initialiser of the kernel.
        bias_init: initialiser of the bias.
    """

    features: int = 32
    kernel_size: int | tuple[int, int] = 3
    strides: int | tuple[int, int] = 1
    padding: str = "SAME"
    use_bias: bool = True
    channels_first: bool = False
    input_scale: float = 1.0
    dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Array] = nn.initializers.zeros_init()

    def __post_init__(self) -> None:
        checks.in_range(self, "features", "kernel_size", "strides", low=1)
        checks.choice(self, "padding", ("SAME", "VALID"))
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Convolves images.

        Args:
            x: float, or bool or uint8, `[N, H, W, C]`; `[N, C, H, W]` if `channels_first`.

        Returns:
            `[N, H', W', F]` of the computation dtype.

        Raises:
            ConfigError: where the input is not four-dimensional, or smaller than an unpadded kernel.
        """
        if x.ndim != 4:
            raise ConfigError(f"{type(self).__name__} takes images [N, H, W, C]; the input has shape {x.shape}")
        size, strides = _pair(self.kernel_size), _pair(self.strides)
        image = x.shape[2:] if self.channels_first else x.shape[1:3]
        channels = x.shape[1 if self.channels_first else 3]
        if self.padding == "VALID" and any(n < k for n, k in zip(image, size, strict=True)):
            raise ConfigError(f"an unpadded {size[0]}x{size[1]} convolution needs images as large; they are {image}")
        (top, bottom), (left, right) = lax.padtype_to_pads(image, size, strides, self.padding)
        small = x.dtype in (jnp.bool_, jnp.uint8)
        geometry = Geometry(
            strides, ((top, bottom), (left, right)), self.channels_first, self.input_scale if small else 1.0
        )
        kernel = self.param("kernel", self.kernel_init, (*size, channels, self.features), jnp.float32)
        kernel = kernel.astype(self.dtype)
        if not small:
            x = (x if self.input_scale == 1 else x * self.input_scale).astype(self.dtype)
        # custom_vjp wants the gradient to vary over the same mesh axes as its argument.
        y = _convolve(vary_like(x, kernel), vary_like(kernel, x), geometry)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
            y = add_bias(y, bias)
        return y


def max_pool_half(x: Array) -> Array:
    """Max pooling, window 3x3, stride 2, padding 'SAME': `nn.max_pool(x, (3, 3), (2, 2), 'SAME')`, differentiable fast.

    The gradient of `lax.reduce_window` is slow on a CPU; maxima of shifted slices are fast everywhere. Among equal
    values the gradient goes to the first in row-major order, as with `nn.max_pool`. NaN wins over every number.

    Args:
        x: float `[N, H, W, C]`.

    Returns:
        `[N, ceil(H / 2), ceil(W / 2), C]`.
    """
    # Left to right within each row, then top to bottom: so the first of equals is also the first in row-major order.
    return _halve(_halve(x, axis=2), axis=1)


def _halve(x: Array, axis: int) -> Array:
    """Maximum over windows of 3 with stride 2 along one axis, padded as 'SAME'."""
    n = x.shape[axis]
    ((low, _),) = lax.padtype_to_pads((n,), (3,), (2,), "SAME")
    out = -(-n // 2)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (low, 2 * (out + 1) - n - low)
    # Pairs instead of strided slices: their gradient is a plain pad.
    pairs = jnp.pad(x, pads, constant_values=-jnp.inf).reshape(*x.shape[:axis], out + 1, 2, *x.shape[axis + 1 :])
    first, second = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    left, right = (lax.slice_in_dim(first, i, i + out, axis=axis) for i in (0, 1))
    return _larger(_larger(left, lax.slice_in_dim(second, 0, out, axis=axis)), right)


def _larger(a: Array, b: Array) -> Array:
    """The larger of the two; `a` of equals, where `jnp.maximum` would split the gradient; NaN if one is."""
    return jnp.where((b > a) | jnp.isnan(b), b, a)

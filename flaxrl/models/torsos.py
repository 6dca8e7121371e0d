"""Torsos: observations `[N, ...]` of merged time and batch -> features `[N, F]`, float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxrl import checks
from flaxrl.errors import ConfigError
from flaxrl.models.convolution import Conv, max_pool_half
from flaxrl.models.dense import Dense
from flaxrl.types import Array, PyTree

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "elu": nn.elu,
    "gelu": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": jnp.tanh,
}
"""Names that a config may give as `activation`."""

INITIALIZERS: dict[str, Callable[[float], Callable[..., Array]]] = {
    "glorot_uniform": lambda scale: nn.initializers.variance_scaling(scale**2, "fan_avg", "uniform"),
    "lecun_normal": lambda scale: nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal"),
    "orthogonal": nn.initializers.orthogonal,
}
"""Names that a config may give as `kernel_init`; each takes a scale that multiplies the standard deviation."""

DTYPES = ("float32", "bfloat16", "float16")
"""Computation dtypes; parameters and features are float32 whatever is chosen."""

SQRT_2 = 2.0**0.5


def _check(torso: nn.Module) -> None:
    """Checks the fields that torsos have in common, as far as this one has them."""
    checks.choice(torso, "dtype", DTYPES)
    checks.choice(torso, "kernel_init", INITIALIZERS)
    checks.positive(torso, "kernel_scale")


def computing_in(module: Any, dtype: str, owner: str) -> Any:
    """A torso or core that computes in `dtype`.

    Args:
        module: the torso or core.
        dtype: one of DTYPES.
        owner: whose field `dtype` says so, for the message.

    Raises:
        ConfigError: the module has no field `dtype`.
    """
    if not hasattr(module, "dtype"):
        raise ConfigError(
            f"{owner}.dtype = {dtype!r} needs torsos and cores that take it: {type(module).__name__} has no field dtype"
        )
    return module if module.dtype == dtype else module.clone(dtype=dtype)


def pixel_scale(image: Array) -> float:
    """What a network multiplies an image with: 1 / 255 for uint8, 1 for anything else."""
    return 1 / 255 if image.dtype == jnp.uint8 else 1.0


def _flat(x: Array) -> Array:
    """float32 `[N, F]` of one leaf `[N, ...]`."""
    x, scale = x.reshape(x.shape[0], -1), pixel_scale(x)
    x = x.astype(jnp.float32)
    return x if scale == 1 else x * scale


def _image_rank(torso: nn.Module, observation: Array) -> None:
    if isinstance(observation, dict | tuple | list) or observation.ndim != 4:
        shape = jax.tree.map(jnp.shape, observation)
        layout = "[N, C, H, W]" if getattr(torso, "channels_first", False) else "[N, H, W, C]"
        raise ConfigError(f"{type(torso).__name__} takes images {layout}; the observation's shape is {shape}")


class MLP(nn.Module):
    """Dense layers over a flattened observation; a tree's leaves are flattened and joined in order of their names.

    Bytes (uint8) are scaled to [0, 1]; bool, integers and floats are taken as they are.

    Attributes:
        hidden: sizes of the layers; empty passes the flat observation on.
        activation: after every layer; one of ACTIVATIONS.
        kernel_init: initialiser of the kernels; one of INITIALIZERS.
        kernel_scale: its scale.
        layer_norm: normalises before each activation.
        dtype: computation dtype.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    kernel_init: str = "orthogonal"
    kernel_scale: float = SQRT_2
    layer_norm: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check(self)
        checks.in_range(self, "hidden", low=1)
        checks.choice(self, "activation", ACTIVATIONS)
        super().__post_init__()

    @nn.compact
    def __call__(self, observation: PyTree) -> Array:
        """Features `[N, hidden[-1]]` of a tree of arrays `[N, ...]`."""
        leaves = [_flat(x) for x in jax.tree.leaves(observation)]
        x = jnp.concatenate(leaves, axis=-1) if len(leaves) > 1 else leaves[0]
        init = INITIALIZERS[self.kernel_init](self.kernel_scale)
        for size in self.hidden:
            x = Dense(size, kernel_init=init, dtype=self.dtype)(x)
            if self.layer_norm:
                x = nn.LayerNorm(dtype=self.dtype)(x)
            x = ACTIVATIONS[self.activation](x)
        return x.astype(jnp.float32)


class NatureCNN(nn.Module):
    """The convolutional network of Mnih et al. (2015), "Human-level control through deep reinforcement learning".

    Convolutions 32 8x8/4, 64 4x4/2 and 64 3x3/1 without padding, then a dense layer, each followed by relu.

    Attributes:
        channels_first: observations are `[N, C, H, W]`, as ale_py's vector env gives them.
        hidden: size of the dense layer.
        kernel_init: initialiser of the kernels; one of INITIALIZERS.
        kernel_scale: its scale.
        dtype: computation dtype.
    """

    channels_first: bool = False
    hidden: int = 512
    kernel_init: str = "orthogonal"
    kernel_scale: float = SQRT_2
    dtype: str = "float32"

    cpu_chunk: ClassVar[int] = 32
    """Rows taken at once on a CPU, so that they stay in its cache; see `apply_in_chunks`."""

    def __post_init__(self) -> None:
        _check(self)
        checks.in_range(self, "hidden", low=1)
        super().__post_init__()

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, hidden]` of images `[N, H, W, C]`, uint8 (scaled to [0, 1]) or float (used as they are)."""
        _image_rank(self, observation)
        init = INITIALIZERS[self.kernel_init](self.kernel_scale)
        x, scale = observation, pixel_scale(observation)
        for i, (features, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            x = Conv(
                features,
                size,
                stride,
                "VALID",
                channels_first=self.channels_first and i == 0,
                input_scale=1.0 if i else scale,
                kernel_init=init,
                dtype=self.dtype,
            )(x)
            x = nn.relu(x)
        x = nn.relu(Dense(self.hidden, kernel_init=init, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        return x.astype(jnp.float32)


class ImpalaResNet(nn.Module):
    """The deep residual torso of Espeholt et al. (2018), "IMPALA", figure 3.

    For each number of channels: convolution 3x3, max pooling 3x3/2, then residual blocks (relu, convolution, relu,
    convolution, sum); at the end relu, a dense layer and relu.

    Attributes:
        channels: channels of the sections; each section halves height and width.
        blocks: residual blocks a section.
        hidden: size of the dense layer.
        channels_first: observations are `[N, C, H, W]`.
        kernel_init: initialiser of the kernels; one of INITIALIZERS.
        kernel_scale: its scale.
        dtype: computation dtype.
    """

    channels: tuple[int, ...] = (16, 32, 32)
    blocks: int = 2
    hidden: int = 256
    channels_first: bool = False
    kernel_init: str = "lecun_normal"
    kernel_scale: float = 1.0
    dtype: str = "float32"

    cpu_chunk: ClassVar[int] = 8
    """Rows taken at once on a CPU, so that they stay in its cache; see `apply_in_chunks`."""

    def __post_init__(self) -> None:
        _check(self)
        checks.in_range(self, "channels", "hidden", low=1)
        checks.non_negative(self, "blocks")
        if not self.channels:
            raise ConfigError("ImpalaResNet.channels = () must name at least one section, e.g. (16, 32, 32)")
        super().__post_init__()

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, hidden]` of images `[N, H, W, C]`, uint8 (scaled to [0, 1]) or float (used as they are)."""
        _image_rank(self, observation)
        init = INITIALIZERS[self.kernel_init](self.kernel_scale)

        def conv(features: int, x: Array, **fields: Any) -> Array:
            return Conv(features, kernel_init=init, dtype=self.dtype, **fields)(x)

        x = observation
        first = {"channels_first": self.channels_first, "input_scale": pixel_scale(observation)}
        for i, features in enumerate(self.channels):
            x = max_pool_half(conv(features, x, **({} if i else first)))
            for _ in range(self.blocks):
                x = x + conv(features, nn.relu(conv(features, nn.relu(x))))
        x = nn.relu(x).reshape(x.shape[0], -1)
        return nn.relu(Dense(self.hidden, kernel_init=init, dtype=self.dtype)(x)).astype(jnp.float32)


class MinAtarCNN(nn.Module):
    """The network of Young and Tian (2019), "MinAtar": one convolution 3x3 without padding, one dense layer, relu.

    Attributes:
        features: channels of the convolution.
        hidden: size of the dense layer.
        kernel_init: initialiser of the kernels; one of INITIALIZERS.
        kernel_scale: its scale.
        dtype: computation dtype.
    """

    features: int = 16
    hidden: int = 128
    kernel_init: str = "orthogonal"
    kernel_scale: float = SQRT_2
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check(self)
        checks.in_range(self, "features", "hidden", low=1)
        super().__post_init__()

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, hidden]` of planes `[N, H, W, C]`, bool or float."""
        _image_rank(self, observation)
        init = INITIALIZERS[self.kernel_init](self.kernel_scale)
        conv = Conv(
            self.features, padding="VALID", input_scale=pixel_scale(observation), kernel_init=init, dtype=self.dtype
        )
        x = nn.relu(conv(observation))
        x = nn.relu(Dense(self.hidden, kernel_init=init, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        return x.astype(jnp.float32)

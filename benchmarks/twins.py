"""Plain `nn.Conv` twins of flaxrl's torsos: the same layers, parameters and values, as one would write them in flax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from flaxrl.types import Array

# The initialisers do not matter to speed; orthogonal ones would only cost time at the start.
_INIT = nn.initializers.lecun_normal()


def _images(observation: Array, dtype: str) -> Array:
    return (observation.transpose(0, 2, 3, 1).astype(jnp.float32) / 255.0).astype(dtype)


class PlainNature(nn.Module):
    """NatureCNN of `nn.Conv`, on uint8 `[N, 4, 84, 84]`."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, 512]`."""
        x = _images(observation, self.dtype)
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(features, (size, size), (stride, stride), "VALID", dtype=self.dtype)(x))
        return nn.relu(nn.Dense(512, dtype=self.dtype)(x.reshape(x.shape[0], -1))).astype(jnp.float32)


class PlainResNet(nn.Module):
    """ImpalaResNet of `nn.Conv` and `nn.max_pool`, on uint8 `[N, 4, 84, 84]`."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, 256]`."""
        x = _images(observation, self.dtype)
        for features in (16, 32, 32):
            x = nn.max_pool(nn.Conv(features, (3, 3), dtype=self.dtype)(x), (3, 3), (2, 2), "SAME")
            for _ in range(2):
                y = nn.Conv(features, (3, 3), dtype=self.dtype)(nn.relu(x))
                x = x + nn.Conv(features, (3, 3), dtype=self.dtype)(nn.relu(y))
        x = nn.relu(x).reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(256, dtype=self.dtype)(x)).astype(jnp.float32)


class PlainMinAtar(nn.Module):
    """MinAtarCNN of `nn.Conv`, on bool `[N, 10, 10, 6]`."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Features `[N, 128]`."""
        x = nn.relu(nn.Conv(16, (3, 3), padding="VALID", dtype=self.dtype)(observation.astype(self.dtype)))
        return nn.relu(nn.Dense(128, dtype=self.dtype)(x.reshape(x.shape[0], -1))).astype(jnp.float32)


TWINS: dict[str, Any] = {"nature": PlainNature, "resnet": PlainResNet, "minatar": PlainMinAtar}

FORWARD_FLOPS = {"nature": 18.7e6, "resnet": 108.4e6, "minatar": 0.373e6}
"""Of a frame, two for each multiplication of convolutions and dense layers; with the backward pass three times that."""

"""Action distributions: arrays of parameters -> `log_prob`, `sample`, `mode`, `entropy`, `kl_divergence`.

Each is made by a builder that is hashable and equal to any other of the same fields, so that an `Output` made twice is
one and the same to `jax.jit`. Every answer but an action is float32 `[...]`: one number a row, summed over the action's
components.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.types import Array

DISTRIBUTIONS = ("categorical", "gaussian", "tanh_gaussian")
"""Names that a config may give as `distribution`; the first is for Discrete and MultiDiscrete, the others for Box."""

_LOG_2PI = math.log(2 * math.pi)
_EPS = float(np.finfo(np.float32).eps)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def mask_logits(logits: Array, action_mask: Array | None, sizes: tuple[int, ...] | None = None) -> Array:
    """Sets illegal actions to -inf, so that any legal logit wins; a row without a legal action counts as all-legal.

    Args:
        logits: float `[..., A]`.
        action_mask: bool `[..., A]`, True where legal, or None.
        sizes: actions of each component, where A = sum(sizes) joins several; each is masked by itself.
    """
    if action_mask is None:
        return logits
    if sizes is not None:
        parts = zip(_split(logits, sizes), _split(jnp.asarray(action_mask), sizes), strict=True)
        return jnp.concatenate([mask_logits(x, mask) for x, mask in parts], axis=-1)
    legal = jnp.asarray(action_mask, bool)
    legal = legal | ~jnp.any(legal, axis=-1, keepdims=True)
    return jnp.where(legal, logits, -jnp.inf)


def _split(x: Array, sizes: tuple[int, ...]) -> list[Array]:
    chex.assert_axis_dimension(x, -1, sum(sizes))
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def categorical(logits: Array) -> Any:
    """distrax.Categorical of `logits` `[..., A]`; illegal actions are -inf and have probability exactly 0."""
    import distrax  # takes a second: only when a policy is built

    return distrax.Categorical(logits=logits, dtype=jnp.int32)


class MultiCategorical:
    """Independent categoricals; an action is int32 `[..., K]`, one component each.

    Args:
        logits: float `[..., sum(sizes)]`, the components' joined; illegal ones are -inf.
        sizes: actions of each component.
    """

    def __init__(self, logits: Array, sizes: tuple[int, ...]):
        self.parts = [categorical(x) for x in _split(logits, sizes)]

    def log_prob(self, value: Array) -> Array:
        """Log-probability `[...]` of actions `[..., K]`."""
        chex.assert_shape(value, (*self.parts[0].logits.shape[:-1], len(self.parts)))
        return sum(part.log_prob(value[..., i]) for i, part in enumerate(self.parts))

    def sample(self, *, seed: Array, sample_shape: int | tuple[int, ...] = ()) -> Array:
        """Actions `[*sample_shape, ..., K]`."""
        keys = jax.random.split(seed, len(self.parts))
        drawn = [p.sample(seed=k, sample_shape=sample_shape) for p, k in zip(self.parts, keys, strict=True)]
        return jnp.stack(drawn, axis=-1)

    def mode(self) -> Array:
        """The likeliest actions `[..., K]`."""
        return jnp.stack([part.mode() for part in self.parts], axis=-1).astype(jnp.int32)

    def entropy(self) -> Array:
        """Entropy `[...]`, nats."""
        return sum(part.entropy() for part in self.parts)

    def kl_divergence(self, other: MultiCategorical) -> Array:
        """KL(self || other) `[...]`."""
        return sum(p.kl_divergence(q) for p, q in zip(self.parts, other.parts, strict=True))


@dataclass(frozen=True)
class MakeMultiCategorical:
    """Builder of `MultiCategorical`.

    Attributes:
        sizes: actions of each component.
    """

    sizes: tuple[int, ...]

    def __call__(self, logits: Array) -> MultiCategorical:
        """The distribution of `logits` `[..., sum(sizes)]`."""
        return MultiCategorical(logits, self.sizes)


class Gaussian:
    """Independent normal distributions; an action is float32 `[..., D]`, without bounds.

    Args:
        params: `mean` and `log_std`, float32 `[..., D]` each.
    """

    def __init__(self, params: dict[str, Array]):
        self.mean, self.log_std = params["mean"], params["log_std"]
        chex.assert_equal_shape([self.mean, self.log_std])

    def log_prob(self, value: Array) -> Array:
        """Log-density `[...]` of actions `[..., D]`."""
        chex.assert_equal_shape([value, self.mean])
        z = (value - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * (jnp.square(z) + _LOG_2PI) - self.log_std, axis=-1)

    def sample(self, *, seed: Array, sample_shape: int | tuple[int, ...] = ()) -> Array:
        """Actions `[*sample_shape, ..., D]`."""
        lead = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        noise = jax.random.normal(seed, (*lead, *self.mean.shape), jnp.float32)
        mean, std = (jnp.broadcast_to(x, noise.shape) for x in (self.mean, jnp.exp(self.log_std)))
        return mean + std * noise

    def mode(self) -> Array:
        """The mean, `[..., D]`."""
        return self.mean

    def entropy(self) -> Array:
        """Differential entropy `[...]`, nats."""
        return jnp.sum(self.log_std + 0.5 * (1 + _LOG_2PI), axis=-1)

    def kl_divergence(self, other: Gaussian) -> Array:
        """KL(self || other) `[...]`."""
        ratio = jnp.exp(2 * (self.log_std - other.log_std))
        distance = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        return jnp.sum(0.5 * (ratio + distance - 1) + other.log_std - self.log_std, axis=-1)


class TanhGaussian:
    """A Gaussian squashed into bounds: action = middle + half * tanh(u), half the width of the bounds, u normal.

    Dimensions without a finite bound on both sides are not squashed: there the action is u. The density follows by the
    change of variables (Haarnoja et al., 2018, "Soft Actor-Critic", appendix C). An action is stored as it is sent, so
    u has to be found again: on the scale of tanh it is kept a float32 epsilon away from +-1, where tanh saturates.

    Args:
        params: `mean` and `log_std` of u, float32 `[..., D]` each.
        low: lower bounds, D of them.
        high: upper bounds.
    """

    def __init__(self, params: dict[str, Array], low: tuple[float, ...], high: tuple[float, ...]):
        self.base, self.bounds = Gaussian(params), (low, high)
        chex.assert_axis_dimension(self.base.mean, -1, len(low))
        squashed = bounded_dimensions(low, high)
        lower, upper = np.where(squashed, low, -1.0), np.where(squashed, high, 1.0)
        self._squashed = self._constant(squashed, bool)
        self._middle = self._constant(lower / 2 + upper / 2)
        self._half = self._constant(upper / 2 - lower / 2)

    def _constant(self, x: np.ndarray, dtype: Any = np.float32) -> Array:
        return jnp.asarray(x, dtype).reshape((1,) * (self.base.mean.ndim - 1) + (-1,))

    def _log_slope(self, u: Array) -> Array:
        """log |d action / d u|, with 1 - tanh(u)^2 = 4 e^(-2|u|) / (1 + e^(-2|u|))^2."""
        distance = jnp.abs(u)
        slope = jnp.log(self._half) + 2 * (math.log(2) - distance - jnp.log1p(jnp.exp(-2 * distance)))
        return jnp.where(self._squashed, slope, 0.0)

    def _squash(self, u: Array) -> Array:
        squashed, middle, half = (jnp.broadcast_to(x, u.shape) for x in (self._squashed, self._middle, self._half))
        return jnp.where(squashed, middle + half * jnp.tanh(u), u)

    def log_prob(self, value: Array) -> Array:
        """Log-density `[...]` of actions `[..., D]`; finite at the bounds and beyond."""
        chex.assert_equal_shape([value, self.base.mean])
        scaled = jnp.clip((value - self._middle) / self._half, -1 + _EPS, 1 - _EPS)
        u = jnp.where(self._squashed, jnp.arctanh(scaled), value)
        return self.base.log_prob(u) - jnp.sum(self._log_slope(u), axis=-1)

    def sample(self, *, seed: Array, sample_shape: int | tuple[int, ...] = ()) -> Array:
        """Actions `[*sample_shape, ..., D]`."""
        return self._squash(self.base.sample(seed=seed, sample_shape=sample_shape))

    def mode(self) -> Array:
        """The squashed mean, `[..., D]`: the median, since the density's own mode may lie on a bound."""
        return self._squash(self.base.mode())

    def entropy(self) -> Array:
        """Differential entropy `[...]`, nats: the Gaussian's plus E[log |d action / d u|].

        The expectation is a Gauss-Hermite quadrature of 32 nodes: no key, and an error a dimension below 1e-5 where
        std <= 1, 1e-3 where std <= 2, 0.1 where std <= 7.4 (log_std 2).
        """
        std = jnp.exp(self.base.log_std)
        nodes, weights = (
            jnp.asarray(x, jnp.float32).reshape((-1,) + (1,) * self.base.mean.ndim) for x in (_NODES, _WEIGHTS)
        )
        expected = jnp.sum(weights * jax.vmap(lambda x: self._log_slope(self.base.mean + std * x))(nodes), axis=0)
        return self.base.entropy() + jnp.sum(expected, axis=-1)

    def kl_divergence(self, other: TanhGaussian) -> Array:
        """KL(self || other) `[...]`, exactly: that of the Gaussians, since both are squashed alike."""
        if self.bounds != other.bounds:
            raise ValueError(f"KL of policies with different bounds: {self.bounds} and {other.bounds}")
        return self.base.kl_divergence(other.base)


@dataclass(frozen=True)
class MakeTanhGaussian:
    """Builder of `TanhGaussian`.

    Attributes:
        low: lower bound of each dimension.
        high: upper bound of each dimension.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __call__(self, params: dict[str, Array]) -> TanhGaussian:
        """The distribution of `mean` and `log_std`, `[..., D]` each."""
        return TanhGaussian(params, self.low, self.high)


def bounded_dimensions(low: tuple[float, ...], high: tuple[float, ...]) -> np.ndarray:
    """Bool `[D]`: where both bounds are finite; the largest float32 stands for infinity in some envs."""
    largest = np.finfo(np.float32).max
    return (np.abs(np.asarray(low)) < largest) & (np.abs(np.asarray(high)) < largest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def bounded(x: Array, low: float, high: float) -> Array:
    """`clip(x, low, high)` that a gradient step can leave again.

    Outside the bounds a clip has no gradient, and a parameter that steps over them stays there for good. Here the
    gradient passes where a descent step would lead back, and is 0 where it would lead further out.

    Args:
        x: float `[...]`.
        low: lower bound.
        high: upper bound.
    """
    return jnp.clip(x, low, high)


def _bounded_forward(x: Array, low: float, high: float) -> tuple[Array, Array]:
    return jnp.clip(x, low, high), x


def _bounded_backward(low: float, high: float, x: Array, g: Array) -> tuple[Array]:
    outwards = ((x < low) & (g > 0)) | ((x > high) & (g < 0))
    return (jnp.where(outwards, 0.0, g),)


bounded.defvjp(_bounded_forward, _bounded_backward)

"""Running mean and variance, and observations normalised by them."""

from __future__ import annotations

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from flaxrl.errors import ConfigError
from flaxrl.models.leaf_names import leaf_key, named_leaves
from flaxrl.types import Array, PyTree

STATISTICS = "statistics"
"""Linen collection of running statistics: read by `__call__` and `act`, changed by `observe` alone."""

EPSILON = 1e-8
"""Added to a variance before its root is taken."""

MAX_COUNT = 2.0**24
"""Rows that the past counts for at most: one more would no longer change a float32."""


class Moments(struct.PyTreeNode):
    """Mean and variance of all rows seen, float32.

    Batches are merged as in Chan et al., 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances", in the form of weights: with w = n_batch / (n + n_batch) and delta = mean_batch - mean, the mean moves
    by w delta, the variance by w (var_batch - var + (1 - w) delta^2). Beyond MAX_COUNT rows the past keeps the weight
    of MAX_COUNT: old rows fade instead of new ones being ignored. What float32 cuts off a sum is kept beside it (Kahan,
    1965), so that ever smaller moves still add up.

    Attributes:
        count: rows seen, exact up to MAX_COUNT; 0 at the start, where mean 0 and variance 1 change nothing.
        mean: `[...]`, the shape of a row.
        mean_rest: `[...]`, what float32 cut off the mean.
        variance: `[...]`, of the population.
        variance_rest: `[...]`, what float32 cut off the variance.
    """

    count: Array
    mean: Array
    mean_rest: Array
    variance: Array
    variance_rest: Array

    @classmethod
    def start(cls, shape: tuple[int, ...] = ()) -> Moments:
        """Of no rows."""
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(jnp.zeros((), jnp.float32), zeros, zeros, jnp.ones(shape, jnp.float32), zeros)

    @property
    def deviation(self) -> Array:
        """Root of the variance, never 0; `[...]`."""
        return jnp.sqrt(self.variance + EPSILON)

    def merged(self, x: Array, mask: Array | None = None) -> Moments:
        """With the rows of a batch.

        Rows that hold a number that is not finite are left out; so is a whole batch whose squares overflow.

        Args:
            x: float `[*lead, ...]`; sums run over `lead` as it is, so that a batch that is split stays so.
            mask: bool `lead`, rows to take; None takes all.
        """
        lead = x.ndim - self.mean.ndim
        axes, inner = tuple(range(lead)), tuple(range(lead, x.ndim))
        x = x.astype(jnp.float32)
        rows = jnp.all(jnp.isfinite(x), axis=inner)
        if mask is not None:
            chex.assert_equal_shape([rows, mask])
            rows = rows & mask
        batch = jnp.sum(rows, dtype=jnp.float32)
        size = jnp.maximum(batch, 1.0)
        wide = rows.reshape(rows.shape + (1,) * len(inner))
        guess = jnp.sum(jnp.where(wide, x, 0.0), axes, keepdims=True) / size
        error = jnp.where(wide, x - guess, 0.0)
        # The second pass corrects what the first lost to rounding.
        shift = jnp.sum(error, axes) / size
        variance = jnp.maximum(jnp.sum(jnp.square(error), axes) / size - jnp.square(shift), 0.0)
        delta = (guess.reshape(self.mean.shape) - self.mean) + (shift - self.mean_rest)
        weight = batch / jnp.maximum(self.count + batch, 1.0)
        past = jnp.where(self.count > 0, self.variance, 0.0)
        spread = (variance - past) - self.variance_rest + (1 - weight) * jnp.square(delta)
        new = Moments(
            jnp.minimum(self.count + batch, MAX_COUNT),
            *_added(self.mean, self.mean_rest, weight * delta),
            *_added(past, self.variance_rest, weight * spread),
        )
        good = (batch > 0) & jnp.all(jnp.isfinite(new.mean) & jnp.isfinite(new.variance))
        return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, self)


def _added(total: Array, rest: Array, move: Array) -> tuple[Array, Array]:
    """`total + move`, and what float32 cut off."""
    move = move + rest
    new = total + move
    return new, move - (new - total)


class Normalizer(nn.Module):
    """Observations minus their running mean, over their running deviation, each element by itself.

    Float leaves of the observation are normalised, others (uint8 images) pass. The statistics are Moments in the
    collection STATISTICS, one for each leaf. Before the first `observe` only the clipping shows.

    Attributes:
        clip: normalised elements are clipped to +- this; None leaves them.
    """

    clip: float | None = 10.0

    @nn.compact
    def __call__(self, observation: PyTree) -> PyTree:
        """The tree with float32 normalised leaves, for leaves `[N, ...]`.

        Raises:
            ConfigError: no leaf is of a float type, or two leaves have the same name.
        """
        leaves = _float_leaves(observation)
        if not leaves:
            kinds = ", ".join(sorted({str(x.dtype) for x in jax.tree.leaves(observation)}))
            raise ConfigError(
                f"normalize_observations = True has nothing to normalise: this env's observation is {kinds}, and only "
                "float leaves are normalised; set it to False"
            )
        done = {}
        for name, x in leaves.items():
            moments = self.variable(STATISTICS, name, Moments.start, x.shape[1:]).value
            x = (x.astype(jnp.float32) - moments.mean[None]) / moments.deviation[None]
            done[name] = x if self.clip is None else jnp.clip(x, -self.clip, self.clip)
        return jax.tree_util.tree_map_with_path(lambda path, x: done.get(_name(path), x), observation)

    def observe(self, observation: PyTree) -> None:
        """Takes rows into the statistics, leaves `[T, B, ...]`; the collection must be mutable."""
        for name, x in _float_leaves(observation).items():
            self.put_variable(STATISTICS, name, self.get_variable(STATISTICS, name).merged(x))


def _name(path: tuple) -> str:
    """Of a leaf: its path, 'observation' where it is all there is."""
    return leaf_key(path) or "observation"


def _float_leaves(observation: PyTree) -> dict[str, Array]:
    """The leaves that are normalised, by name."""
    leaves = named_leaves(observation, _name, "normalize_observations")
    return {name: x for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}

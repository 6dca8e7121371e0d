"""A torso for observations of several arrays: one torso a leaf, features joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxrl import checks
from flaxrl.errors import ConfigError
from flaxrl.models.leaf_names import leaf_key, named_leaves
from flaxrl.models.torsos import DTYPES, MLP, MinAtarCNN, NatureCNN, computing_in
from flaxrl.types import Array, PyTree

_NATURE_SIZE = 36
"""Height and width from which NatureCNN's unpadded convolutions have something left to see."""


class DictTorso(nn.Module):
    """A torso for each leaf of a dict (or tuple, or nested ones); features are joined in sorted order of the keys.

    Leaves stay apart until they are features, so bytes of an image stay bytes beside a vector of floats, and the order
    in which an env fills its dict has no part in the result. A leaf that `torsos` does not name gets a torso by its
    kind: a uint8 or bool image `[N, H, W, C]` NatureCNN (from 36 x 36) or MinAtarCNN (smaller), anything else MLP.

    Attributes:
        torsos: key of a leaf -> its torso; keys of nested leaves are joined, as 'outer/inner'.
        dtype: computation dtype of all of them, in place of their own; None leaves each its own.
    """

    torsos: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            checks.choice(self, "dtype", DTYPES)
            for torso in self.torsos.values():
                computing_in(torso, self.dtype, "DictTorso")
        # A module is frozen, and hashable where its fields are.
        object.__setattr__(self, "torsos", flax.core.freeze(self.torsos))
        super().__post_init__()

    @nn.compact
    def __call__(self, observation: PyTree) -> Array:
        """Features `[N, F]` of a tree of arrays `[N, ...]`.

        Raises:
            ConfigError: a key of `torsos` that the observation does not have, or two leaves whose keys give their
                torsos the same name.
        """
        features = []
        for name, torso, leaf in self._leaves(observation):
            named: Any = torso.copy(name=name)
            features.append(named(leaf))
        return jnp.concatenate(features, axis=-1)

    def cpu_chunk(self, observation: PyTree) -> int | None:
        """Rows taken at once on a CPU: the fewest that a leaf's torso wants; None where none of them cares."""
        chunks = [getattr(torso, "cpu_chunk", None) for _, torso, _ in self._leaves(observation)]
        return min((c for c in chunks if c is not None), default=None)

    def _leaves(self, observation: PyTree) -> Iterator[tuple[str, nn.Module, Array]]:
        """(its torso's name, torso, array) of each leaf, in sorted order of the keys."""
        found = named_leaves(observation, _torso_name, "DictTorso")
        keys = [leaf_key(path) for path, _ in jax.tree_util.tree_leaves_with_path(observation)]
        for key in self.torsos:
            if key not in keys:
                raise ConfigError(f"DictTorso.torsos: the observation has no leaf {key!r}; {checks.nearest(key, keys)}")
        for key, (name, leaf) in zip(keys, found.items(), strict=True):
            torso = self.torsos[key] if key in self.torsos else _by_kind(leaf)
            yield name, torso if self.dtype is None else computing_in(torso, self.dtype, "DictTorso"), leaf


def _torso_name(path: Any) -> str:
    return f"torso_{leaf_key(path).replace('/', '_')}"


def _by_kind(leaf: Array) -> nn.Module:
    """The torso of a leaf that the config does not name."""
    if leaf.dtype not in (jnp.uint8, jnp.bool_) or leaf.ndim != 4 or min(leaf.shape[1:3]) < 3:
        return MLP(parent=None)
    return NatureCNN(parent=None) if min(leaf.shape[1:3]) >= _NATURE_SIZE else MinAtarCNN(parent=None)

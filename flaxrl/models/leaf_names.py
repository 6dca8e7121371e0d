"""Names for the leaves of an observation, no two alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from flaxrl.errors import ConfigError
from flaxrl.types import Array, PyTree


def leaf_key(path: Any) -> str:
    """A leaf's key: those on the way to it joined by '/', '' where the observation is one array."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(observation: PyTree, name: Callable[[Any], str], owner: str) -> dict[str, Array]:
    """The leaves of an observation by name, in sorted order of the keys.

    Args:
        observation: tree of arrays.
        name: of a leaf, from its path.
        owner: what needs the names, for the message.

    Raises:
        ConfigError: two leaves have the same name, such as 'a/b' of {'a': {'b': x}, 'a/b': y}.
    """
    leaves: dict[str, Array] = {}
    paths: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(observation):
        label = name(path)
        if label in paths:
            first, second = (jax.tree_util.keystr(p) for p in (paths[label], path))
            raise ConfigError(
                f"{owner}: the observation's leaves {first} and {second} would both be named {label!r}; rename a "
                "key of one of them"
            )
        leaves[label], paths[label] = leaf, path
    return leaves

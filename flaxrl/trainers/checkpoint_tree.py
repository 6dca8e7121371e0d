"""A tree of arrays <-> a flat dict of named arrays, as checkpoints hold it, and the comparison of two trees.

Names are paths such as 'params/Dense_0/kernel'. Every entry is described in words ('float32[64,4]', 'key<fry>[8]',
'None', 'empty'), so that a saved tree can be compared with the one at hand before anything is read: orbax would cast
another dtype silently and takes a typed key for a raw one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.errors import ConfigError
from flaxrl.types import PyTree

_SHOWN = 3  # mismatching entries spelt out in an error


def named(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf, in the tree's order; None and nodes without children count as leaves."""
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "root" for path, _ in entries]
    if len(set(names)) < len(names):  # an attribute and a key of one name, or a key with '/'
        names = [jax.tree_util.keystr(path) for path, _ in entries]
    return dict(zip(names, (leaf for _, leaf in entries), strict=True))


def describe(tree: PyTree) -> dict[str, str]:
    """Path -> what is there: dtype and shape, 'None', or 'empty' (a node without children).

    Raises:
        ConfigError: on a leaf that is neither an array nor a number.
    """
    return {name: _describe(name, leaf) for name, leaf in named(tree).items()}


def compare(saved: dict[str, str], here: dict[str, str], what: str) -> None:
    """Checks that a saved tree, as `describe` gave it, is the one at hand.

    Raises:
        ConfigError: one line with the first entries that differ, as saved and as here.
    """
    faults = []
    for name, text in here.items():
        if name not in saved:
            faults.append(f"{name} is not in the checkpoint ({text} here)")
        elif saved[name] != text:
            faults.append(f"{name} is {saved[name]} in the checkpoint, {text} here")
    faults += [f"{name} is {text} in the checkpoint, not here" for name, text in saved.items() if name not in here]
    if faults:
        rest = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ConfigError(f"{what}: {'; '.join(faults[:_SHOWN])}{rest}")


def pack(tree: PyTree) -> dict[str, Any]:
    """Path -> array, for orbax to write at leisure while the caller donates or overwrites the tree.

    Typed keys become their raw data. Left out is what the description alone can rebuild: None, empty nodes, arrays
    without elements (orbax refuses those).
    """
    return {name: _copy(leaf) for name, leaf in named(tree).items() if _has_data(leaf)}


def template(tree: PyTree) -> dict[str, Any]:
    """What to ask orbax for: path -> ShapeDtypeStruct with a sharding, or a numpy array where there is none to keep."""
    return {name: _ask(leaf) for name, leaf in named(tree).items() if _has_data(leaf)}


def unpack(tree: PyTree, arrays: dict[str, Any]) -> PyTree:
    """The tree like `tree` whose arrays are those read for `template(tree)`."""
    leaves = [_answer(leaf, arrays[name] if _has_data(leaf) else None) for name, leaf in named(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_empty), leaves)


def _is_empty(node: Any) -> bool:
    """None, or a container without children: optax.EmptyState(), (), {}."""
    return jax.tree.structure(node, is_leaf=lambda child: child is not node).num_leaves == 0


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> Any:
    """The generator of a typed key or of its ShapeDtypeStruct, which only a trace can be asked for."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _is_jax(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _host(leaf: Any) -> np.ndarray:
    """A numpy array or number, with numpy's dtypes: jax would cut int64 to int32."""
    return np.asarray(leaf)


def _describe(name: str, leaf: Any) -> str:
    if _is_empty(leaf):
        return "None" if leaf is None else "empty"
    array = leaf if _is_jax(leaf) else _host(leaf)
    if array.dtype == object or isinstance(leaf, (str, bytes)):
        raise ConfigError(f"checkpoint entry {name} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _has_data(leaf: Any) -> bool:
    return not _is_empty(leaf) and math.prod(np.shape(leaf) if not _is_jax(leaf) else leaf.shape) > 0


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    array = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    # On CPU what orbax takes to the host aliases the array, and the array may alias a numpy block that is rewritten.
    # Elsewhere that transfer, done before orbax's save returns, is the copy; one more would double the device memory.
    return jnp.copy(array) if any(d.platform == "cpu" for d in array.sharding.device_set) else array


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where a restored leaf belongs, None where nothing ties it to devices (then jit may move it)."""
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed else None


def _ask(leaf: Any) -> Any:
    if not _is_jax(leaf):
        return np.empty(np.shape(leaf), _host(leaf).dtype)
    aval = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = _sharding(leaf)
    if sharding is None:
        return np.empty(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _answer(leaf: Any, array: Any) -> Any:
    if _is_empty(leaf):
        return leaf
    if not _is_jax(leaf):
        array = np.empty(np.shape(leaf), _host(leaf).dtype) if array is None else array
        return array if isinstance(leaf, np.ndarray) else _number(leaf)(array.item())
    sharding = _sharding(leaf)
    if array is None:
        array = jnp.empty(jax.eval_shape(jax.random.key_data, leaf).shape if _is_key(leaf) else leaf.shape, _raw(leaf))
        array = array if sharding is None else jax.device_put(array, sharding)
    elif sharding is None:
        array = jnp.array(array)
    return jax.random.wrap_key_data(array, impl=_key_impl(leaf)) if _is_key(leaf) else array


def _raw(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, leaf).dtype if _is_key(leaf) else leaf.dtype


def _number(leaf: Any) -> Callable[[Any], Any]:
    return leaf.dtype.type if isinstance(leaf, np.generic) else type(leaf)

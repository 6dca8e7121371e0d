"""The device mesh, how a TrainState lies on it, and the model's unroll over it.

The unroll is a `jax.shard_map` over B: left to itself the partitioner gathers observation batches for convolutions and
reduces an LSTM's gradient at each time step. Losses stay outside, on global arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxrl import checks
from flaxrl.configuration import MeshSettings
from flaxrl.errors import ConfigError
from flaxrl.losses.base import Unroll
from flaxrl.trainers.accumulation import in_pieces
from flaxrl.types import Array, Output, Params, PyTree

AXES = ("data", "fsdp")
"""Mesh axes; the batch is split over both."""

PER_ENV = "per_env"
"""Collection of a state's `variables` whose leaves are `[B, ...]` and lie like the batch."""


def make_mesh(settings: MeshSettings, devices: list[Any] | None = None) -> Mesh:
    """A mesh with axes `data` and `fsdp`.

    Raises:
        ConfigError: sizes that the devices cannot fill.
    """
    devices = list(jax.devices()) if devices is None else devices
    sizes = [settings.data, settings.fsdp]
    if sizes.count(-1) == 2:
        raise ConfigError("mesh.data and mesh.fsdp cannot both be -1; set one of them")
    if -1 in sizes:
        fixed = sizes[1 - sizes.index(-1)]
        checks.divides(len(devices), fixed, "devices", "parts of the mesh")
        sizes[sizes.index(-1)] = len(devices) // fixed
    count = sizes[0] * sizes[1]
    if count > len(devices):
        raise ConfigError(f"mesh of data={sizes[0]} x fsdp={sizes[1]} needs {count} devices; there are {len(devices)}")
    return Mesh(np.asarray(devices[:count]).reshape(sizes), AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole."""
    return NamedSharding(mesh, P())


def batch_spec(time_first: bool = True) -> P:
    """PartitionSpec that splits B: of `[T, B, ...]` leaves, or of `[B, ...]` ones."""
    return P(None, AXES) if time_first else P(AXES)


def _leaf_spec(path: str, shape: tuple[int, ...], settings: MeshSettings, fsdp: int) -> P:
    for pattern, where in settings.rules:
        if re.search(pattern, path):
            if where == "replicated":
                return P()
            sizes = [(n, -i) for i, n in enumerate(shape) if n % fsdp == 0 and n >= fsdp]
            if not sizes:
                return P()
            axis = -max(sizes)[1]
            return P(*(["fsdp" if i == axis else None for i in range(axis + 1)]))
    return P()


def _text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def state_shardings(shapes: PyTree, settings: MeshSettings, mesh: Mesh) -> PyTree:
    """NamedShardings of a TrainState: `rules` on a parameter's path ('torso/Dense_0/kernel'), first match wins.

    The optimizer's moments lie like their parameters; what no rule matches is replicated, but
    for the variables PER_ENV, which are split like the batch.

    Args:
        shapes: the state as `jax.eval_shape` gives it.
        settings: of the mesh.
        mesh: the mesh.

    Raises:
        ConfigError: a rule that matches no parameter.
    """
    parameters = {_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes.params)}
    for pattern, _ in settings.rules:
        if not any(re.search(pattern, name) for name in parameters):
            raise ConfigError(
                f"mesh.rules: {pattern!r} matches no parameter; there are {', '.join(sorted(parameters))}"
            )

    def place(path: Any, leaf: Any) -> NamedSharding:
        if _text(path).startswith(f"variables/{PER_ENV}/"):
            return NamedSharding(mesh, batch_spec(time_first=False))
        # A moment's path ends with its parameter's.
        name = next((_text(path[i:]) for i in range(len(path)) if _text(path[i:]) in parameters), None)
        return NamedSharding(mesh, P() if name is None else _leaf_spec(name, leaf.shape, settings, mesh.shape["fsdp"]))

    return jax.tree_util.tree_map_with_path(place, shapes)


def shard_index(mesh: Mesh) -> Array:
    """Inside `over_batch`: this shard's number, 0 .. D-1."""
    return jnp.zeros((), jnp.int32) if mesh.size == 1 else jax.lax.axis_index(AXES)


def fold_shard(rngs: dict[str, Array], mesh: Mesh) -> dict[str, Array]:
    """Inside `over_batch`: keys that differ by shard."""
    return {name: jax.random.fold_in(key, shard_index(mesh)) for name, key in rngs.items()}


def over_batch(f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` of `f`; values that every shard computes alike need no proof of it.

    One device has the whole batch, so there `f` is called as it is: less to trace, and it may be part of a program over
    another mesh (the one of many seeds).
    """
    if mesh.size == 1:
        return f
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def bind_unroll(agent: Any, variables: PyTree, mesh: Mesh, pieces: int = 1) -> Unroll:
    """The model as losses call it: `unroll(params, batch, rngs) -> Output`.

    Args:
        agent: the Linen module.
        variables: Linen collections other than params.
        mesh: B is split over all of it; parameters enter whole (gathered once under fsdp).
        pieces: each shard runs the model over its rows of B in as many pieces, see `accumulation.in_pieces`.
    """

    def local(params: Params, variables: PyTree, inputs: PyTree, carry: PyTree, rngs: dict[str, Array]) -> Output:
        def apply(inputs: PyTree, carry: PyTree, rngs: dict[str, Array]) -> Output:
            return agent.apply({"params": params, **variables}, inputs, carry, rngs=rngs)[0]

        return in_pieces(apply, pieces, inputs, jax.tree.map(lambda x: x[0], carry), fold_shard(rngs, mesh))

    batch = batch_spec()
    mapped = over_batch(local, mesh, (P(), P(), batch, batch, P()), batch)

    def unroll(params: Params, batch: Any, rngs: dict[str, Array] | None = None) -> Output:
        return mapped(params, variables, batch.inputs, batch.carry, rngs or {})

    return unroll


def to_global(tree: PyTree, mesh: Mesh, time_first: bool = True) -> PyTree:
    """Host data -> global arrays, B split over the mesh; each process gives its own slice of B.

    On a CPU the array may alias the numpy block: the caller must not write to it again.
    """
    sharding = NamedSharding(mesh, batch_spec(time_first))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

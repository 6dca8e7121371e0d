"""Running a torso over a batch in pieces, so that memory does not grow with the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from flaxrl.errors import ConfigError
from flaxrl.models.convolution import vary_like
from flaxrl.types import Array, PyTree


def apply_in_chunks(torso: nn.Module, observation: PyTree, chunk: int | None, recompute: bool = False) -> Any:
    """`torso(observation)` over chunks of rows, one after another; same values, gradients and parameters.

    What a chunk needs while it is worked on stays small enough for a CPU's cache, and is used again for the next. With
    `recompute` the backward pass computes each chunk anew, so that nothing of it has to be kept. Forward and backward
    of 672 Atari frames take 83 MiB in chunks of 32, 27 with `recompute`, 417 whole (NatureCNN); in chunks of 8,
    ImpalaResNet takes 1 GiB, 54 MiB with `recompute`. One more forward pass is a third more work.

    Under `jax.shard_map` gradients are still reduced once, after the loop. Randomness is drawn anew for each chunk.

    Args:
        torso: a bound submodule of the module that calls this, independent from row to row: no batch statistics.
        observation: tree of arrays `[N, ...]`.
        chunk: most rows in a piece; None or `N <= chunk` applies the torso whole.
        recompute: trades time for memory.

    Returns:
        What the torso returns, `[N, ...]`.

    Raises:
        ConfigError: if `chunk` is less than 1.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk = {chunk} must be >= 1, or None to apply the torso to all rows at once")
    rows = jax.tree.leaves(observation)[0].shape[0]
    if chunk is None or rows <= chunk or torso.is_initializing():
        return torso(observation)  # type: ignore[operator]
    pieces = -(-rows // chunk)
    size = -(-rows // pieces)
    # Rows are repeated, not invented, to fill the last piece: what a real row computes is finite if the batch is.
    spare = pieces * size - rows

    def split(x: Array) -> Array:
        x = jnp.concatenate([x, jnp.repeat(x[-1:], spare, axis=0)]) if spare else x
        return x.reshape(pieces, size, *x.shape[1:])

    module, variables = torso.unbind()
    variables = vary_like(variables, observation)
    streams = {name: torso.make_rng(name) for name in (torso.scope.rngs if torso.scope else {}) if name != "params"}

    def piece(inputs: tuple[Array, PyTree]) -> PyTree:
        index, x = inputs
        rngs = {name: jax.random.fold_in(key, index) for name, key in streams.items()}
        return module.apply(variables, x, rngs=rngs)

    if recompute:
        # Inside a loop the compiler cannot merge recomputation with the forward pass anyway: nothing has to prevent it.
        piece = jax.checkpoint(piece, prevent_cse=False)
    features = lax.map(piece, (jnp.arange(pieces), jax.tree.map(split, observation)))
    return jax.tree.map(lambda y: y.reshape(pieces * size, *y.shape[2:])[:rows], features)

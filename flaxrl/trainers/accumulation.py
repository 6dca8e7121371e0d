"""Gradient accumulation: the model runs over a batch in pieces, one after another, for memory.

The model is split, and not the loss. So any loss stays what it is: its means, counts, normalisations and priorities
are taken once, over the outputs of the whole batch, and its backward pass runs the pieces in turn and adds up their
parameter gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flaxrl.types import Array, PyTree

Rngs = dict[str, Array]


def pieces_of(batch: int, pieces: int) -> int:
    """The least number of equal pieces, `pieces` at least, that `batch` splits into; `batch` where there are more."""
    return next(n for n in range(min(pieces, batch), batch + 1) if batch % n == 0)


def in_pieces(
    apply: Callable[[PyTree, PyTree, Rngs], PyTree], pieces: int, inputs: PyTree, carry: PyTree, rngs: Rngs
) -> PyTree:
    """`apply(inputs, carry, rngs)` over pieces of B; values and gradients are those of the whole.

    The backward pass runs each piece's forward pass again, so memory is that of the inputs, the outputs and one piece's
    activations. Random streams differ by piece.

    Args:
        apply: rows of B in, rows of B out, independent from each other; parameters are closed over.
        pieces: at least as many, see `pieces_of`; 1 applies it whole.
        inputs: leaves `[T, B, ...]`; inside a `jax.shard_map`, the shard's.
        carry: leaves `[B, ...]`.
        rngs: keys of the random streams.

    Returns:
        What `apply` returns, leaves `[T, B, ...]`.
    """
    batch = jax.tree.leaves(inputs)[0].shape[1]
    pieces = pieces_of(batch, pieces)
    if pieces == 1:
        return apply(inputs, carry, rngs)
    size = batch // pieces

    # A piece is cut out inside the checkpoint, so that what is kept for the backward pass is the batch itself and not
    # a second copy of it. The loop keeps the compiler from merging recomputation with the forward pass by itself.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def piece(index: Array) -> PyTree:
        def cut(x: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

        return apply(
            jax.tree.map(lambda x: cut(x, 1), inputs),
            jax.tree.map(lambda x: cut(x, 0), carry),
            {name: jax.random.fold_in(key, index) for name, key in rngs.items()},
        )

    def join(x: Array) -> Array:
        """`[pieces, T, size, ...]` -> `[T, B, ...]`."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], batch, *x.shape[3:])

    return jax.tree.map(join, jax.lax.map(piece, jnp.arange(pieces)))

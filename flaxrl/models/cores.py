"""Cores: what an agent remembers between rows; reset before each FIRST row, inside the unroll too."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxrl import checks
from flaxrl.models.torsos import DTYPES, INITIALIZERS
from flaxrl.types import Array, Carry


class FeedForward(nn.Module):
    """No memory: features pass through, the carry is empty."""

    def __call__(self, x: Array, first: Array, carry: Carry) -> tuple[Array, Carry]:
        """Returns `(x, carry)` for `x` `[T, B, F]`."""
        del first
        return x, carry

    def initial_carry(self, batch_size: int) -> Carry:
        """The empty carry."""
        del batch_size
        return ()


class Recurrent(nn.Module):
    """A recurrent cell scanned over time.

    Attributes:
        features: size of the state.
        initial_state: 'zeros', or 'learned' (parameters, the same for each episode).
        kernel_init: initialiser of the input kernels; one of flaxrl.models.torsos.INITIALIZERS.
        kernel_scale: its scale.
        recurrent_init: initialiser of the recurrent kernels; one of the same.
        recurrent_scale: its scale.
        dtype: computation dtype of the matrix products and gates; the state stays float32 from row to row, so that
            what it adds up is not rounded away.
    """

    features: int = 256
    initial_state: str = "zeros"
    kernel_init: str = "lecun_normal"
    kernel_scale: float = 1.0
    recurrent_init: str = "orthogonal"
    recurrent_scale: float = 1.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        checks.positive(self, "features")
        checks.choice(self, "initial_state", ("zeros", "learned"))
        checks.choice(self, "kernel_init", INITIALIZERS)
        checks.choice(self, "recurrent_init", INITIALIZERS)
        checks.choice(self, "dtype", DTYPES)
        checks.positive(self, "kernel_scale", "recurrent_scale")
        super().__post_init__()

    def _make_cell(self) -> Any:
        raise NotImplementedError

    def _inits(self) -> dict[str, Any]:
        return {
            "kernel_init": INITIALIZERS[self.kernel_init](self.kernel_scale),
            "recurrent_kernel_init": INITIALIZERS[self.recurrent_init](self.recurrent_scale),
            "dtype": self.dtype,
        }

    def setup(self) -> None:
        """Makes the cell and, where it is learned, the initial state."""
        self.cell = self._make_cell()
        shapes = jax.eval_shape(lambda: self._zeros(1))
        if self.initial_state == "learned":
            leaves, self.structure = jax.tree.flatten(shapes)
            self.start = [
                self.param(f"initial_{i}", nn.initializers.zeros_init(), leaf.shape) for i, leaf in enumerate(leaves)
            ]

    def _zeros(self, batch_size: int) -> Carry:
        raise NotImplementedError

    def initial_carry(self, batch_size: int) -> Carry:
        """The state at an episode's start, leaves `[B, features]`."""
        if self.initial_state == "zeros":
            return self._zeros(batch_size)
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (batch_size, *x.shape[1:])), jax.tree.unflatten(self.structure, self.start)
        )

    def __call__(self, x: Array, first: Array, carry: Carry) -> tuple[Array, Carry]:
        """Runs the cell over time.

        Args:
            x: float `[T, B, F]`.
            first: bool `[T, B]`; the state is set to the initial one before these rows.
            carry: state before the first row, leaves `[B, features]`.

        Returns:
            Features `[T, B, features]` and the state after the last row.
        """

        def step(cell: Any, carry: Carry, row: tuple[Array, Array], start: Carry) -> tuple[Carry, Array]:
            x_t, first_t = row
            carry = jax.tree.map(lambda s, c: jnp.where(first_t[:, None], s, c), start, carry)
            return cell(carry, x_t)

        axes: Any = ((0, 0), nn.broadcast)
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, in_axes=axes, out_axes=0)
        carry, y = scan(self.cell, carry, (x, first), self.initial_carry(x.shape[1]))
        return y, carry


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber, 1997); the carry is (cell, hidden)."""

    def _make_cell(self) -> Any:
        return nn.OptimizedLSTMCell(self.features, **self._inits())

    def _zeros(self, batch_size: int) -> Carry:
        return (jnp.zeros((batch_size, self.features)), jnp.zeros((batch_size, self.features)))


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al., 2014)."""

    def _make_cell(self) -> Any:
        return nn.GRUCell(self.features, **self._inits())

    def _zeros(self, batch_size: int) -> Carry:
        return jnp.zeros((batch_size, self.features))

"""Cores: what an agent remembers between rows; reset before each FIRST row, inside the unroll too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxrl import checks
from flaxrl.models.convolution import vary_like
from flaxrl.models.dense import Dense
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

    What the cell does with its input alone is one matrix product over all rows, ahead of the scan; inside it only the
    product with the state is left. A subclass defines `_define` (parameters), `_project`, `_step` and `_zeros`.

    Attributes:
        features: size of the state.
        initial_state: 'zeros', or 'learned' (parameters, the same for each episode).
        kernel_init: initialiser of the input kernels, one gate at a time; one of flaxrl.models.torsos.INITIALIZERS.
        kernel_scale: its scale.
        recurrent_init: initialiser of the recurrent kernels, one gate at a time; one of the same.
        recurrent_scale: its scale.
        dtype: of the matrix products; gates, state, outputs and parameters are float32.
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

    def _define(self) -> None:
        """Makes the cell's parameters; part of `setup`."""

    def _project(self, x: Array) -> Any:
        """What the cell computes from inputs `[T, B, F]` alone, leaves `[T, B, ...]`."""
        raise NotImplementedError

    def _step(self, weights: Any, carry: Carry, x_t: Any) -> tuple[Carry, Array]:
        """The state after a row and the features `[B, features]`; pure.

        Args:
            weights: `_weights()`.
            carry: the state before.
            x_t: that row of `_project`.
        """
        raise NotImplementedError

    def _weights(self) -> Any:
        """Parameters that `_step` uses, in the dtype that it uses them in."""
        return ()

    def _zeros(self, batch_size: int) -> Carry:
        raise NotImplementedError

    def setup(self) -> None:
        """Makes the parameters of the cell and, where it is learned, of the initial state."""
        self._define()
        shapes = jax.eval_shape(lambda: self._zeros(1))
        if self.initial_state == "learned":
            leaves, self.structure = jax.tree.flatten(shapes)
            self.start = [
                self.param(f"initial_{i}", nn.initializers.zeros_init(), leaf.shape) for i, leaf in enumerate(leaves)
            ]

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
        weights, start = vary_like((self._weights(), self.initial_carry(x.shape[1])), x)

        def step(carry: Carry, row: tuple[Any, Array]) -> tuple[Carry, Array]:
            x_t, first_t = row
            carry = jax.tree.map(lambda s, c: jnp.where(first_t[:, None], s, c), start, carry)
            return self._step(weights, carry, x_t)

        carry, y = jax.lax.scan(step, carry, (self._project(x), first))
        return y, carry

    def _input(self, gates: int, bias_init: Callable[..., Array]) -> Dense:
        """The layer from inputs to gates, `[..., gates * features]`."""
        init = _per_gate(INITIALIZERS[self.kernel_init](self.kernel_scale), gates)
        return Dense(gates * self.features, kernel_init=init, bias_init=bias_init, dtype=self.dtype)

    def _recurrent(self, gates: int) -> Array:
        """The kernel from state to gates, `[features, gates * features]`."""
        init = _per_gate(INITIALIZERS[self.recurrent_init](self.recurrent_scale), gates)
        return self.param("recurrent_kernel", init, (self.features, gates * self.features))

    def _product(self, state: Array, kernel: Array) -> Array:
        """state @ kernel in the computation dtype, as float32."""
        return (state.astype(self.dtype) @ kernel).astype(jnp.float32)


def _per_gate(init: Callable[..., Array], gates: int) -> Callable[..., Array]:
    """An initialiser of `[F, gates * H]` kernels that draws each gate's `[F, H]` by itself."""

    def kernel(key: Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> Array:
        one = (shape[0], shape[1] // gates)
        return jnp.concatenate([init(k, one, dtype) for k in jax.random.split(key, gates)], axis=1)

    return kernel


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber, 1997); the carry is (cell, hidden).

    i, f, o = sigmoid, g = tanh of W x + U h + b; cell' = f cell + i g; hidden' = o tanh(cell').

    Attributes:
        forget_bias: what the forget gate's bias starts at; 1 lets a new network remember (Gers et al., 2000;
            Jozefowicz et al., 2015).
    """

    forget_bias: float = 1.0

    def _define(self) -> None:
        def bias(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
            del key
            return jnp.zeros(shape, dtype).at[self.features : 2 * self.features].set(self.forget_bias)

        self.input = self._input(4, bias)
        self.kernel = self._recurrent(4)

    def _project(self, x: Array) -> Array:
        return self.input(x).astype(jnp.float32)

    def _weights(self) -> Array:
        return self.kernel.astype(self.dtype)

    def _step(self, weights: Array, carry: Carry, x_t: Array) -> tuple[Carry, Array]:
        cell, hidden = carry
        i, f, g, o = jnp.split(x_t + self._product(hidden, weights), 4, axis=-1)
        cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
        hidden = nn.sigmoid(o) * jnp.tanh(cell)
        return (cell, hidden), hidden

    def _zeros(self, batch_size: int) -> Carry:
        return (jnp.zeros((batch_size, self.features)), jnp.zeros((batch_size, self.features)))


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al., 2014), with the reset applied after the product (as in cuDNN).

    r, z = sigmoid(W x + U h + b); n = tanh(W_n x + b_n + r (U_n h + c)); h' = (1 - z) n + z h.
    """

    def _define(self) -> None:
        self.input = self._input(3, nn.initializers.zeros_init())
        self.kernel = self._recurrent(3)
        self.candidate_bias = self.param("candidate_bias", nn.initializers.zeros_init(), (self.features,))

    def _project(self, x: Array) -> Array:
        return self.input(x).astype(jnp.float32)

    def _weights(self) -> tuple[Array, Array]:
        return self.kernel.astype(self.dtype), self.candidate_bias

    def _step(self, weights: tuple[Array, Array], carry: Carry, x_t: Array) -> tuple[Carry, Array]:
        kernel, bias = weights
        r, z, n = jnp.split(self._product(carry, kernel), 3, axis=-1)
        x_r, x_z, x_n = jnp.split(x_t, 3, axis=-1)
        z = nn.sigmoid(x_z + z)
        new = jnp.tanh(x_n + nn.sigmoid(x_r + r) * (n + bias[None]))
        carry = (1 - z) * new + z * carry
        return carry, carry

    def _zeros(self, batch_size: int) -> Carry:
        return jnp.zeros((batch_size, self.features))

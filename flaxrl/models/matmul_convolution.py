"""Convolution as matrix products, for CPUs: forward, gradient by the kernel, gradient by the input.

Where the strides divide the kernel, space-to-depth first makes it a convolution of stride 1 over cells of many
channels. Each of the kernel's taps is then served in one of two ways. Gathered: the cells that an output pixel sees lie
side by side and are multiplied at once, which copies every cell once a tap. Shared: each cell is multiplied once for
all taps, and its shares in the outputs around it are added up, which copies every output once a tap. Taps across and
down are gathered or shared, whichever moves fewer numbers. Images of bytes stay bytes until the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flaxrl.types import Array

Pads = tuple[tuple[int, int], tuple[int, int]]


class Geometry(NamedTuple):
    """Everything static about a convolution besides its shapes.

    Attributes:
        strides: down and across.
        pads: zeros around the image: (top, bottom), (left, right).
        channels_first: images are `[N, C, H, W]`; else `[N, H, W, C]`.
        scale: multiplies images of bool or uint8.
    """

    strides: tuple[int, int]
    pads: Pads
    channels_first: bool
    scale: float = 1.0


def as_numbers(x: Array, dtype: Any, geometry: Geometry) -> Array:
    """Bool and uint8 as scaled floats, rounded once; floats as they are."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return (x.astype(jnp.float32) * geometry.scale).astype(dtype)


class _Plan(NamedTuple):
    """How a convolution of certain shapes is done.

    Attributes:
        cell: height and width of a cell; (1, 1) without space-to-depth.
        step: cells from one output to the next; (1, 1) unless the strides do not divide the kernel.
        taps: cells that the kernel covers, down and across.
        gather: whether taps down, and taps across, are gathered.
        out: output height and width.
    """

    cell: tuple[int, int]
    step: tuple[int, int]
    taps: tuple[int, int]
    gather: tuple[bool, bool]
    out: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells that the outputs see."""
        rows, cols = ((o - 1) * s + t for o, s, t in zip(self.out, self.step, self.taps, strict=True))
        return rows, cols

    @property
    def gathered(self) -> list[tuple[int, int]]:
        """The gathered taps."""
        return [(i, j) for i in self._each(0, True) for j in self._each(1, True)]

    @property
    def shared(self) -> list[tuple[int, int]]:
        """The shared taps."""
        return [(i, j) for i in self._each(0, False) for j in self._each(1, False)]

    def _each(self, axis: int, gathered: bool) -> range:
        return range(self.taps[axis]) if self.gather[axis] == gathered else range(1)


def forward(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """The convolution.

    Args:
        x: images `[N, H, W, C]` (`[N, C, H, W]` if channels-first), of the kernel's dtype, bool or uint8.
        kernel: `[kh, kw, C, O]`.
        geometry: strides and padding.

    Returns:
        `[N, H', W', O]` of the kernel's dtype.
    """
    plan = _plan(x, kernel, geometry)
    gathered = as_numbers(_gather(_cells(x, plan, geometry), plan), kernel.dtype, geometry)
    shares = (gathered @ _matrix(kernel, plan, geometry)).reshape(*gathered.shape[:3], len(plan.shared), -1)
    height, width = plan.out
    pieces = [shares[:, i : i + height, j : j + width, n] for n, (i, j) in enumerate(plan.shared)]
    return sum(pieces[1:], start=pieces[0])


def kernel_gradient(x: Array, kernel: Array, g: Array, geometry: Geometry) -> Array:
    """Gradient by the kernel `[kh, kw, C, O]`, for the output's gradient `g` `[N, H', W', O]`."""
    plan = _plan(x, kernel, geometry)
    gathered = as_numbers(_gather(_cells(x, plan, geometry), plan), kernel.dtype, geometry)
    gradient = jax.vjp(lambda k: _matrix(k, plan, geometry), kernel)[1]
    return gradient(_over_rows(gathered, _spread(g, plan)))[0]


def input_gradient(x: Array, kernel: Array, g: Array, geometry: Geometry) -> Array:
    """Gradient by the images, of their shape, for the output's gradient `g` `[N, H', W', O]`; floats only."""
    plan = _plan(x, kernel, geometry)
    gradient = jax.vjp(lambda x: _gather(_cells(x, plan, geometry), plan), x)[1]
    return gradient(_spread(g, plan) @ _matrix(kernel, plan, geometry).T)[0]


def _plan(x: Array, kernel: Array, geometry: Geometry) -> _Plan:
    """The plan that moves the fewest numbers."""
    size, strides = kernel.shape[:2], geometry.strides
    image = x.shape[2:] if geometry.channels_first else x.shape[1:3]
    padded = [n + sum(p) for n, p in zip(image, geometry.pads, strict=True)]
    height, width = ((n - k) // s + 1 for n, k, s in zip(padded, size, strides, strict=True))
    if any(k % s for k, s in zip(size, strides, strict=True)):
        return _Plan((1, 1), strides, (size[0], size[1]), (True, True), (height, width))
    taps = (size[0] // strides[0], size[1] // strides[1])
    down, right = taps
    channels, out = kernel.shape[2] * strides[0] * strides[1], kernel.shape[3]
    spare_rows, spare_cells = 1 + (down - 1) / height, (1 + (down - 1) / height) * (1 + (right - 1) / width)
    moved = {
        (True, True): 1.2 * down * right * channels,  # adding up overlapping gradients is slower than copying
        (False, True): (right * channels + down * out) * spare_rows,
        (False, False): down * right * out * spare_cells,
    }
    return _Plan(strides, (1, 1), taps, min(moved, key=lambda way: moved[way]), (height, width))


def _over_rows(a: Array, b: Array) -> Array:
    """a^T b over all but the last axis of both, `[A, B]`."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


def _cells(x: Array, plan: _Plan, geometry: Geometry) -> Array:
    """The padded images as cells `[N, rows, cols, K]`, K in the order of `_matrix`'s rows."""
    h_axis = 2 if geometry.channels_first else 1
    if any(sum(p) for p in geometry.pads):
        pads = [(0, 0)] * 4
        pads[h_axis : h_axis + 2] = geometry.pads
        x = jnp.pad(x, pads)
    (rows, cols), (sh, sw) = plan.grid, plan.cell
    x = lax.slice_in_dim(lax.slice_in_dim(x, 0, rows * sh, axis=h_axis), 0, cols * sw, axis=h_axis + 1)
    if not geometry.channels_first:
        c = x.shape[3]
        return x.reshape(-1, rows, sh, cols, sw * c).swapaxes(2, 3).reshape(-1, rows, cols, sh * sw * c)
    c = x.shape[1]
    x = x.reshape(-1, c, rows, sh, cols, sw)
    if x.dtype == jnp.uint8 and sw in (2, 4):
        # Bytes that stay together move as one word: a fourth of the work.
        words = lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[sw])
        x = lax.bitcast_convert_type(words.transpose(0, 2, 4, 1, 3), jnp.uint8)
    else:
        x = x.transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(-1, rows, cols, c * sh * sw)


def _gather(cells: Array, plan: _Plan) -> Array:
    """Cells of gathered taps side by side, `[N, rows', cols', G * K]`; a gathered axis shrinks to the output."""
    if len(plan.gathered) == 1 and plan.step == (1, 1):
        return cells
    stops = [
        (o - 1) * s + 1 if g else n for o, s, g, n in zip(plan.out, plan.step, plan.gather, plan.grid, strict=True)
    ]
    (sh, sw), (height, width) = plan.step, stops
    pieces = [cells[:, i : i + height : sh, j : j + width : sw] for i, j in plan.gathered]
    whole = jnp.stack(pieces, axis=3)
    return whole.reshape(*whole.shape[:3], -1)


def _matrix(kernel: Array, plan: _Plan, geometry: Geometry) -> Array:
    """The kernel `[kh, kw, C, O]` as the matrix `[G * K, S * O]`, G gathered and S shared taps."""
    (sh, sw), (down, right) = plan.cell, plan.taps
    c, out = kernel.shape[2:]
    order = (0, 2, 4, 1, 3, 5) if geometry.channels_first else (0, 2, 1, 3, 4, 5)
    taps = kernel.reshape(down, sh, right, sw, c, out).transpose(order).reshape(down, right, sh * sw * c, out)
    order = {(True, True): (0, 1, 2, 3), (False, True): (1, 2, 0, 3), (False, False): (2, 0, 1, 3)}[plan.gather]
    return taps.transpose(order).reshape(len(plan.gathered) * sh * sw * c, len(plan.shared) * out)


def _spread(g: Array, plan: _Plan) -> Array:
    """Gradient of each cell's shares, `[N, rows', cols', S * O]`, for the output's gradient `[N, H', W', O]`."""
    if len(plan.shared) == 1:
        return g
    last = [0 if gathered else taps - 1 for gathered, taps in zip(plan.gather, plan.taps, strict=True)]
    pads = [((0, 0), (i, last[0] - i), (j, last[1] - j), (0, 0)) for i, j in plan.shared]
    shares = jnp.stack([jnp.pad(g, p) for p in pads], axis=3)
    return shares.reshape(*shares.shape[:3], -1)

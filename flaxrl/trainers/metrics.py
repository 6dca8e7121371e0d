"""Metrics between logs: reduced on the device, read by the host once a log.

A metric is a scalar or a (total, count) pair. Everything becomes pairs, pairs add up, and the host divides: so a mean
over several updates weighs each by what it saw, and an update that saw nothing (no episode ended) weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.types import Array, Metrics

Pairs = dict[str, tuple[Array, Array]]


def as_pairs(metrics: Metrics) -> Pairs:
    """Scalars as (value, 1), pairs as they are, all float32."""
    pairs = {}
    for name, value in metrics.items():
        total, count = value if isinstance(value, tuple) else (value, 1.0)
        pairs[name] = (jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32))
    return pairs


def weighted(metrics: Metrics, weight: Array) -> Pairs:
    """`metrics` as pairs that count only where `weight` (0 or 1) is 1; what is not finite then does not spread."""
    return {
        name: (jnp.where(weight > 0, total, 0.0), jnp.where(weight > 0, count, 0.0))
        for name, (total, count) in as_pairs(metrics).items()
    }


def summed(stacked: Pairs) -> Pairs:
    """Sums pairs over their leading axis (what a scan stacked)."""
    return jax.tree.map(lambda x: x.sum(0), stacked)


@jax.jit
def _add(x: Pairs, y: Pairs) -> Pairs:
    return jax.tree.map(jnp.add, x, y)


def _added(parts: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Pairs of several processes as one; a name may be missing in some."""
    names = sorted(set().union(*parts))
    told = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: (sum(total for total, _ in pairs), sum(count for _, count in pairs)) for name, pairs in told.items()}


class MetricsBuffer:
    """Sums metrics on the device; `read` gives their means and starts anew."""

    def __init__(self) -> None:
        self._device: Pairs = {}
        self._host: dict[str, tuple[float, float]] = {}

    def add(self, metrics: Metrics) -> None:
        """Adds one call's metrics; host numbers stay on the host, device arrays are not waited for."""
        device: Metrics = {}
        for name, value in metrics.items():
            total, count = value if isinstance(value, tuple) else (value, 1.0)
            if isinstance(total, jax.Array):
                device[name] = (total, count)
            else:
                seen = self._host.get(name, (0.0, 0.0))
                self._host[name] = (seen[0] + float(total), seen[1] + float(count))
        if device:
            pairs = as_pairs(device)
            both = sorted(self._device.keys() & pairs.keys())
            added = _add({k: self._device[k] for k in both}, {k: pairs[k] for k in both}) if both else {}
            self._device = self._device | pairs | added

    def read(self, agree: Callable[[Any, Callable[[list[Any]], Any]], Any] | None = None) -> dict[str, float]:
        """Means since the last read, by name; metrics that counted nothing are left out.

        Args:
            agree: `Peers.agree` of a run in several processes, whose host numbers are added up; None has one.
        """
        host = self._host if agree is None else agree(self._host, _added)
        pairs = {**jax.device_get(self._device), **host}
        self._device, self._host = {}, {}
        return dict(sorted(self._means(pairs).items()))

    def _means(self, pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
        return {k: float(np.float64(total) / count) for k, (total, count) in pairs.items() if count > 0}

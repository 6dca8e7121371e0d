"""Optimizers: any of optax's by name, with its arguments, a schedule placed on steps, and a global-norm clip."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import optax

from flaxrl import checks
from flaxrl.errors import ConfigError
from flaxrl.types import Array

SCHEDULES = ("constant", "linear", "cosine")


def schedule_value(name: str, progress: Array, start: float, end: float) -> Array:
    """A schedule's value.

    linear: start + (end - start) p; cosine: end + (start - end) (1 + cos(pi p)) / 2; constant: start.

    Args:
        name: one of SCHEDULES.
        progress: float32, fraction of the run done; clipped to [0, 1], so it never leaves [start, end].
        start: value at 0.
        end: value at 1.
    """
    p = jnp.clip(jnp.asarray(progress, jnp.float32), 0.0, 1.0)
    if name == "constant":
        return jnp.full_like(p, start)
    if name == "linear":
        return start + (end - start) * p
    if name == "cosine":
        return end + (start - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * p))
    raise ValueError(f"schedule {name!r} is unknown; expected one of {SCHEDULES}")


def _factory(algorithm: str) -> Callable[..., optax.GradientTransformation]:
    known = [
        name
        for name, f in vars(optax).items()
        if inspect.isfunction(f) and "learning_rate" in inspect.signature(f).parameters
    ]
    if algorithm not in known:
        raise ConfigError(
            f"optimizer.algorithm = {algorithm!r} is not an optax optimizer; {checks.nearest(algorithm, known)}"
        )
    return getattr(optax, algorithm)


def _arguments(algorithm: str) -> dict[str, Any]:
    """The scalar arguments of an optax optimizer with their defaults; None where a number is optional (momentum)."""

    def scalar(p: inspect.Parameter) -> bool:
        return float in typing.get_args(p.annotation) if p.default is None else isinstance(p.default, (int, float))

    parameters = inspect.signature(_factory(algorithm)).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "learning_rate" and scalar(p)}


@dataclass(frozen=True)
class Optimizer:
    """An optax chain: clip by global norm, then the algorithm.

    Attributes:
        algorithm: name of an optax optimizer ('adam', 'rmsprop', 'sgd', 'adamw', ...).
        learning_rate: at the start (after warm-up).
        schedule: 'constant', 'linear' or 'cosine' over `total_steps`, by iterate (all gradient steps of one iterate
            use the rate at its start).
        final_fraction: learning rate at the end, as a fraction of `learning_rate`; unused by 'constant'.
        warmup_fraction: fraction of the run over which the rate grows linearly from 0 first.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        args: the algorithm's other arguments, all of them (`config.optimizer.args.eps`).
    """

    algorithm: str = "adam"
    learning_rate: float = 3e-4
    schedule: str = "constant"
    final_fraction: float = 0.0
    warmup_fraction: float = 0.0
    max_grad_norm: float | None = None
    args: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.positive(self, "learning_rate", "max_grad_norm")
        checks.in_range(self, "final_fraction", low=0, high=1)
        checks.in_range(self, "warmup_fraction", low=0, high=1, open_high=True)
        checks.choice(self, "schedule", SCHEDULES)
        known = _arguments(self.algorithm)
        for key, value in self.args.items():
            if key not in known:
                raise ConfigError(
                    f"args.{key} does not fit optax.{self.algorithm}; {checks.nearest(key, known)} (another algorithm "
                    f"brings its own args: config_for('optimizer', algorithm={self.algorithm!r}) in the config file)"
                )
            kind = bool if isinstance(known[key], bool) else float
            off = value is None and known[key] is None
            if not off and (not checks.matches(value, kind) or value != value):
                raise ConfigError(f"args.{key} = {value!r} of optax.{self.algorithm} must be {kind.__name__}")

    @classmethod
    def complete(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fills `args` with all the scalar arguments of the algorithm, so that each can be overridden."""
        given = dict(fields.get("args", {}))
        defaults = _arguments(fields.get("algorithm", cls.algorithm))
        args = {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in defaults.items()}
        for key in given:
            if key not in args:
                raise ConfigError(f"optimizer.args has no {key!r}; {checks.nearest(key, args)}")
        return {**fields, "args": args | given}

    def make(self) -> optax.GradientTransformation:
        """The chain; its learning rate is set from outside (`set_learning_rate`), not by optax's own count."""
        factory = _factory(self.algorithm)

        def chain(learning_rate: Any) -> optax.GradientTransformation:
            clip = [] if self.max_grad_norm is None else [optax.clip_by_global_norm(self.max_grad_norm)]
            return optax.chain(*clip, factory(learning_rate, **self.args))

        return optax.inject_hyperparams(chain)(learning_rate=jnp.float32(self.learning_rate))

    def learning_rate_at(self, progress: Array) -> Array:
        """The learning rate where the fraction `progress` of the run is done."""
        progress = jnp.asarray(progress, jnp.float32)
        warm = self.warmup_fraction
        after = (progress - warm) / (1.0 - warm)
        rate = schedule_value(self.schedule, after, self.learning_rate, self.learning_rate * self.final_fraction)
        return rate * jnp.minimum(progress / warm, 1.0) if warm else rate


def set_learning_rate(opt_state: Any, learning_rate: Array) -> Any:
    """An optimizer state of `Optimizer.make` with another learning rate."""
    rate = jnp.asarray(learning_rate, jnp.float32)
    return opt_state._replace(hyperparams={**opt_state.hyperparams, "learning_rate": rate})

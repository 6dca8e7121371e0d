"""Heads: features -> Output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from flaxrl import checks
from flaxrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.models.distributions import (
    DISTRIBUTIONS,
    Gaussian,
    MakeMultiCategorical,
    MakeTanhGaussian,
    bounded,
    bounded_dimensions,
    categorical,
    mask_logits,
)
from flaxrl.models.torsos import INITIALIZERS
from flaxrl.types import Array, Output


class PolicyValue(nn.Module):
    """A policy for any action space and a state value, each one dense layer.

    Discrete actions have a categorical policy, MultiDiscrete ones a categorical for each component, Box ones a
    Gaussian: 'gaussian', whose sample is stored as drawn and clipped to the bounds where the env receives it, or
    'tanh_gaussian', which is squashed into the bounds (not in dimensions that have none).

    Attributes:
        action_spec: of the env; None where it is not known yet (only the other fields are checked).
        policy_scale: scale of the initialiser of the policy's kernels; small starts near uniform, or near a mean of 0.
        value_scale: the same of the value's kernel.
        kernel_init: initialiser of the kernels; one of flaxrl.models.torsos.INITIALIZERS.
        distribution: one of DISTRIBUTIONS; None follows from the action space ('gaussian' for Box).
        log_std_init: log of a Gaussian's standard deviation at the start.
        state_dependent_std: a dense layer gives that deviation; False: a parameter, the same in all states.
        log_std_min: lower bound of its log.
        log_std_max: upper bound of its log.
    """

    action_spec: ActionSpec | None
    policy_scale: float = 0.01
    value_scale: float = 1.0
    kernel_init: str = "orthogonal"
    distribution: str | None = None
    log_std_init: float = 0.0
    state_dependent_std: bool = False
    log_std_min: float = -10.0
    log_std_max: float = 2.0

    def __post_init__(self) -> None:
        checks.non_negative(self, "policy_scale", "value_scale")
        checks.choice(self, "kernel_init", INITIALIZERS)
        if self.distribution is not None:
            checks.choice(self, "distribution", DISTRIBUTIONS)
        # A standard deviation is a float32, and so is its square.
        checks.in_range(self, "log_std_min", "log_std_max", low=-40, high=40)
        if self.log_std_min > self.log_std_max:
            raise ConfigError(
                f"PolicyValue.log_std_min = {self.log_std_min:g} must be <= log_std_max = {self.log_std_max:g}"
            )
        checks.in_range(self, "log_std_init", low=self.log_std_min, high=self.log_std_max)
        _check_space(self.action_spec, self.distribution)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, action_mask: Array | None, value_features: Array | None = None) -> Output:
        """A policy and a value.

        Args:
            x: features `[..., F]`.
            action_mask: bool `[..., A]` (MultiDiscrete: the components' joined), or None.
            value_features: features `[..., G]` of the value, where they are not `x`.

        Returns:
            Output with float32 `policy_params` (masked logits `[..., A]`, or `mean` and `log_std` `[..., D]`) and
            `value` `[...]`.
        """
        policy_params, make_policy = self._policy(x, action_mask)
        init = INITIALIZERS[self.kernel_init](self.value_scale)
        value = nn.Dense(1, kernel_init=init, name="value")(x if value_features is None else value_features)[..., 0]
        return Output(policy_params=policy_params, value=value.astype(jnp.float32), make_policy=make_policy)

    def _policy(self, x: Array, action_mask: Array | None) -> tuple[Any, Callable[[Any], Any]]:
        """Parameters of the policy and their builder."""
        spec = self.action_spec
        if isinstance(spec, Discrete):
            return mask_logits(self._dense(spec.n, "policy", x), action_mask), categorical
        if isinstance(spec, MultiDiscrete):
            logits = self._dense(sum(spec.nvec), "policy", x)
            return mask_logits(logits, action_mask, spec.nvec), MakeMultiCategorical(spec.nvec)
        if isinstance(spec, Box):
            mean = self._dense(len(spec.low), "policy", x)
            params = {"mean": mean, "log_std": bounded(self._log_std(x, mean), self.log_std_min, self.log_std_max)}
            if self.distribution == "tanh_gaussian":
                return params, MakeTanhGaussian(spec.low, spec.high)
            return params, Gaussian
        raise ValueError(f"action spec {spec!r} is unknown; expected Discrete, MultiDiscrete or Box")

    def _dense(self, features: int, name: str, x: Array, bias: float = 0.0) -> Array:
        init = INITIALIZERS[self.kernel_init](self.policy_scale)
        layer = nn.Dense(features, kernel_init=init, bias_init=nn.initializers.constant(bias), name=name)
        return layer(x).astype(jnp.float32)

    def _log_std(self, x: Array, mean: Array) -> Array:
        """Log-deviations, of the shape of `mean`."""
        size = mean.shape[-1]
        if self.state_dependent_std:
            return self._dense(size, "log_std", x, self.log_std_init)
        free = self.param("log_std", nn.initializers.constant(self.log_std_init), (size,), jnp.float32)
        return jnp.broadcast_to(free.reshape((1,) * (mean.ndim - 1) + (size,)), mean.shape)


def _check_space(spec: ActionSpec | None, distribution: str | None) -> None:
    """Checks that a distribution fits the action space."""
    if spec is None or distribution is None:
        return
    if isinstance(spec, Box) != (distribution != "categorical"):
        space, right = ("Box", "'gaussian' or 'tanh_gaussian'") if isinstance(spec, Box) else (spec, "'categorical'")
        raise ConfigError(
            f"PolicyValue.distribution = {distribution!r} does not fit actions {space}; set it to {right}, or None"
        )
    if isinstance(spec, Box) and distribution == "tanh_gaussian":
        for i in bounded_dimensions(spec.low, spec.high).nonzero()[0]:
            if not spec.low[i] < spec.high[i]:
                raise ConfigError(
                    f"PolicyValue.distribution = 'tanh_gaussian' needs low < high; dimension {i} of the action has "
                    f"[{spec.low[i]:g}, {spec.high[i]:g}]: set it to 'gaussian'"
                )

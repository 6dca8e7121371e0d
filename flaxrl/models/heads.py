"""Heads: features -> Output."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from flaxrl import checks
from flaxrl.envs.spec import ActionSpec, Discrete
from flaxrl.errors import ConfigError
from flaxrl.models.torsos import INITIALIZERS
from flaxrl.types import Array, Output


def categorical(logits: Array) -> Any:
    """distrax.Categorical of `logits` `[..., A]`; illegal actions are -inf and have probability exactly 0."""
    import distrax  # takes a second: only when a policy is built

    return distrax.Categorical(logits=logits)


def mask_logits(logits: Array, action_mask: Array | None) -> Array:
    """Sets illegal actions to -inf, so that any legal logit wins; a row without a legal action counts as all-legal.

    Args:
        logits: float `[..., A]`.
        action_mask: bool `[..., A]`, True where legal, or None.
    """
    if action_mask is None:
        return logits
    legal = jnp.asarray(action_mask, bool)
    legal = legal | ~jnp.any(legal, axis=-1, keepdims=True)
    return jnp.where(legal, logits, -jnp.inf)


class PolicyValue(nn.Module):
    """A categorical policy and a state value, each one dense layer.

    Attributes:
        action_spec: of the env; None where it is not known yet (only the other fields are checked).
        policy_scale: scale of the initialiser of the policy's kernel; small starts near uniform.
        value_scale: the same of the value's kernel.
        kernel_init: initialiser of both kernels; one of flaxrl.models.torsos.INITIALIZERS.
    """

    action_spec: ActionSpec | None
    policy_scale: float = 0.01
    value_scale: float = 1.0
    kernel_init: str = "orthogonal"

    def __post_init__(self) -> None:
        checks.non_negative(self, "policy_scale", "value_scale")
        checks.choice(self, "kernel_init", INITIALIZERS)
        if self.action_spec is not None and not isinstance(self.action_spec, Discrete):
            raise ConfigError(f"policy_value is for Discrete actions; this env has {self.action_spec}")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, action_mask: Array | None) -> Output:
        """Output with float32 `policy_params` (masked logits `[..., A]`) and `value` `[...]`, for `x` `[..., F]`."""
        assert isinstance(self.action_spec, Discrete)
        init = INITIALIZERS[self.kernel_init]
        logits = nn.Dense(self.action_spec.n, kernel_init=init(self.policy_scale), name="policy")(x)
        value = nn.Dense(1, kernel_init=init(self.value_scale), name="value")(x)[..., 0]
        logits = mask_logits(logits.astype(jnp.float32), action_mask)
        return Output(policy_params=logits, value=value.astype(jnp.float32), make_policy=categorical)

"""Losses: one a file, each a frozen dataclass whose fields are its hyper-parameters."""

from flaxrl.losses.base import Loss, Unroll
from flaxrl.losses.returns import discounted_returns, explained_variance, generalized_advantages

__all__ = ["Loss", "Unroll", "discounted_returns", "explained_variance", "generalized_advantages"]

"""How an agent's actions and masks map onto those of a Jumanji game."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.types import Array


@dataclass(frozen=True)
class ActionLayout:
    """A game's actions as the agent has them.

    Attributes:
        spec: the agent's actions. A joint mask over several components makes them one flat Discrete.
        shape: of the game's own action.
        dtype: of the game's own action.
        low: the game's number for each component's action 0; scalar or `[components]`.
        joint: the components' sizes where `spec` is their flat product, else empty.
        masked: whether the game gives masks.
    """

    spec: ActionSpec
    shape: tuple[int, ...]
    dtype: Any
    low: Any = 0
    joint: tuple[int, ...] = ()
    masked: bool = False

    def to_game(self, action: Array) -> Array:
        """One action of the agent, as `spec` numbers it, as the game takes it."""
        if self.joint:
            action = jnp.stack(jnp.unravel_index(action, self.joint))
        if isinstance(self.spec, MultiDiscrete) or self.joint:
            action = action + self.low
        return action.reshape(self.shape).astype(self.dtype)

    def to_agent(self, mask: Array) -> Array:
        """The game's mask as a bool vector: joint, or the components' masks one after another."""
        if isinstance(self.spec, MultiDiscrete):
            sizes = self.spec.nvec
            mask = jnp.concatenate([row[:n] for row, n in zip(mask.reshape(len(sizes), -1), sizes, strict=True)])
        return mask.reshape(-1).astype(jnp.bool_)


def layout_of(action: Any, mask_shape: tuple[int, ...] | None, game: str) -> ActionLayout:
    """The layout of a game's actions.

    Args:
        action: Jumanji's action spec: DiscreteArray, MultiDiscreteArray or BoundedArray.
        mask_shape: of the observation's action mask; None where there is none.
        game: for messages.

    Raises:
        ConfigError: actions that are none of these, or a mask that does not fit them in exactly one way.
    """
    if not hasattr(action, "minimum"):
        raise ConfigError(f"Jumanji.game = {game!r}: actions {action} have no bounds")
    shape, dtype = tuple(action.shape), np.dtype(action.dtype)
    low, high = (np.broadcast_to(np.asarray(x), shape).ravel() for x in (action.minimum, action.maximum))
    if not np.issubdtype(dtype, np.integer):
        if mask_shape is not None:
            raise ConfigError(f"Jumanji.game = {game!r}: an action mask {mask_shape} over continuous actions {shape}")
        return ActionLayout(Box(tuple(low.astype(float).tolist()), tuple(high.astype(float).tolist())), shape, dtype)
    sizes = tuple((high.astype(int) - low + 1).tolist())
    if not shape:
        _require(mask_shape in (None, sizes), mask_shape, sizes, game)
        return ActionLayout(Discrete(sizes[0], start=int(low[0])), shape, dtype, masked=mask_shape is not None)
    if mask_shape is not None and not hasattr(action, "num_values") and mask_shape[:-1] == shape:
        # Bounds may be wider than what is ever legal (MultiCVRP's by one); the mask has a column for each real action.
        sizes = tuple(min(n, mask_shape[-1]) for n in sizes)
    joint = mask_shape == sizes
    each = mask_shape == (*shape, max(sizes))
    _require(mask_shape is None or joint != each, mask_shape, sizes, game)
    layout = {"shape": shape, "dtype": dtype, "low": low if low.any() else 0, "masked": mask_shape is not None}
    if joint:
        return ActionLayout(Discrete(int(np.prod(sizes))), joint=sizes, **layout)
    return ActionLayout(MultiDiscrete(sizes), **layout)


def _require(fits: bool, mask_shape: Any, sizes: tuple[int, ...], game: str) -> None:
    if not fits:
        both = " both ways" if mask_shape == sizes else ""
        raise ConfigError(
            f"Jumanji.game = {game!r}: its action mask {mask_shape} must be joint {sizes} or one row a component "
            f"({len(sizes)}, {max(sizes)}), and fit in one of the two ways only; it fits{both or ' neither'}"
        )

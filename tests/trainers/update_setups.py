"""Updates of bare parameters `w` by losses that count or stop, and the trajectory they learn from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from learner_setups import mesh_of

from flaxrl.losses.base import Loss
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.sharding import to_global
from flaxrl.trainers.update import make_update
from flaxrl.types import FIRST, LAST, MID, AgentInput, TrainState, Trajectory

SGD = Optimizer("sgd", learning_rate=1.0)
TIME, BATCH = 3, 8


def trajectory(mesh: Any, reward: Any = None, discount: float = 1.0, last: tuple[int, int] | None = None) -> Trajectory:
    """Reward of env b is b in every row unless given."""
    reward = np.broadcast_to(np.arange(BATCH) if reward is None else reward, (TIME, BATCH)).astype(np.float32)
    step_type = np.full((TIME + 1, BATCH), MID, np.int8)
    if last is not None:
        step_type[last], step_type[last[0] + 1, last[1]] = LAST, FIRST
    zeros = np.zeros((TIME, BATCH), np.float32)
    made = Trajectory(
        inputs=AgentInput(np.zeros((TIME + 1, BATCH, 1), np.float32), step_type),
        action=zeros.astype(np.int32),
        reward=reward,
        discount=zeros + np.float32(discount),
        log_prob=zeros,
        value=zeros,
        carry=np.zeros((1, BATCH, 2), np.float32),
    )
    return to_global(made, mesh)


def start(
    loss: Loss, size: int, optimizer: Optimizer = SGD, devices: int = 1, total: int = 100, **settings: Any
) -> Any:
    """(state, jitted update, mesh) for parameters w, `size` zeros."""
    mesh = mesh_of(devices)[1]
    state = TrainState.init(lambda: None, {"params": {"w": jnp.zeros(size)}}, optimizer.make(), loss.uses_target)
    update = make_update(
        loss,
        lambda variables: lambda params, batch, rngs=None: None,  # type: ignore[arg-type,return-value]
        mesh,
        learning_rate=optimizer.learning_rate_at,
        progress=lambda updates: updates / total,
        **settings,
    )
    return state, jax.jit(update), mesh

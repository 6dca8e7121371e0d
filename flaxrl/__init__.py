"""flaxrl: reinforcement learning with Flax Linen agents, one Trainer, and losses picked by config.

The names here are what a config, a loss, an env or a notebook needs; what is slow to import waits for its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flaxrl import losses
from flaxrl.build import config_for
from flaxrl.configuration import run_config
from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.envs.spec import ArraySpec, Box, Discrete, EnvSpec, MultiDiscrete
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.losses.base import Loss, Unroll
from flaxrl.types import (
    FIRST,
    LAST,
    MID,
    AgentInput,
    LossOutput,
    Output,
    Timestep,
    TrainState,
    Trajectory,
    masked_mean,
)

if TYPE_CHECKING:
    from flaxrl.processes import connect
    from flaxrl.trainers.loading import LoadedAgent, load
    from flaxrl.trainers.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "FIRST",
    "LAST",
    "MID",
    "AgentInput",
    "ArraySpec",
    "Box",
    "ConfigError",
    "Discrete",
    "EnvSpec",
    "HostEnv",
    "JaxEnv",
    "LoadedAgent",
    "Loss",
    "LossOutput",
    "MultiDiscrete",
    "Output",
    "Timestep",
    "TrainState",
    "Trainer",
    "TrainingError",
    "Trajectory",
    "Unroll",
    "config_for",
    "connect",
    "load",
    "losses",
    "masked_mean",
    "run_config",
]

_LAZY = {
    "Trainer": "flaxrl.trainers.trainer",
    "load": "flaxrl.trainers.loading",
    "LoadedAgent": "flaxrl.trainers.loading",
    "connect": "flaxrl.processes",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flaxrl' has no attribute {name!r}")

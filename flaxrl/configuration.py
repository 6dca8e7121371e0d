"""The top level of a config: the same fields in every run, and the settings blocks that have no class to plug in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ml_collections import config_dict

from flaxrl import checks
from flaxrl.build import Config, config_for
from flaxrl.errors import ConfigError

TOP_LEVEL = (
    "seed",
    "num_seeds",
    "sweep",
    "total_steps",
    "env",
    "model",
    "loss",
    "optimizer",
    "source",
    "learner",
    "mesh",
    "log",
    "eval",
    "checkpoint",
)

LATER: dict[str, Any] = {"num_seeds": 1, "sweep": {}}
"""Top-level fields that stored configs of earlier runs lack, and what they mean there."""


@dataclass(frozen=True)
class LearnerSettings:
    """How one trajectory becomes gradient steps.

    Attributes:
        epochs: passes over the trajectory.
        minibatches: parts a pass is split into (along B for sequence losses, over T x B rows for step losses).
        accumulation: pieces that a minibatch's forward and backward pass is split into, one after another, to save
            memory; the numbers are those of the whole minibatch. Costs a second forward pass.
        target_period: optimizer steps between copies to the target network; None for losses without one.
        reward_scaling: rewards are divided by the running deviation of the return discounted by this gamma, whatever
            the loss; None leaves them as they are. Metrics stay raw.
        reward_clip: scaled rewards are clipped to +- this; None leaves them. Without `reward_scaling` it stays at its
            default: raw rewards are clipped by `loss.max_abs_reward`.
        max_skipped: the run ends at a log where this many of the newest gradient steps, or more, were not finite.
    """

    epochs: int = 1
    minibatches: int = 1
    accumulation: int = 1
    target_period: int | None = None
    reward_scaling: float | None = None
    reward_clip: float | None = 10.0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        checks.positive(self, "epochs", "minibatches", "accumulation", "target_period", "max_skipped", "reward_clip")
        checks.in_range(self, "reward_scaling", low=0, high=1)
        usual = type(self).reward_clip
        if self.reward_scaling is None and self.reward_clip != usual:
            raise ConfigError(
                f"LearnerSettings.reward_clip = {self.reward_clip} clips scaled rewards, and reward_scaling = None "
                f"scales none: set reward_scaling too, or leave reward_clip = {usual} and set loss.max_abs_reward"
            )


@dataclass(frozen=True)
class MeshSettings:
    """The device mesh; -1 takes the devices that are left.

    Attributes:
        data: devices that split the batch and hold whole parameters.
        fsdp: devices that split the batch and also the parameters named by `rules`.
        rules: (regex on the parameter path, 'fsdp' or 'replicated') pairs; the first match wins, else replicated.
    """

    data: int = -1
    fsdp: int = 1
    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("data", "fsdp"):
            if getattr(self, name) != -1:
                checks.positive(self, name)
        for rule in self.rules:
            if rule[1] not in ("fsdp", "replicated"):
                raise ConfigError(f"mesh.rules holds {rule!r}; a rule is (regex, 'fsdp') or (regex, 'replicated')")
            try:
                re.compile(rule[0])
            except re.error as error:
                raise ConfigError(f"mesh.rules holds {rule[0]!r}, which is no regular expression: {error}") from error


@dataclass(frozen=True)
class LogSettings:
    """Metrics output.

    Attributes:
        every: steps between two lines of metrics.
        writers: 'json_lines', 'tensorboard' or 'package.module:Class', any number of them.
    """

    every: int = 10_000
    writers: tuple[str, ...] = ("json_lines", "tensorboard")

    def __post_init__(self) -> None:
        checks.positive(self, "every")


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation on envs of its own: whole episodes, raw scores.

    Attributes:
        every: steps between evaluations; None only evaluates at the end.
        episodes: episodes an evaluation, one from each of as many seeds.
        greedy: the policy's mode; False samples from it.
        seed: env i starts from a seed that follows from this one and i, the same at each evaluation.
        video_episodes: how many of the episodes are filmed: at each evaluation of a training run for TensorBoard, where
            0 films none, and for the file that `--video` names, where 0 stands for 3 (or all, where there are fewer).
        video_frames: most frames of one episode; of a longer one every second, fourth, ... step is shown.
    """

    every: int | None = None
    episodes: int = 10
    greedy: bool = True
    seed: int = 1_000_003
    video_episodes: int = 0
    video_frames: int = 500

    def __post_init__(self) -> None:
        checks.positive(self, "every", "episodes")
        checks.non_negative(self, "seed", "video_episodes")
        checks.in_range(self, "video_frames", low=2)
        if self.video_episodes > self.episodes:
            raise ConfigError(
                f"EvalSettings.video_episodes = {self.video_episodes} must be <= its episodes = {self.episodes}"
            )


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints: the latest few and the best, kept apart.

    Attributes:
        every: steps between two saves; None only saves at the end and on interruption.
        keep: how many of the latest stay.
        keep_best: how many of the best (by mean evaluation return) stay.
    """

    every: int | None = 500_000
    keep: int = 2
    keep_best: int = 1

    def __post_init__(self) -> None:
        checks.positive(self, "every", "keep", "keep_best")


def is_many(config: Any) -> bool:
    """Whether a config asks for a program of many seeds; one with a sweep of a single value is such a one too."""
    return config.num_seeds != 1 or config.num_seeds is True or bool(config.sweep)


def run_config(**fields: Any) -> Config:
    """A whole run's config: the given top-level fields, defaults for the rest, locked.

    Args:
        **fields: any of `TOP_LEVEL`; blocks come from `config_for`.

    Raises:
        ConfigError: on an unknown or missing field.
    """
    for key in fields:
        if key not in TOP_LEVEL:
            raise ConfigError(f"config has no field {key!r}; {checks.nearest(key, TOP_LEVEL)}")
    missing = [k for k in ("env", "model", "loss", "source") if k not in fields]
    if missing:
        raise ConfigError(f"config needs {', '.join(missing)}, each made by flaxrl.config_for(...)")
    defaults: dict[str, Any] = {"seed": 0, **LATER, "total_steps": 1_000_000}
    defaults |= {k: config_for(k) for k in ("optimizer", "learner", "mesh", "log", "eval", "checkpoint")}
    # Without conversion `sweep` stays a dict: its keys have dots, which a ConfigDict does not take.
    config = config_dict.ConfigDict(convert_dict=False)
    for key in TOP_LEVEL:
        value = fields[key] if key in fields else defaults[key]
        if isinstance(value, dict):
            value = dict(value) if key == "sweep" else config_dict.ConfigDict(value)
        config[key] = value
    return config.lock()

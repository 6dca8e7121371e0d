"""What `main.py` can be asked for, and which flags go with it."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from flaxrl.errors import ConfigError

MODES = ("train", "eval", "plot")

_ONLY = {
    "video": ("eval", "films an evaluation"),
    "eval_seed": ("eval", "chooses what is evaluated"),
    "eval_setting": ("eval", "chooses what is evaluated"),
    "out": ("plot", "names a plot's picture"),
    "stopped_exit_code": ("train", "is the exit status of training that a signal stopped"),
}
"""Flag -> the mode that it belongs to, and what it does there."""


def check(mode: str, flag_values: flags.FlagValues, overrides: Sequence[str]) -> None:
    """Checks that the flags given belong to the mode.

    Args:
        mode: one of `MODES`.
        flag_values: the parsed flags, `workdir` a list, those of `_ONLY` None where they were not given.
        overrides: 'a.b=value' each, of --config.a.b=value.

    Raises:
        ConfigError: naming the flag that is missing, out of place or out of range.
    """
    for name, (owner, what) in _ONLY.items():
        if flag_values[name].value is not None and mode != owner:
            remedy = "leave it out" if owner == "train" else f"add --mode={owner}"
            raise ConfigError(f"--{name} {what}; with --mode={mode} it has no meaning: {remedy}")
    status = flag_values["stopped_exit_code"].value
    if status is not None and not 0 <= status <= 255:
        raise ConfigError(f"--stopped_exit_code={status} must be 0 to 255; the nearest is {min(max(status, 0), 255)}")
    if mode == "train":
        return
    if not any(flag_values["workdir"].value or ()):
        needed = {"eval": "the folder of the run to evaluate", "plot": "a folder of runs, as often as you like"}
        raise ConfigError(f"--mode={mode} needs --workdir, {needed[mode]}")
    if mode == "plot":
        if overrides:
            raise ConfigError(
                f"--config.{overrides[0]} has no meaning with --mode=plot, which reads what runs have left"
            )
        for name in ("config", "coordinator", "num_processes", "process_id"):
            if flag_values[name].value is not None:
                raise ConfigError(f"--{name} has no meaning with --mode=plot, which reads what runs have left")


def one_workdir(workdirs: Sequence[str] | None) -> str | None:
    """The one folder given, or None.

    Raises:
        ConfigError: there are several.
    """
    if not workdirs:
        return None
    if len(workdirs) > 1:
        raise ConfigError(f"--workdir is given {len(workdirs)} times; only --mode=plot takes more than one")
    return workdirs[0]

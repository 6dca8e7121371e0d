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
}
"""Flag -> the mode that it belongs to, and what it does there."""


def check(mode: str, flag_values: flags.FlagValues, overrides: Sequence[str]) -> None:
    """Checks that the flags given belong to the mode.

    Args:
        mode: one of `MODES`.
        flag_values: the parsed flags, `workdir` a list.
        overrides: 'a.b=value' each, of --config.a.b=value.

    Raises:
        ConfigError: naming the flag that is missing or out of place.
    """
    for name, (owner, what) in _ONLY.items():
        if flag_values[name].value is not None and mode != owner:
            raise ConfigError(f"--{name} {what}; with --mode={mode} it has no meaning: add --mode={owner}")
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

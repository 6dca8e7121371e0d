"""How what one process of a run was given differs from what the others were; told in one line."""

from __future__ import annotations

from typing import Any

from flaxrl.run_folder import differences


def config_difference(configs: list[dict[str, Any]]) -> str | None:
    """Where the processes' configs are not the same; None where they are."""
    for i, config in enumerate(configs):
        differing = differences(configs[0], config)
        if differing:
            return f"process {i} was given another config than process 0; they differ in {', '.join(differing)}"
    return None


def value_difference(what: str, values: list[str | None]) -> str | None:
    """Which process has another value of `what` than process 0; None where all have the same."""
    for i, value in enumerate(values):
        if value != values[0]:
            first, its = ("none" if each is None else repr(each) for each in (values[0], value))
            return f"{what} differs between processes: {first} in process 0, {its} in process {i}; give all the same"
    return None

"""`config.sweep`: float hyper-parameters of loss and optimizer that differ between the runs of one program."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxrl import build, checks
from flaxrl.errors import ConfigError
from flaxrl.losses.base import with_values
from flaxrl.types import Array

BLOCKS = ("loss", "optimizer")
"""Blocks of the config whose floats can be swept: they enter the program as numbers and change nothing else in it."""


@dataclass(frozen=True)
class Sweep:
    """A grid: every value of each field with every value of the others; without fields, one setting, of nothing.

    Attributes:
        paths: swept fields, 'optimizer.learning_rate'.
        settings: their values, in the order of the grid: the last field changes fastest.
    """

    paths: tuple[str, ...] = ()
    settings: tuple[tuple[float, ...], ...] = ((),)

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each setting, as metrics carry it: 'learning_rate=0.001,entropy_cost=0.01'."""
        short = [path.rpartition(".")[2] for path in self.paths]
        names = short if len(set(short)) == len(short) else self.paths
        return tuple(",".join(f"{n}={v!r}" for n, v in zip(names, values, strict=True)) for values in self.settings)

    def columns(self) -> dict[str, np.ndarray]:
        """Field -> its float32 value in each setting, `[S]`."""
        table = np.asarray(self.settings, np.float32).reshape(len(self.settings), len(self.paths))
        return {path: table[:, i] for i, path in enumerate(self.paths)}

    def lines(self) -> list[str]:
        """The fields with their values, as a person reads them."""
        columns = zip(*self.settings, strict=True)
        return [
            f"{path} {', '.join(f'{v:g}' for v in dict.fromkeys(column))}"
            for path, column in zip(self.paths, columns, strict=True)
        ]


def swept(block: str, owner: Any, values: Mapping[str, Array]) -> Any:
    """A copy of a loss or an optimizer with swept fields, which may be values of a trace.

    They are not checked again, since a trace does not know the numbers: `make_sweep` has checked each of them.

    Args:
        block: 'loss' or 'optimizer', which `owner` is built from.
        owner: a dataclass.
        values: path -> scalar; those of other blocks are passed over.
    """
    fields: dict[str, Any] = {}
    for path, value in values.items():
        head, *inner, field = path.split(".")
        if head != block:
            continue
        if inner:  # a key of a field that is a dict, such as optimizer.args.eps
            field, value = inner[0], {**fields.get(inner[0], getattr(owner, inner[0])), field: value}
        fields[field] = value
    return with_values(owner, **fields)


def make_sweep(config: Any) -> Sweep:
    """The grid of a config, each setting of it checked as the config itself would be.

    Raises:
        ConfigError: a field that cannot be swept, with the nearest that can; no values; a value that breaks a rule.
    """
    fields = config.sweep or {}
    if not isinstance(fields, Mapping) and not hasattr(fields, "items"):
        raise ConfigError(
            f"config.sweep = {fields!r} must be a dict of field -> values: {{'optimizer.learning_rate': (1e-3, 3e-4)}}"
        )
    grid = {path: _values(config, path, values) for path, values in fields.items()}
    sweep = Sweep(tuple(grid), tuple(itertools.product(*grid.values())))
    for values, label in zip(sweep.settings, sweep.labels, strict=True):
        setting = dict(zip(grid, values, strict=True))
        for block in BLOCKS if grid else ():
            try:
                made = build.build(_changed(config[block], block, setting), f"config.{block}")
            except ConfigError as error:
                raise ConfigError(f"config.sweep, setting {label}: {error}") from error
            if any(path.startswith(f"{block}.") for path in grid):
                _check_fields_only(made)
    return sweep


def _check_fields_only(owner: Any) -> None:
    """Checks that a swept object keeps nothing that `__post_init__` computed: `swept` would leave it as it was."""
    others = sorted(vars(owner).keys() - {field.name for field in dataclasses.fields(owner) if field.init})
    if others:
        name = type(owner).__name__
        raise ConfigError(
            f"config.sweep cannot have fields of {name}, which keeps {', '.join(others)} beside its fields, made "
            "before there is a swept value: compute it where it is used, or start one run for each value"
        )


def _values(config: Any, path: str, values: Any) -> tuple[float, ...]:
    """The values of one field of the grid."""
    known = {f"{block}.{name}": value for block in BLOCKS for name, value in _floats(config[block]).items()}
    if path not in known:
        raise ConfigError(
            f"config.sweep has {path!r}, which is no float of {' or '.join(BLOCKS)}; {checks.nearest(path, known)}"
        )
    if known[path] is None:
        raise ConfigError(
            f"config.sweep has {path!r}, which is off in this config ({path} = None): a program has it on or off for "
            "all its runs; give the field itself a number"
        )
    if not isinstance(values, (tuple, list)) or not values:
        raise ConfigError(f"config.sweep: {path} = {values!r} must be a list of at least one number")
    for value in values:
        if not checks.matches(value, float) or value != value:
            raise ConfigError(f"config.sweep: {path} holds {value!r}, which is no number")
    if len(set(values)) < len(values):
        raise ConfigError(f"config.sweep: {path} holds a value twice: {', '.join(map(str, values))}")
    return tuple(map(float, values))


def _floats(block: Any) -> dict[str, float | None]:
    """The float fields of a block, those in a field that is a dict too ('args.eps')."""
    hints = build.annotations_of(build.resolve(block["name"]))
    found: dict[str, float | None] = {}
    for name in block:
        value, hint = block[name], hints.get(name)
        if hint is float or (float in typing.get_args(hint) and checks.matches(value, float | None)):
            found[name] = value
        elif hasattr(value, "items") and not build.is_block(value):
            found |= {f"{name}.{k}": v for k, v in value.items() if isinstance(v, float)}
    return found


def _changed(block: Any, head: str, values: Mapping[str, float]) -> dict[str, Any]:
    """A block with the values of one setting."""
    changed: dict[str, Any] = {name: block[name] for name in block}
    for path, value in values.items():
        first, *inner, field = path.split(".")
        if first != head:
            continue
        if inner:
            field, value = inner[0], {**{k: changed[inner[0]][k] for k in changed[inner[0]]}, field: value}
        changed[field] = value
    return changed

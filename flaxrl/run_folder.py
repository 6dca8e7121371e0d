"""The folder of a run: its resolved config, what it was last trained with, and how far its evaluations came."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import config_dict

from flaxrl import build, checks
from flaxrl.configuration import LATER
from flaxrl.errors import ConfigError

FREE = ("total_steps", "log", "eval", "checkpoint", "mesh", "learner.accumulation")
"""Fields and blocks that may change when a run goes on: they do not change what was learned so far."""

_PACKAGES = ("flaxrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_ABSENT = "(absent)"


class RunFolder:
    """A run's folder, which need not be there yet.

    Args:
        workdir: path of the folder.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self.path = Path(workdir)
        self._config = self.path / "config.json"
        self._evaluated = self.path / "evaluated.json"

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return self._config.is_file()

    def check(self, config: build.Config) -> None:
        """Checks that a run of `config` may start, or go on, here; writes nothing.

        Raises:
            ConfigError: the folder holds something else, or a run whose config differs outside `FREE`.
        """
        if not self.has_run:
            self._check_usable()
            return
        changes = [
            f"{path} {_show(old)} -> {_show(new)}"
            for path, (old, new) in differences(self._completed(), plain(config)).items()
            if not _free(path)
        ]
        if changes:
            raise ConfigError(
                f"{self.path} holds a run of another config: {', '.join(changes)}; set these back to resume it, "
                f"or start a new run with another --workdir (these may change: {', '.join(FREE)})"
            )

    def match(self, config: build.Config) -> None:
        """Starts a run of `config` here, or checks that the one here is of the same and stores changed `FREE` fields.

        Of several processes process 0 alone calls it: to the others the folder may look half made meanwhile.

        Args:
            config: the resolved config.

        Raises:
            ConfigError: as `check`; a value that cannot be stored.
        """
        self.check(config)
        self.path.mkdir(parents=True, exist_ok=True)
        new = plain(config)
        if not self.has_run or self._read() != new:
            _write_json(self._config, new)
        _write_json(self.path / "versions.json", versions())

    def load_config(self) -> build.Config:
        """The stored config, locked; its optional fields take None or a value, as those of `config_for` do.

        Raises:
            ConfigError: no run here; a stored field that its class no longer has.
        """
        if not self.has_run:
            raise ConfigError(f"{self.path} holds no run (no config.json){self._nearby()}")
        try:
            config = _typed(self._read())
        except ConfigError as error:
            raise ConfigError(f"{self._config}: {error}") from error
        config.lock()
        return config

    def fields(self) -> dict[str, Any]:
        """The stored config as dotted path -> value; a class of the user's need not be there any more.

        Raises:
            ConfigError: no run here.
        """
        if not self.has_run:
            raise ConfigError(f"{self.path} holds no run (no config.json){self._nearby()}")
        return flatten(self._completed())

    def evaluated(self, step: int) -> bool:
        """Whether all evaluations that were due up to `step` are done, as far as the folder tells.

        A folder of a version that noted none tells it by its `metrics.jsonl`.
        """
        noted = self._noted()
        if noted is not None:
            return step <= noted
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return any(f'"step": {step},' in line and '"eval/return_mean"' in line for line in lines)

    def note_evaluated(self, step: int) -> None:
        """Notes that all evaluations that were due up to `step` are done."""
        _write_json(self._evaluated, {"step": step})

    def forget_evaluations_beyond(self, step: int) -> None:
        """A run starts, or goes on, at `step`: evaluations that are noted beyond it are to be done again."""
        noted = self._noted()
        if step == 0 or (noted is not None and noted > step):
            self.note_evaluated(step)

    def load_versions(self) -> dict[str, str]:
        """Package -> version that last trained here; empty where that was not stored."""
        path = self.path / "versions.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def _noted(self) -> int | None:
        """The step up to which all evaluations are noted as done."""
        if not self._evaluated.is_file():
            return None
        try:
            return int(json.loads(self._evaluated.read_text())["step"])
        except (ValueError, TypeError, KeyError):
            return None  # then one evaluation may be done twice, which changes nothing

    def _read(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._config.read_text())
        except ValueError as error:
            raise ConfigError(f"{self._config} is damaged: {error}; move it away or take another --workdir") from error
        if not isinstance(stored, dict):
            raise ConfigError(f"{self._config} is not the config of a run; take another --workdir")
        return _tupled(LATER | stored)

    def _completed(self) -> dict[str, Any]:
        """The stored config, with fields that came later at their defaults; as it is where one of its own is gone."""
        stored = self._read()
        try:
            return plain(_typed(stored))
        except ConfigError:
            return stored

    def _check_usable(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--workdir={self.path} is a file; give a folder")
        found = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".")) if self.path.is_dir() else []
        if found:
            some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise ConfigError(f"{self.path} is no run's folder: it holds {some} but no config.json; give an empty one")

    def _nearby(self) -> str:
        """Runs inside or beside this path, for the message."""
        inside = sorted(str(p.parent) for p in self.path.glob("*/config.json"))
        if inside:
            return f"; did you mean {inside[-1]!r}?"
        beside = [str(p.parent) for p in self.path.parent.glob("*/config.json")]
        return f"; {checks.nearest(str(self.path), beside)}" if beside else ""


def _free(path: str) -> bool:
    """Whether a dotted path is in `FREE`, or in a block that is."""
    return any(path == free or path.startswith(f"{free}.") for free in FREE)


def plain(config: Any, where: str = "config") -> Any:
    """A config as nested dicts of what JSON can hold, references resolved, tuples for all sequences.

    Raises:
        ConfigError: NaN, or a value that cannot be stored.
    """
    if isinstance(config, (config_dict.ConfigDict, dict)):
        return {str(k): plain(config[k], f"{where}.{k}") for k in config}
    if isinstance(config, (tuple, list)):
        return tuple(plain(v, f"{where}[{i}]") for i, v in enumerate(config))
    if isinstance(config, np.generic):
        return plain(config.item(), where)
    if isinstance(config, float) and math.isnan(config):
        raise ConfigError(f"{where} is NaN; give a number")
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    raise ConfigError(f"{where} = {config!r} cannot be stored; use numbers, text, tuples, None and config_for blocks")


def check_values(config: config_dict.ConfigDict) -> None:
    """Checks that every value can be stored and none is NaN."""
    plain(config)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one: dotted path -> value."""
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where two nested dicts differ: dotted path -> the two values, sorted; a field that is None is not one absent."""
    flat_old, flat_new = flatten(old), flatten(new)
    pairs = {
        path: (flat_old.get(path, _ABSENT), flat_new.get(path, _ABSENT))
        for path in sorted(flat_old.keys() | flat_new.keys())
    }
    return {path: pair for path, pair in pairs.items() if not _same(*pair)}


def versions() -> dict[str, str]:
    """Package -> installed version, and Python's."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "not installed"
    return found


def _typed(stored: dict[str, Any]) -> config_dict.ConfigDict:
    """Nested dicts -> the ConfigDict that config_for would make of them, fields added since then at their defaults."""
    raw = build.raw_fields(build.resolve(stored["name"])) if "name" in stored else {"sweep"}
    fields: dict[str, Any] = {k: _typed(v) if isinstance(v, dict) and k not in raw else v for k, v in stored.items()}
    if "name" not in fields:
        return config_dict.ConfigDict(fields, convert_dict=False)
    return build.config_for(fields.pop("name"), **fields)


def _tupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tupled(v) for k, v in value.items()}
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _same(a: Any, b: Any) -> bool:
    """Equal, and not one a bool and the other a number."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _show(value: Any) -> str:
    return value if value is _ABSENT else repr(value)


def _write_json(path: Path, content: Any) -> None:
    """Writes all or nothing: a run that is killed in between keeps its old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

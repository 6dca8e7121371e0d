"""Checkpoints as files: numbered step directories that appear whole, are checked before use, and go when replaced.

    <directory>/latest/<step>/        the newest steps            <directory>/best/<step>/    the best values
        state/, snapshot/             arrays, written by orbax
        meta.json                     what the caller saved: resolved config, counters
        index.json                    step, value, name -> 'dtype[shape]' of every entry, size and CRC-32 of every file

A step is written under another name (`<step>.partial`) and renamed when everything is on disk, so whatever carries a
plain number was complete once; what happened to it since, sizes and checksums tell. Other suffixes: `.broken` was found
damaged and set aside, `.old` is being replaced, `.trash` is being deleted.

A directory on a POSIX file system, shared by all processes. Only the primary process calls what writes, renames or
deletes. Needs neither jax nor orbax.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from flaxrl import checks
from flaxrl.errors import ConfigError

SERIES = ("latest", "best")
_INDEX, _META = "index.json", "meta.json"
_CHUNK = 1 << 24  # bytes read at a time for a checksum


class Series:
    """The step directories of one series; 'latest' is ordered by step, 'best' by value.

    Args:
        directory: the run's checkpoint directory; the series is a folder in it.
        name: 'latest' or 'best'.
        keep: how many complete steps stay, > 0.

    Raises:
        ConfigError: on an unknown name or `keep` < 1.
    """

    def __init__(self, directory: Path | str, name: str, keep: int = 1):
        if name not in SERIES:
            raise ConfigError(f"checkpoint series {name!r} is unknown; {checks.nearest(name, SERIES)}")
        if keep < 1:
            raise ConfigError(f"checkpoints kept of series {name!r} = {keep} must be >= 1")
        # orbax refuses relative paths
        self.name, self.keep, self.folder = name, keep, Path(directory).expanduser().absolute() / name

    def path(self, step: int, suffix: str = "") -> Path:
        """Directory of a step, or with `suffix` its stand-in ('.partial', '.broken', ...)."""
        return self.folder / f"{step}{suffix}"

    def steps(self) -> list[int]:
        """All numbered directories, complete or not, the one to restore first in front."""
        if not self.folder.is_dir():
            return []
        found = [int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir()]
        return sorted(found, key=self._rank, reverse=True)

    def complete(self) -> list[int]:
        """The steps whose index can be read, the one to restore first in front; files are not verified."""
        return [step for step in self.steps() if isinstance(self.index(step), dict)]

    def best_value(self) -> float | None:
        """Highest value among the complete steps, None where there is none."""
        values = [index["value"] for index in map(self.index, self.steps()) if isinstance(index, dict)]
        return max((v for v in values if v is not None), default=None)

    def index(self, step: int) -> dict[str, Any] | str:
        """Contents of a step's index.json, or in words why it cannot be used."""
        file = self.path(step) / _INDEX
        try:
            index = json.loads(file.read_text())
        except FileNotFoundError:
            return f"it has no {_INDEX} (a save that did not finish, or a foreign directory)"
        except (OSError, ValueError) as error:
            return f"its {_INDEX} cannot be read ({type(error).__name__}: {error})"
        if not isinstance(index, dict) or not {"step", "value", "entries", "files"} <= set(index):
            return f"its {_INDEX} is not the index of a checkpoint"
        return index

    def verified_index(self, step: int) -> dict[str, Any] | str:
        """As `index`, after reading every file back and comparing size and checksum."""
        index = self.index(step)
        if isinstance(index, str):
            return index
        for name, (size, checksum) in index["files"].items():
            file = self.path(step) / name
            if not file.is_file():
                return f"its file {name} is missing"
            if file.stat().st_size != size:
                return f"its file {name} has {file.stat().st_size} bytes, not {size}"
            if _checksum(file) != checksum:
                return f"its file {name} is corrupt (CRC-32 differs)"
        return index

    def meta(self, step: int) -> dict[str, Any]:
        """The caller's meta dict of a complete step."""
        return json.loads((self.path(step) / _META).read_text())

    def prepare(self, step: int) -> Path:
        """Makes room for writing a step; returns the directory (not there yet) to write into."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        return self.path(step, ".partial")

    def publish(self, step: int, meta_text: str, index: dict[str, Any]) -> None:
        """Completes `<step>.partial`: meta, checksums, flush to disk, the final name; then deletes what is surplus."""
        partial, final = self.path(step, ".partial"), self.path(step)
        (partial / _META).write_text(meta_text)
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        sums = {p.relative_to(partial).as_posix(): (p.stat().st_size, _checksum(p)) for p in files}
        (partial / _INDEX).write_text(json.dumps(index | {"files": sums}, indent=1))
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        if final.exists():
            replaced = _free(self.path(step, ".old"))
            final.rename(replaced)
        partial.rename(final)
        _flush(self.folder)
        shutil.rmtree(self.path(step, ".old"), ignore_errors=True)
        self._retain(step)

    def set_aside(self, step: int) -> Path | None:
        """Renames a broken step to `<step>.broken`; None where that is impossible (read-only, or gone meanwhile)."""
        try:
            return self.path(step).rename(_free(self.path(step, ".broken")))
        except OSError:
            return None

    def recover(self) -> None:
        """Gives a step back its name where a kill struck between the two renames that replace it."""
        for old in self.folder.glob("*.old"):
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))

    def _rank(self, step: int) -> tuple[float, int]:
        if self.name == "latest":
            return (0.0, step)
        index = self.index(step)
        # the unreadable come first, so that they are noticed
        value = index["value"] if isinstance(index, dict) else None
        return (float("inf") if value is None else value, step)

    def _retain(self, saved: int) -> None:
        """Deletes all but `keep` complete steps; of 'latest', never a step newer than the one just saved."""
        steps = [s for s in self.complete() if self.name == "best" or s <= saved]
        for step in steps[self.keep :]:
            # a kill in the middle of a deletion must not leave half a step under its number
            trash = self.path(step).rename(_free(self.path(step, ".trash")))
            shutil.rmtree(trash, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes what killed saves and deletions left behind. Only for the one run that writes here."""
        self.recover()
        for pattern in ("*.partial*", "*.trash", "*.old"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


def read_meta(directory: Path | str, which: str = "latest") -> dict[str, Any]:
    """The meta dict saved with the newest or the best checkpoint: resolved config, counters, versions.

    Args:
        directory: a run's checkpoint directory.
        which: 'latest' or 'best'.

    Raises:
        ConfigError: where there is no complete checkpoint.
    """
    series = Series(directory, which)
    steps = series.complete()
    if not steps:
        raise ConfigError(f"{series.folder} holds no complete checkpoint")
    return series.meta(steps[0])


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            crc = zlib.crc32(block, crc)
    return crc


def _flush(path: Path) -> None:
    """Forces a file or directory entry to disk, so that the rename cannot overtake the data in a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(path: Path) -> Path:
    """`path`, after removing what a former run left there."""
    shutil.rmtree(path, ignore_errors=True)
    return path

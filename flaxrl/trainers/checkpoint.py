"""Saves and restores a run: asynchronously, atomically, in two series whose retention does not interfere."""

from __future__ import annotations

import json
import logging as python_logging
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers import checkpoint_tree
from flaxrl.trainers.checkpoint_layout import SERIES, Series, read_meta
from flaxrl.types import PyTree

__all__ = ["Checkpointer", "Restored", "read_meta"]


class Restored(NamedTuple):
    """A checkpoint read back: the state, the source's snapshot (None where not asked for), and the meta dict."""

    step: int
    state: PyTree
    snapshot: PyTree | None
    meta: dict[str, Any]


class Checkpointer:
    """Writes and reads the checkpoints of one run; every process of the run calls the same methods in the same order.

    `close` before the program ends: a save still in progress when the interpreter shuts down is lost.

    Args:
        directory: holds `latest/<step>/` and `best/<step>/` (see checkpoint_layout); made when first saved into.
        keep: how many of the newest steps stay, > 0.
        keep_best: how many of the best stay, > 0.
        read_only: only restores, and leaves a damaged step where it is: for folders that a run may be writing to.

    Raises:
        ConfigError: `keep` or `keep_best` < 1.
    """

    def __init__(self, directory: Path | str, keep: int = 2, keep_best: int = 1, read_only: bool = False):
        self._repair = not read_only
        self._series = {name: Series(directory, name, n) for name, n in zip(SERIES, (keep, keep_best), strict=True)}
        _quieten_orbax()
        handler = ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(), snapshot=ocp.StandardCheckpointHandler()
        )
        self._orbax = ocp.AsyncCheckpointer(handler)
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self._saved: int | None = None

    def save(self, step: int, state: PyTree, snapshot: PyTree | None, meta: dict[str, Any]) -> None:
        """Saves into the 'latest' series; returns once copies are taken, so the arguments may be donated at once.

        Waits for the save before it. A step this object has just saved is not saved again; one that an earlier run
        left under the same number is replaced when the new one is complete.

        Args:
            step: number of the step, >= 0.
            state: TrainState, or any tree of arrays; costs a copy of itself in host memory while it is written.
            snapshot: the source's tree of arrays (typed keys too), or None.
            meta: JSON-able; Python ints stay exact.

        Raises:
            ConfigError: on leaves that are no arrays or a meta that is not JSON-able.
            Exception: whatever the save before it died of in the background.
        """
        self.wait()
        if step != self._saved:
            self._save(self._series["latest"], step, state, snapshot, meta, None)
            self._saved = step

    def save_best(self, step: int, state: PyTree, snapshot: PyTree | None, meta: dict[str, Any], value: float) -> bool:
        """Saves into the 'best' series if `value` is finite and higher than all values there; says whether it did.

        The other arguments and errors are those of `save`.
        """
        self.wait()
        series = self._series["best"]
        best = _from_primary(series.best_value)
        better = _from_primary(lambda: math.isfinite(value) and (best is None or value > best))
        if better:
            self._save(series, step, state, snapshot, meta, float(value))
        return better

    def restore(self, target_state: PyTree, target_snapshot: PyTree | None, which: str = "latest") -> Restored | None:
        """Reads the newest (or best) checkpoint that is intact.

        A step that is damaged or was never finished is passed over with a warning and set aside as `<step>.broken`.

        Args:
            target_state: the state to be like: arrays, or ShapeDtypeStructs; shapes and dtypes must agree, shardings
                and devices need not be those of the run that saved.
            target_snapshot: likewise; None leaves the saved snapshot unread.
            which: 'latest' or 'best'.

        Returns:
            None where nothing was ever saved.

        Raises:
            ConfigError: the checkpoint holds other entries, shapes or dtypes than the target.
            TrainingError: there are checkpoints, all of them broken.
        """
        self.wait()
        if which not in self._series:
            Series("", which)  # raises, naming the series there are
        series = self._series[which]
        found = _from_primary(lambda: _newest_intact(series, self._repair))
        for step, problem in found["broken"]:
            logging.warning("checkpoint %s is passed over: %s", series.path(step), problem)
        if found["index"] is None:
            if found["broken"]:
                broken = "; ".join(f"{step}: {problem}" for step, problem in found["broken"])
                raise TrainingError(
                    f"all checkpoints in {series.folder} are broken ({broken}); "
                    "restore one from a backup, or move the directory away to start anew"
                )
            return None
        restored = self._read(series, found["step"], found["index"], target_state, target_snapshot)
        if which == "latest":
            self._saved = restored.step
        return restored

    def latest_step(self) -> int | None:
        """Newest complete step on disk, or None; a save in progress does not count yet."""
        return _from_primary(lambda: next(iter(self._series["latest"].complete()), None))

    def best_step(self) -> int | None:
        """Step of the best value on disk, or None; a save in progress does not count yet."""
        return _from_primary(lambda: next(iter(self._series["best"].complete()), None))

    def wait(self) -> None:
        """Returns when everything saved so far is complete on disk; raises what a save died of in the background."""
        job, self._job = self._job, None
        if job is not None:
            try:
                job.result()
            except BaseException:
                self._saved = None
                raise

    def close(self) -> None:
        """As `wait`; then ends the background threads."""
        try:
            self.wait()
        finally:
            self._publisher.shutdown()
            self._orbax.close()

    def _save(
        self,
        series: Series,
        step: int,
        state: PyTree,
        snapshot: PyTree | None,
        meta: dict[str, Any],
        value: float | None,
    ) -> None:
        if step < 0:
            raise ConfigError(f"checkpoint step = {step} must be >= 0")
        try:
            meta_text = json.dumps(meta, indent=1)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"checkpoint meta must be JSON-able: {error}") from error
        trees = {"state": state} if snapshot is None else {"state": state, "snapshot": snapshot}
        index = {
            "step": step,
            "value": value,
            "entries": {name: checkpoint_tree.describe(tree) for name, tree in trees.items()},
        }
        arrays = {name: checkpoint_tree.pack(tree) for name, tree in trees.items()}
        if jax.process_index() == 0:
            series.prepare(step)
        # orbax starts with a barrier: no process can see the directory before the primary has made room
        items = {name: ocp.args.StandardSave(flat) for name, flat in arrays.items() if flat}
        self._orbax.save(series.path(step, ".partial"), ocp.args.Composite(**items))
        self._job = self._publisher.submit(self._publish, series, step, meta_text, index)

    def _publish(self, series: Series, step: int, meta_text: str, index: dict[str, Any]) -> None:
        self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            series.publish(step, meta_text, index)

    def _read(
        self, series: Series, step: int, index: dict[str, Any], target_state: PyTree, target_snapshot: PyTree | None
    ) -> Restored:
        path = series.path(step)
        targets = {"state": target_state}
        if target_snapshot is not None:
            targets["snapshot"] = target_snapshot
        for name, target in targets.items():
            what = f"checkpoint {path} does not fit this run's {name}"
            if name not in index["entries"]:
                raise ConfigError(f"{what}: it was saved without one")
            checkpoint_tree.compare(index["entries"][name], checkpoint_tree.describe(target), what)
        wanted = {name: checkpoint_tree.template(target) for name, target in targets.items()}
        items = {name: ocp.args.StandardRestore(flat) for name, flat in wanted.items() if flat}
        # An error in here is not taken for a broken checkpoint: the checksums are right, so it is memory or rights.
        arrays = self._orbax.restore(path, ocp.args.Composite(**items)) if items else {}
        trees = {
            name: checkpoint_tree.unpack(target, arrays[name] if name in items else {})
            for name, target in targets.items()
        }
        snapshot = None if target_snapshot is None else trees["snapshot"]
        return Restored(step, trees["state"], snapshot, _from_primary(lambda: series.meta(step)))


def _newest_intact(series: Series, repair: bool) -> dict[str, Any]:
    """The first intact step with its index, and the broken ones before it, which are set aside if `repair`.

    Where none is intact all stay in place, so that the next start fails as well instead of beginning from scratch.
    """
    if repair:
        series.recover()
    broken: list[tuple[int, str]] = []
    for step in series.steps():
        index = series.verified_index(step)
        if isinstance(index, dict):
            moved = [(s, series.set_aside(s) if repair else None, problem) for s, problem in broken]
            texts = [(s, f"{problem}; set aside as {to.name}" if to else problem) for s, to, problem in moved]
            return {"step": step, "index": index, "broken": texts}
        if series.path(step).exists():  # else the run that writes here has just deleted it
            broken.append((step, index))
    return {"step": None, "index": None, "broken": broken}


def _from_primary(decide: Callable[[], Any]) -> Any:
    """The primary process's answer (JSON-able), the same on all: looks at the disk may differ between hosts."""
    if jax.process_count() == 1:
        return decide()
    text = json.dumps(decide()).encode() if jax.process_index() == 0 else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.frombuffer(text.ljust(length), np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8)))


class _WithoutOrbaxInfo(python_logging.Filter):
    """Drops orbax's progress messages from absl's logger, some 40 a save; its warnings pass."""

    def filter(self, record: python_logging.LogRecord) -> bool:
        return record.levelno >= python_logging.WARNING or "/orbax/" not in record.pathname


def _quieten_orbax() -> None:
    logger = logging.get_absl_logger()
    if not any(isinstance(f, _WithoutOrbaxInfo) for f in logger.filters):
        logger.addFilter(_WithoutOrbaxInfo())

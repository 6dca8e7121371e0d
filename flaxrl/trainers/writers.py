"""Where metrics go: JSON lines, TensorBoard, or a class of the user's own.

A writer has clu's method names; name your own in the config as 'package.module:Name': its constructor takes
`(workdir, start_step)`. Steps are the run's steps: Python ints, never cut to 32 bits.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flaxrl import build
from flaxrl.trainers.clips import encode_gif


class Writer(Protocol):
    """What a metrics writer does."""

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers (Python, numpy or JAX scalars) at a step; steps do not go back."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the run's configuration, dotted path -> value."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Writes clips: name -> uint8 `[N, T, H, W, C]`, C = 1 (grey) or 3 (RGB)."""

    def flush(self) -> None:
        """Puts all that was written on disk."""

    def close(self) -> None:
        """Flushes and frees; may be called twice."""


class JsonLines:
    """`metrics.jsonl`: one object a line, `step` first, then the flat metrics; NaN and infinities as null.

    Steps strictly increase down the file, over a resume too: what was written at one step is one line, and lines beyond
    `start_step` (of a run that went on after its last checkpoint) are dropped, as is a line that a kill tore.

    Args:
        workdir: the run's folder.
        start_step: step that the run starts or resumes from.
    """

    def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0):
        path = Path(workdir) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _rows_until(path, start_step)
        self._row: dict[str, Any] = rows[-1] if rows else {}
        self._pending = False
        _write_rows(path, rows)
        self._file = open(path, "r+b")  # noqa: SIM115 - closed by close()
        # The row of the last step stays open: metrics of the same step that come after a flush are merged into it.
        self._offset = self._file.seek(0, os.SEEK_END) - (len(_line(self._row)) if rows else 0)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Adds metrics to the line of `step`.

        Raises:
            ValueError: a step before the last one; a metric that is not a number.
        """
        step, last = int(step), self._row.get("step")
        if last is not None and step < last:
            raise ValueError(f"metrics of step {step} came after those of step {last}: steps must not go back")
        if step != last:
            self.flush()
            self._offset = self._file.seek(0, os.SEEK_END)
            self._row = {"step": step}
        self._row |= plain(scalars)
        self._pending = True

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes nothing: the run's folder has them in config.json."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Writes nothing: a line holds numbers."""

    def flush(self) -> None:
        """Writes the line of the current step."""
        if self._pending:
            self._file.seek(self._offset)
            self._file.write(_line(self._row))
            self._file.truncate()
            self._file.flush()
            self._pending = False

    def close(self) -> None:
        """Flushes and closes the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()


class TensorBoard:
    """TensorBoard event files in the run's folder; events beyond `start_step` are hidden when a run resumes.

    Args:
        workdir: the run's folder.
        start_step: step that the run starts or resumes from.
    """

    def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event_pb2: Any = event_pb2  # protobuf makes the classes at run time, where type checkers do not see them
        self._summary_pb2: Any = summary_pb2
        Path(workdir).mkdir(parents=True, exist_ok=True)
        # The writer below its threaded front end: an event is in the file when flush returns. The suffix keeps two
        # starts within a second apart.
        self._events = EventsWriter(os.path.join(workdir, "events"), f".{time.time_ns()}")
        self._closed = False
        # A reader forgets what earlier files say of this step and later ones.
        self._add(start_step + 1, session_log=self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes metrics; TensorBoard stores float32, and non-finite values are left out.

        Raises:
            ValueError: a metric that is not a number.
        """
        make = self._summary_pb2.Summary
        values = {k: v for k, v in plain(scalars).items() if v is not None}
        if values:
            self._add(step, summary=make(value=[make.Value(tag=k, simple_value=v) for k, v in values.items()]))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the configuration for TensorBoard's HPARAMS page, beside the evaluation's return."""
        from tensorboardX.summary import hparams as summaries

        simple = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in hparams.items()}
        experiment, session, _ = summaries(simple, {"eval/return_mean": 0.0})
        self._add(0, summary=experiment)
        self._add(0, summary=session)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Writes clips as animated GIFs, 'name/0', 'name/1', ...; TensorBoard shows them under IMAGES.

        Args:
            step: step of the run.
            videos: name -> uint8 `[N, T, H, W, C]`, C = 1 or 3.
        """
        make = self._summary_pb2.Summary
        values = []
        for name, clips in videos.items():
            for i, clip in enumerate(np.asarray(clips)):
                _, height, width, channels = clip.shape
                image = make.Image(
                    height=height, width=width, colorspace=channels, encoded_image_string=encode_gif(clip)
                )
                values.append(make.Value(tag=f"{name}/{i}", image=image))
        self._add(step, summary=make(value=values))

    def flush(self) -> None:
        """Puts all events on disk."""
        if not self._closed:
            self._events.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if not self._closed:
            self._events.close()
            self._closed = True

    def _add(self, step: int, **content: Any) -> None:
        self._events.write_event(self._event_pb2.Event(step=int(step), wall_time=time.time(), **content))


class MultiWriter:
    """Passes everything on to several writers, in order."""

    def __init__(self, writers: Iterable[Writer]):
        self.writers = tuple(writers)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """To all."""
        for writer in self.writers:
            writer.write_scalars(step, scalars)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """To all."""
        for writer in self.writers:
            writer.write_hparams(hparams)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """To all."""
        for writer in self.writers:
            writer.write_videos(step, videos)

    def flush(self) -> None:
        """All."""
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        """All."""
        for writer in self.writers:
            writer.close()


def make_writers(names: tuple[str, ...], workdir: str | os.PathLike[str], start_step: int = 0) -> MultiWriter:
    """The writers of a run: short names or 'package.module:Name'; none on processes other than 0, so that one writes.

    Raises:
        ConfigError: an unknown name.
    """
    import jax

    classes = [build.resolve(name) for name in names]
    if jax.process_index() != 0:
        return MultiWriter(())
    return MultiWriter(cls(workdir, start_step) for cls in classes)


def plain(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as Python numbers, integers exact, non-finite ones None.

    Raises:
        ValueError: a metric that is not a number.
    """
    return {str(name): _number(name, value) for name, value in scalars.items()}


def _number(name: str, value: Any) -> int | float | bool | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ValueError(f"metric {name!r} must be a number; it is {type(value).__name__} {value!r:.60}")


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _rows_until(path: Path, start_step: int) -> list[dict[str, Any]]:
    """The rows of a metrics file up to a step, without torn lines."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(step, int) and step <= start_step and (not rows or step > rows[-1]["step"]):
            rows.append(row)
    return rows


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces the file's content, all or nothing, where it differs."""
    content = b"".join(map(_line, rows))
    if path.is_file() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)

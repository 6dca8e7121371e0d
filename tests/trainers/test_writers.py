"""Metrics writers: strictly increasing steps, exact integers, resumes, videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.errors import ConfigError
from flaxrl.trainers.writers import JsonLines, MultiWriter, TensorBoard, make_writers, plain


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_one_line_a_step(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.write_scalars(10, {"loss/total": 1.5})
    writer.write_scalars(10, {"eval/return_mean": np.float32(2.0)})
    writer.write_scalars(20, {"loss/total": jnp.float32(0.5)})
    writer.flush()
    writer.write_scalars(20, {"eval/return_mean": 3})  # after a flush: merged into the line on disk
    writer.close()
    writer.close()
    assert rows(tmp_path) == [
        {"step": 10, "loss/total": 1.5, "eval/return_mean": 2.0},
        {"step": 20, "loss/total": 0.5, "eval/return_mean": 3},
    ]


def test_flushed_lines_are_on_disk_and_a_longer_line_replaces_a_shorter(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.write_scalars(1, {"a": 123456.0})
    writer.flush()
    assert rows(tmp_path) == [{"step": 1, "a": 123456.0}]
    writer.write_scalars(1, {"a": 1})
    writer.close()
    assert rows(tmp_path) == [{"step": 1, "a": 1}]


def test_large_steps_and_counts_stay_integers(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.write_scalars(2**31 - 10, {"time/frames": 3_000_000_000})
    writer.write_scalars(2**31 + 10, {"time/frames": np.int64(12_000_000_000)})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"time/frames": 3000000000}' in text and '"step": 2147483658' in text and "12000000000}" in text


def test_non_finite_is_null(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.write_scalars(1, {"a": float("nan"), "b": np.float32("inf"), "c": jnp.float32(jnp.nan), "d": None})
    writer.close()
    assert rows(tmp_path) == [{"step": 1, "a": None, "b": None, "c": None, "d": None}]


def test_resume_drops_later_and_torn_lines_and_goes_on_increasing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "a": 1}\n{"step": 20, "a": 2}\n{"step": 30, "a": 3}\n{"step": 40, "a')
    writer = JsonLines(tmp_path, start_step=20)
    assert [r["step"] for r in rows(tmp_path)] == [10, 20]
    writer.write_scalars(20, {"b": 5})
    writer.write_scalars(30, {"a": 33})
    writer.close()
    assert rows(tmp_path) == [{"step": 10, "a": 1}, {"step": 20, "a": 2, "b": 5}, {"step": 30, "a": 33}]


def test_resume_at_the_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "a": 1}\n{"step": 20, "a": 2')
    writer = JsonLines(tmp_path, start_step=20)
    writer.write_scalars(30, {})
    writer.close()
    assert [r["step"] for r in rows(tmp_path)] == [10, 30]


def test_restart_from_zero_starts_the_file_anew(tmp_path: Path) -> None:
    for _ in range(2):
        writer = JsonLines(tmp_path, start_step=0)
        writer.write_scalars(5, {"a": 1})
        writer.close()
    assert rows(tmp_path) == [{"step": 5, "a": 1}]


def test_a_step_back_is_an_error(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.write_scalars(20, {})
    with pytest.raises(ValueError, match="step 10 came after those of step 20"):
        writer.write_scalars(10, {})
    writer.close()


@pytest.mark.parametrize("value", [np.zeros(3), "high", {"a": 1}])
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="'loss/x' must be a number"):
        plain({"loss/x": value})


def test_tensorboard_reads_scalars_without_a_break_at_the_resume(tmp_path: Path) -> None:
    for start, steps in ((0, (10, 20, 30)), (20, (30, 3_000_000_000))):
        writer = TensorBoard(tmp_path, start)
        for step in steps:
            writer.write_scalars(step, {"loss/total": float(step + start), "loss/odd": float("nan")})
        writer.flush()
        writer.close()
        writer.close()
    assert events(tmp_path) == {"loss/total": [(10, 10.0), (20, 20.0), (30, 50.0), (3_000_000_000, 3e9)]}


def test_tensorboard_flush_puts_events_on_disk(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path)
    writer.write_scalars(1, {"a": 2.5})
    writer.flush()
    assert events(tmp_path) == {"a": [(1, 2.5)]}
    writer.close()


def test_tensorboard_videos_and_hparams(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    writer.write_hparams({"loss.discount": 0.99, "model.hidden": (64, 64), "clip": None, "greedy": True, "name": "x"})
    writer.write_videos(7, {"eval/video": np.zeros((2, 3, 4, 5, 3), np.uint8)})
    writer.close()
    reader = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(reader.Tags()["images"]) == ["eval/video/0", "eval/video/1"]
    (image,) = reader.Images("eval/video/1")
    assert (image.step, image.height, image.width) == (7, 4, 5) and image.encoded_image_string.startswith(b"GIF89a")
    assert "hparams" in reader.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name


def test_make_writers_resolves_names_and_passes_on(tmp_path: Path) -> None:
    writers = make_writers(("json_lines", "flaxrl.trainers.writers:TensorBoard"), tmp_path)
    assert [type(w) for w in writers.writers] == [JsonLines, TensorBoard]
    writers.write_hparams({"a": 1})
    writers.write_scalars(3, {"b": 1.0})
    writers.write_videos(3, {"c": np.zeros((1, 2, 4, 4, 1), np.uint8)})
    writers.flush()
    writers.close()
    assert rows(tmp_path) == [{"step": 3, "b": 1.0}] and events(tmp_path) == {"b": [(3, 1.0)]}


def test_make_writers_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'json_lines'"):
        make_writers(("json_line",), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_processes_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writers = make_writers(("json_lines", "tensorboard"), tmp_path)
    writers.write_scalars(1, {"a": 1})
    writers.close()
    assert isinstance(writers, MultiWriter) and list(tmp_path.iterdir()) == []

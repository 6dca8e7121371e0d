"""Clips as files."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flaxrl.errors import ConfigError
from flaxrl.trainers import clips
from flaxrl.trainers.clips import check_path, encode_gif, write_clip


def decoded(data: bytes) -> list[np.ndarray]:
    """Frames of a GIF, `[H, W, 3]` each."""
    with Image.open(io.BytesIO(data)) as image:
        frames = []
        for i in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
    return frames


@pytest.mark.parametrize("channels", [1, 3])
def test_gif_holds_every_frame(channels: int) -> None:
    clip = np.zeros((4, 6, 8, channels), np.uint8)
    for t in range(4):
        clip[t, :, t] = 255
    frames = decoded(encode_gif(clip))
    assert [f.shape for f in frames] == 4 * [(6, 8, 3)]
    assert (frames[2][:, 2] > 250).all() and (frames[2][:, 3] < 5).all()


def test_up_to_256_colours_are_exact_and_more_are_near() -> None:
    few = np.random.default_rng(0).integers(0, 256, (256, 3), np.uint8)
    clip = few[np.random.default_rng(1).integers(0, 256, (3, 20, 30))]
    for frame, shown in zip(clip, decoded(encode_gif(clip)), strict=True):
        np.testing.assert_array_equal(shown, frame)
    ramp = np.arange(64, dtype=np.uint8) * 4
    red, green = np.meshgrid(ramp, ramp)
    many = np.stack([np.stack([red, green, np.full_like(red, 60 * t)], -1) for t in range(3)])
    for frame, shown in zip(many, decoded(encode_gif(many)), strict=True):
        assert np.abs(shown.astype(int) - frame).mean() < 16


def test_equal_frames_are_stored_once_and_stay_longer() -> None:
    clip = np.zeros((5, 4, 4, 3), np.uint8)
    clip[1:, 0] = 255
    with Image.open(io.BytesIO(encode_gif(clip))) as image:
        durations = []
        for i in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(i)
            durations.append(image.info["duration"])
    assert durations == [50, 200] and image.info["loop"] == 0


@pytest.mark.parametrize("bad", [np.zeros((2, 3, 3, 3), np.float32), np.zeros((3, 3, 3), np.uint8)])
def test_what_is_no_clip_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        encode_gif(bad)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agent.avi", r"--video=.*agent.avi must end in .gif or .mp4; did you mean .*agent.gif\?"),
        ("agent", r"must end in .gif or .mp4; did you mean .*agent.gif\?"),
        ("folder.gif", r"folder.gif is a folder; give a file"),
        ("new/file.txt/a.gif", r"--video=.*: .*file.txt is a file, not a folder; did you mean .*new/a.gif\?"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.gif").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file.txt").write_text("")
    with pytest.raises(ConfigError, match=message):
        check_path(str(tmp_path / name))


def test_mp4_without_ffmpeg_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"needs ffmpeg: pip install 'flaxrl\[video\]', or write .*agent.gif"):
        check_path(str(tmp_path / "agent.mp4"))


def test_mp4_is_written_with_odd_sides(tmp_path: Path) -> None:
    path = tmp_path / "new" / "agent.mp4"
    clip = np.zeros((30, 33, 47, 3), np.uint8)
    clip[15:] = 255
    write_clip(str(path), clip)
    # ffmpeg reads it back as grey pixels.
    command = [
        clips._ffmpeg(str(path)),
        "-loglevel",
        "error",
        "-i",
        str(path),
        "-f",
        "rawvideo",
        "-pix_fmt",
        "gray",
        "-",
    ]
    pixels = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
    frames = pixels.reshape(-1, 34, 48)
    assert len(frames) == 30 and (frames[:14] < 40).all() and (frames[16:] > 215).all()


def test_a_failing_ffmpeg_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "_ffmpeg", lambda _: sys.executable)
    with pytest.raises(RuntimeError, match="ffmpeg did not write"):
        write_clip(str(tmp_path / "a.mp4"), np.zeros((2, 4, 4, 3), np.uint8))

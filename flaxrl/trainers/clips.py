"""Clips as files: animated GIF by Pillow, MP4 by ffmpeg where there is one."""

from __future__ import annotations

import importlib
import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from flaxrl import checks
from flaxrl.errors import ConfigError

SUFFIXES = (".gif", ".mp4")
FRAMES_PER_SECOND = 20
"""About a 60 Hz game seen at every third or fourth frame."""

_COLOURS = 256  # of a GIF
_SAMPLES = 16  # frames that the palette of a colourful clip is taken from


def check_path(path: str) -> None:
    """Checks that a clip can be written there.

    Raises:
        ConfigError: another suffix, a folder, a place that cannot be written, or an MP4 without ffmpeg.
    """
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--video={path} must end in {' or '.join(SUFFIXES)}; did you mean {file.stem}.gif?")
    if file.is_dir():
        raise ConfigError(f"--video={path} is a folder; give a file, {file / 'video.gif'}")
    checks.writable(file, "--video")
    if file.suffix.lower() == ".mp4":
        _ffmpeg(path)


def write_clip(path: str, clip: np.ndarray) -> None:
    """Writes a clip, in the format that the suffix names; its folder is made.

    Args:
        path: of a .gif or .mp4 file.
        clip: uint8 `[T, H, W, C]`, C = 1 (grey) or 3 (RGB).

    Raises:
        ConfigError: as `check_path`.
        RuntimeError: ffmpeg failed.
    """
    check_path(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if path.lower().endswith(".gif"):
        Path(path).write_bytes(encode_gif(clip))
    else:
        _write_mp4(path, clip)


def encode_gif(clip: np.ndarray) -> bytes:
    """An endless animated GIF with one palette, exact up to 256 colours; equal frames in a row are stored as one.

    Args:
        clip: uint8 `[T, H, W, C]`, C = 1 (grey) or 3 (RGB).

    Raises:
        ValueError: another type or shape.
    """
    from PIL import Image

    _check(clip)
    frames = [Image.fromarray(frame[..., 0]) for frame in clip] if clip.shape[-1] == 1 else _indexed(clip)
    output = io.BytesIO()
    milliseconds = 1000 // FRAMES_PER_SECOND
    frames[0].save(output, format="GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    return output.getvalue()


def _check(clip: np.ndarray) -> None:
    if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] not in (1, 3) or not clip.shape[0]:
        raise ValueError(f"a clip must be uint8 [T, H, W, C] with C = 1 or 3; it is {clip.dtype} {clip.shape}")


def _indexed(clip: np.ndarray) -> list[Any]:
    """The frames with one palette: all colours of the clip, or of more than 256 the best for a few of its frames."""
    from PIL import Image

    seen = np.zeros(2**24, bool)
    for frame in clip:
        seen[_packed(frame)] = True
    colours = np.flatnonzero(seen)
    if len(colours) > _COLOURS:
        sample = clip[np.unique(np.linspace(0, len(clip) - 1, _SAMPLES).astype(int))]
        palette = Image.fromarray(sample.reshape(-1, *sample.shape[2:])).quantize(_COLOURS)
        dither = Image.Dither.NONE  # its noise would differ from frame to frame
        return [Image.fromarray(frame).quantize(palette=palette, dither=dither) for frame in clip]
    index = np.zeros(2**24, np.uint8)
    index[colours] = np.arange(len(colours))
    frames = [Image.fromarray(index[_packed(frame)]) for frame in clip]
    for frame in frames:
        frame.putpalette(
            np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8).tobytes()
        )
    return frames


def _packed(frame: np.ndarray) -> np.ndarray:
    """One number a pixel, `[H, W]`."""
    red, green, blue = np.moveaxis(frame.astype(np.uint32), -1, 0)
    return red << 16 | green << 8 | blue


def _ffmpeg(path: str) -> str:
    """The program's path: that of the system, or else of the package imageio-ffmpeg."""
    found = shutil.which("ffmpeg")
    if found is not None:
        return found
    try:
        return importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"--video={path} needs ffmpeg: pip install 'flaxrl[video]', or write {Path(path).with_suffix('.gif')}"
        ) from error


def _write_mp4(path: str, clip: np.ndarray) -> None:
    """H.264 in the colour format that every player knows, which wants even sides."""
    _check(clip)
    frames = np.pad(clip, ((0, 0), (0, clip.shape[1] % 2), (0, clip.shape[2] % 2), (0, 0)), mode="edge")
    count, height, width, channels = frames.shape
    command = [
        *(_ffmpeg(path), "-y", "-loglevel", "error", "-f", "rawvideo"),
        *("-pix_fmt", "gray" if channels == 1 else "rgb24", "-s", f"{width}x{height}"),
        *("-r", str(FRAMES_PER_SECOND), "-i", "-", "-frames:v", str(count)),
        *("-c:v", "libx264", "-pix_fmt", "yuv420p", path),
    ]
    done = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ffmpeg did not write {path}: {done.stderr.decode(errors='replace').strip()}")

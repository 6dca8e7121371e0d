"""Compiled programs are kept on disk, so that the second start of a run compiles next to nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

MIN_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not worth a file."""

MAX_AGE_SECONDS = 30 * 24 * 3600.0
"""A program that no run has read for so long is deleted."""


def use_cache() -> str | None:
    """Switches jax's persistent compilation cache on, in a folder of this user, jax version and kind of processor.

    A folder that the user has set (`JAX_COMPILATION_CACHE_DIR`, or jax's config) is left as it is, and
    `JAX_ENABLE_COMPILATION_CACHE=false` means no cache. Where the folder cannot be written to, the run goes on without.
    Programs that were not used for a month are deleted.

    Returns:
        The folder in use, or None.
    """
    settings: Any = jax.config  # its fields are made at run time
    if not settings.jax_enable_compilation_cache:
        return None
    if settings.jax_compilation_cache_dir is not None:
        return settings.jax_compilation_cache_dir
    folder = default_folder()
    if folder is None or not _writable(folder):
        return None
    _prune(folder.parent)
    settings.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        settings.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    return str(folder)


def default_folder() -> Path | None:
    """`flaxrl/jax-VERSION-PROCESSOR` in `$XDG_CACHE_HOME` or `~/.cache`; None where there is no home.

    Code for one processor may not run on another, and a home folder may be shared by several kinds; XLA refuses such a
    program, with an error message, each time. So each kind has a folder of its own.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        return None
    return Path(root) / "flaxrl" / f"jax-{jax.__version__}-{_processor()}"


def _processor() -> str:
    """Eight hex digits that differ between processors with different instructions."""
    text = platform.machine() + platform.processor()
    try:
        with open("/proc/cpuinfo") as file:
            text += "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        pass  # no Linux: the names have to do
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _writable(folder: Path) -> bool:
    try:
        # Others must not write here: who can, can make this user's process run anything.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _prune(root: Path) -> None:
    """Deletes old programs of all versions and processors; other runs may do so at the same time."""
    oldest = time.time() - MAX_AGE_SECONDS
    for file in root.glob("jax-*/*"):
        with contextlib.suppress(OSError):
            status = file.stat()
            if max(status.st_atime, status.st_mtime) < oldest:
                file.unlink()

"""The cache of compiled programs: where it is, and that it never stands in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from flaxrl import compilation_cache
from flaxrl.compilation_cache import default_folder, use_cache

ROOT = Path(__file__).parent.parent


@pytest.fixture
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No folder is set; the root of the default one is returned."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


def _chosen() -> str | None:
    settings: Any = jax.config
    return settings.jax_compilation_cache_dir


def test_folder_of_user_version_and_processor(unset: Path):
    folder = use_cache()
    assert folder is not None and folder == _chosen() == str(default_folder())
    assert Path(folder).parent == unset / "flaxrl" and Path(folder).name.startswith(f"jax-{jax.__version__}-")
    assert Path(folder).stat().st_mode & 0o077 == 0, "others can write programs that this user would run"
    assert use_cache() == folder


def test_other_processors_have_other_folders(monkeypatch: pytest.MonkeyPatch):
    ours = default_folder()
    monkeypatch.setattr(compilation_cache.platform, "machine", lambda: "abacus")
    assert default_folder() != ours


def test_a_folder_that_was_set_stays(unset: Path, tmp_path: Path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert use_cache() == str(tmp_path / "own") == _chosen()
    assert not unset.exists()


def test_switched_off(unset: Path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert use_cache() is None and _chosen() is None and not unset.exists()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_a_place_that_cannot_be_written_to_is_no_fault(unset: Path, monkeypatch: pytest.MonkeyPatch):
    unset.write_text("a file, not a folder")
    assert use_cache() is None and _chosen() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "nowhere")
    assert use_cache() is None


def test_a_read_only_folder_is_no_fault(unset: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(compilation_cache.tempfile, "TemporaryFile", refuse)
    assert use_cache() is None and _chosen() is None


def test_programs_unused_for_a_month_are_deleted(unset: Path):
    folder = unset / "flaxrl" / "jax-0.1-00000000"
    folder.mkdir(parents=True)
    days = {"new": 0, "used": 20, "old": 31}
    for name, age in days.items():
        (folder / name).write_text("")
        used = time.time() - age * 24 * 3600
        os.utime(folder / name, (used, used))
    use_cache()
    assert sorted(p.name for p in folder.iterdir()) == ["new", "used"]


@pytest.mark.slow
def test_a_second_run_compiles_nothing(tmp_path: Path):
    """Two processes with the same config: the second adds no program to the folder."""
    code = (
        "import sys\nfrom tests.small_runs import small_config\nimport flaxrl\n"
        "flaxrl.Trainer(small_config(2), sys.argv[1]).run()"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # all, however fast this machine is
    found = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=tmp_path)
        found.append(sorted(p.name for p in (tmp_path / "flaxrl").rglob("*-cache")))
    assert found[0] and found[1] == found[0]
    assert any(name.startswith("jit_call") for name in found[0])

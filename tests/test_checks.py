"""Files that a user names are checked before the work whose outcome they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flaxrl import checks
from flaxrl.errors import ConfigError


@pytest.fixture(autouse=True)
def _locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has `locked` in its name cannot be written, whoever runs the tests."""
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in Path(path).name)
    Path("folder").mkdir()
    Path("locked").mkdir()
    for name in ("file.txt", "locked.gif"):
        Path(name).write_text("")


@pytest.mark.parametrize("name", ["new.gif", "folder/new.gif", "a/b/c/new.gif", "folder/a/new.gif", "file.txt"])
def test_a_file_that_can_be_written(name: str) -> None:
    before = sorted(Path().rglob("*"))
    checks.writable(Path(name), "--video")
    checks.writable(Path(name).absolute(), "--video")
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file.txt/new.gif", r"--video=file.txt/new.gif: file.txt is a file, not a folder; did you mean new.gif\?"),
        ("file.txt/a/b/new.gif", r"file.txt is a file, not a folder; did you mean new.gif\?"),
        ("locked/new.gif", r"--video=locked/new.gif: the folder locked cannot be written to; did you mean new.gif\?"),
        ("locked/a/b/new.gif", r"the folder locked cannot be written to"),
        ("locked.gif", r"--video=locked.gif is there and cannot be written; name another file"),
    ],
)
def test_a_file_that_cannot_be_written(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checks.writable(Path(name), "--video")

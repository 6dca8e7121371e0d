"""Modules that are loaded only if something is asked of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flaxrl.envs.deferred import defer


def test_it_is_loaded_by_its_first_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "lazy_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from lazy_pkg import inner\nvalue = 1\nloads = inner.loads\n")
    (package / "inner.py").write_text("loads = []\n")
    (package / "plots.py").write_text("from lazy_pkg import inner\ninner.loads.append(1)\ndef draw():\n    return 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    defer("lazy_pkg.plots", "lazy_pkg.absent", "no_such_pkg.plots", "json")
    import lazy_pkg  # type: ignore[import-not-found]
    import lazy_pkg.plots as plots  # type: ignore[import-not-found]

    assert lazy_pkg.value == 1 and lazy_pkg.loads == []
    assert lazy_pkg.plots is plots and plots.__name__ == "lazy_pkg.plots" and lazy_pkg.loads == []
    assert plots.draw() == 5 and lazy_pkg.loads == [1]
    with pytest.raises(AttributeError, match="paint"):
        plots.paint()
    assert lazy_pkg.loads == [1]
    assert "no_such_pkg" not in sys.modules and "lazy_pkg.absent" not in sys.modules


def test_other_threads_wait_until_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slow_mod.py").write_text(
        "import sys, threading\n"
        "me = sys.modules[__name__]\n"
        "early = hasattr(me, 'late')  # its own code does not wait for itself\n"
        "sys.begun.set(); sys.go_on.wait(10)\n"
        "late = 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "begun", threading.Event(), raising=False)
    monkeypatch.setattr(sys, "go_on", threading.Event(), raising=False)
    defer("slow_mod")
    module = sys.modules["slow_mod"]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: module.late)
        assert sys.begun.wait(10)  # type: ignore[attr-defined]
        second = pool.submit(lambda: module.late)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        sys.go_on.set()  # type: ignore[attr-defined]
        assert (first.result(10), second.result(10), module.early) == (7, 7, False)


def test_one_that_fails_is_imported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_mod.py").write_text("raise OSError('no display')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    defer("broken_mod")
    module = sys.modules["broken_mod"]
    for _ in range(2):
        with pytest.raises(OSError, match="no display"):
            _ = module.draw
    assert "broken_mod" not in sys.modules
    with pytest.raises(OSError, match="no display"):
        import broken_mod  # type: ignore[import-not-found]  # noqa: F401


def test_gymnax_loads_no_plotting():
    """They cost more than the rest of its import."""
    code = (
        "from flaxrl.envs.gymnax import Gymnax; import sys; Gymnax().spec\n"
        "print([m for m in ('pandas', 'scipy.stats', 'matplotlib.figure') if m in sys.modules])\n"
        "import matplotlib.pyplot, seaborn; print(callable(seaborn.lineplot), callable(matplotlib.pyplot.plot))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "True True"]

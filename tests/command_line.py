"""main.py in this process, in a folder with a config and a user's package, with a stub for what does the work."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from flaxrl import cli
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.run_folder import RunFolder

ROOT = Path(__file__).parent.parent


def _load_main() -> types.ModuleType:
    """main.py, which is no part of the package; its flags are defined once a process."""
    spec = importlib.util.spec_from_file_location("flaxrl_main", ROOT / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


main_module = _load_main()

PARTS = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Rate:
    learning_rate: float = 1e-3
    clip: float | None = 0.5
    nesterov: bool = False

@dataclasses.dataclass(frozen=True)
class Net:
    hidden: tuple[int, ...] = (64, 64)
"""

CONFIG = """
from ml_collections import config_dict
from flaxrl.build import config_for

def get_config(argument="default"):
    config = config_dict.ConfigDict({"seed": 0, "total_steps": 1000, "argument": argument})
    config.optimizer = config_for("my_lab.parts:Rate")
    config.model = config_for("my_lab.parts:Net")
    config.eval = config_for("eval", episodes=10)
    config.num_seeds, config.sweep = 1, {}
    return config
"""


class Result:
    """What a command did."""

    def __init__(self, code: Any, err: str, out: str, config: Any, workdir: Any, video: Any):
        self.code, self.err, self.out, self.config, self.workdir, self.video = code, err, out, config, workdir, video


Run = Callable[..., Result]


@contextlib.contextmanager
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Gives what runs main.py's main with arguments."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "parts.py").write_text(PARTS)
    (tmp_path / "exp.py").write_text(CONFIG)
    _forget_modules()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    seen: dict[str, Any] = {}

    class Trainer:
        def __init__(self, config: Any, workdir: str):
            seen.update(config=config, workdir=workdir)
            RunFolder(workdir).match(config)
            self.finished = config.total_steps != 777

        def run(self) -> None:
            if seen["config"].total_steps == 666:
                raise TrainingError("loss not finite\nat step 20")

    def evaluate_workdir(workdir: str, config: Any, **chosen: Any) -> dict[str, Any]:
        seen.update(config=config, workdir=workdir, **chosen)
        return {"eval/return_mean": 12.5, "eval/episodes": config.eval.episodes, "eval/odd": float("nan")}

    def check(config: Any) -> None:
        if config.seed < 0:
            raise ConfigError(f"config.seed = {config.seed} must be >= 0")

    stubs = {
        "trainer": {"Trainer": Trainer},
        "evaluate": {"evaluate_workdir": evaluate_workdir},
        "plan": {"check": check},
    }
    import flaxrl.trainers

    for name, content in stubs.items():
        module = types.ModuleType(f"flaxrl.trainers.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"flaxrl.trainers.{name}", module)
        monkeypatch.setattr(flaxrl.trainers, name, module, raising=False)

    def command(*arguments: str) -> Result:
        seen.clear()
        for name in ("config", "workdir", "mode", "process_id", *cli._MODE_FLAGS):
            flags.FLAGS[name].unparse()
        with pytest.raises(SystemExit) as info:
            cli.run(main_module.main, ["main.py", *arguments])
        captured = capsys.readouterr()
        return Result(info.value.code or 0, captured.err, captured.out, *map(seen.get, ("config", "workdir", "video")))

    yield command
    _forget_modules()


def _forget_modules() -> None:
    """Drops what was imported from a user's folder: another test has another one of the same name."""
    for name in [m for m in sys.modules if m.split(".")[0] in ("my_lab", "config_config")]:
        del sys.modules[name]

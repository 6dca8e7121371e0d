"""The command line: every wrong input is one line and exit code 2, in time; every right one reaches the Trainer."""

from __future__ import annotations

import importlib.util
import json
import logging as std_logging
import os
import re
import subprocess
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
    config.eval = config_dict.ConfigDict({"episodes": 10})
    config.num_seeds, config.sweep = 1, {}
    return config
"""


class Result:
    """What a command did."""

    def __init__(self, code: Any, err: str, out: str, config: Any, workdir: Any, video: Any):
        self.code, self.err, self.out, self.config, self.workdir, self.video = code, err, out, config, workdir, video


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs main.py's main in this process, in a folder with a config and a user's package, with a stub trainer."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.optimizer.learing_rate=1"], "did you mean --config.optimizer.learning_rate?"),
        (["--config.optimizer.nesterov=no"], "--config.optimizer.nesterov=no: nesterov must be true or false"),
        (["--config.optimizer.learning_rate=nan"], "learning_rate must be a number"),
        (["--config.seed"], "--config.seed needs a value: --config.seed=VALUE"),
        (["--config.seed=-1"], "config.seed = -1 must be >= 0"),
        (["config.seed=3"], "'config.seed=3' is not a flag: its dashes are missing; did you mean --config.seed=3?"),
        (["seed=3"], "did you mean --config.seed=3?"),
        (["--", "--config.seed=3"], "is not a flag"),
        (["--wrkdir=x"], "unknown flag --wrkdir; did you mean --workdir?"),
        (["--confg.seed=3"], "did you mean --config.seed?"),
        (["--optimizer.clip=3"], "fields of the config are set as --config.optimizer.clip=3"),
        (["--noconfig.optimizer.nesterov"], "write --config.optimizer.nesterov=false"),
        (["--mode=trian"], "--mode=trian is unknown; did you mean 'train'?"),
        (["--mode=eval"], "--mode=eval needs --workdir"),
        (["--video=x.gif"], "--video films an evaluation; with --mode=train it has no meaning: add --mode=eval"),
        (["--out=x.png"], "--out names a plot's picture; with --mode=train it has no meaning: add --mode=plot"),
        (["--stopped_exit_code=300"], "--stopped_exit_code=300 must be 0 to 255; the nearest is 255"),
        (["--stopped_exit_code=-1"], "--stopped_exit_code=-1 must be 0 to 255; the nearest is 0"),
        (["--mode=eval", "--workdir=w", "--stopped_exit_code=7"], "with --mode=eval it has no meaning: leave it out"),
        (["--stoped_exit_code=7"], "did you mean --stopped_exit_code?"),
        (["--vidoe=x.gif"], "unknown flag --vidoe; did you mean --video?"),
        (["--workdir=a", "--workdir=b"], "--workdir is given 2 times; only --mode=plot takes more than one"),
        (["--mode=plot", "--workdir=a"], "--config has no meaning with --mode=plot"),
        (["--workdir=exp.py"], "--workdir=exp.py is a file"),
        (["--workdir=my_lab"], "my_lab is no run's folder: it holds"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(run: Run, arguments: list[str], message: str) -> None:
    result = run("--config=exp.py", *arguments)
    assert result.code == 2 and result.config is None
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and "Traceback" not in result.err
    assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing: --config=FILE.py; here are configs/vtrace_x.py"),
        (["--config"], "--config needs a file"),
        (["exp.py"], "did you mean --config=exp.py?"),
        (["--config=epx.py"], "no config file 'epx.py'; did you mean 'exp.py'"),
        (["--config=configs/vtrac_x.py"], "did you mean 'configs/vtrace_x.py'?"),
        (["--config=nowhere/x.py"], "has no config files; here are configs/vtrace_x.py"),
        (["--config=exp.py:a", "--config.argumen=1"], "did you mean --config.argument?"),
        (["--config=bad.py"], "bad.py, line 3: NameError: name 'tpyo' is not defined"),
        (["--config=bad.py:value"], "bad.py, line 5: ValueError: oh no"),
        (["--config=bad.py:file"], "bad.py, line 7: FileNotFoundError"),
        (["--config=bad.py:field"], "'my_lab.parts:Rate' has no field 'clp'; did you mean 'clip'?"),
        (["--config=bad.py:module"], "no module 'nobody' on the Python path"),
        (["--config=bad.py:none"], "bad.py: get_config() must return a ConfigDict; it returned NoneType"),
        (["--config=bad.py:nan"], "config.x is NaN"),
        (["--config=syntax.py"], "syntax.py: SyntaxError"),
        (["--config=empty.py"], "get_config"),
        (["--mode=eval", "--workdir=nix"], "nix holds no run"),
        (["--mode=plot"], "--mode=plot needs --workdir, a folder of runs"),
        (["--mode=plot", "--workdir=nix"], "--workdir=nix neither is a run's folder nor holds one"),
        (["--mode=plot", "--workdir=nix", "--out=x.jpg"], "--out=x.jpg must end in .png, .svg or .pdf"),
        (["--mode=plot", "--workdir=nix", "--video=x.gif"], "--video films an evaluation; with --mode=plot"),
        (["--mode=plot", "--workdir=nix", "--config.seed=3"], "--config.seed=3 has no meaning with --mode=plot"),
        (["--mode=plot", "--workdir=nix", "--process_id=0"], "--process_id has no meaning with --mode=plot"),
    ],
)
def test_wrong_config_file_is_one_line_and_code_2(run: Run, arguments: list[str], message: str) -> None:
    Path("configs").mkdir()
    Path("configs/vtrace_x.py").write_text(CONFIG)
    Path("syntax.py").write_text("def get_config(:\n")
    Path("empty.py").write_text("x = 1\n")
    Path("bad.py").write_text(
        """def get_config(kind=None):
    if kind is None:
        tpyo
    if kind == "value":
        raise ValueError("oh no")
    if kind == "file":
        open("absent.txt")
    from flaxrl.build import config_for
    from ml_collections import config_dict
    if kind == "nan":
        return config_dict.ConfigDict({"x": float("nan")})
    if kind == "field":
        return config_for("my_lab.parts:Rate", clp=1)
    if kind == "module":
        return config_for("nobody.parts:Rate")
"""
    )
    result = run(*arguments)
    assert result.code == 2 and result.config is None
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert message in result.err


def test_value_may_be_its_own_argument_and_order_does_not_matter(run: Run) -> None:
    result = run("--config.optimizer.clip", "3", "--config.seed", "7", "--workdir=w", "--config", "exp.py:x")
    assert (result.code, result.config.optimizer.clip, result.config.seed) == (0, 3.0, 7)
    assert (result.config.argument, result.workdir) == ("x", "w")


@pytest.mark.parametrize(("config", "folder"), [("exp.py", "exp"), ("./exp.py:a/b c", "exp-a_b_c")])
def test_default_workdir(run: Run, config: str, folder: str) -> None:
    first, second = run(f"--config={config}"), run(f"--config={config}")
    assert re.fullmatch(rf"runs/{folder}/\d{{8}}-\d{{6}}", first.workdir)
    assert second.workdir != first.workdir  # even within a second


def test_the_same_workdir_resumes_the_same_config_only(run: Run) -> None:
    assert run("--config=exp.py", "--workdir=w").code == 0
    assert run("--config=exp.py", "--workdir=w", "--config.total_steps=5000").code == 0
    assert run("--workdir=w").config.total_steps == 5000
    result = run("--config=exp.py", "--workdir=w", "--config.seed=1", "--config.model.hidden=3,")
    assert result.code == 2 and "model.hidden (64, 64) -> (3,), seed 0 -> 1" in result.err and result.config is None


@pytest.mark.parametrize(
    ("steps", "given", "code"),
    [(777, [], 0), (777, ["--stopped_exit_code=75"], 75), (778, ["--stopped_exit_code=75"], 0)],
)
def test_a_run_that_a_signal_stopped_may_have_an_exit_code(run: Run, steps: int, given: list[str], code: int) -> None:
    result = run("--config=exp.py", "--workdir=w", f"--config.total_steps={steps}", *given)
    assert (result.code, result.err) == (code, "")


def test_training_error_is_one_line_and_code_1(run: Run) -> None:
    result = run("--config=exp.py", "--workdir=w", "--config.total_steps=666")
    assert (result.code, result.err) == (1, "error: loss not finite at step 20\n")


def test_eval_reads_the_stored_config_and_prints_a_table_and_json(run: Run) -> None:
    run("--config=exp.py:stored", "--workdir=w")
    result = run("--mode=eval", "--workdir=w", "--config.eval.episodes=100")
    assert result.code == 0 and result.config.argument == "stored" and result.workdir == "w"
    lines = result.out.splitlines()
    assert re.search(r"^eval/return_mean +12\.5$", result.out, re.MULTILINE)
    assert json.loads(lines[-1]) == {"eval/return_mean": 12.5, "eval/episodes": 100, "eval/odd": None}
    refused = run("--mode=eval", "--workdir=w", "--config.model.hidden=3,")
    assert refused.code == 2 and "model.hidden" in refused.err


def test_a_video_is_checked_before_the_evaluation(run: Run) -> None:
    env = 'config.env = config_for("tests.drawn_envs:DrawnScripted")'
    Path("exp.py").write_text(CONFIG.replace("return config", f"{env}\n    return config"))
    run("--config=exp.py", "--workdir=w")
    assert run("--mode=eval", "--workdir=w", "--video=agent.gif").video == "agent.gif"
    result = run("--mode=eval", "--workdir=w", "--video=agent.webm")
    assert (result.code, result.config) == (2, None)
    assert result.err == "error: --video=agent.webm must end in .gif or .mp4; did you mean agent.gif?\n"


def test_other_exceptions_keep_their_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "new_workdir", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--config=exp.py")


def test_info_of_other_libraries_stays_off_stderr_unless_asked_for(run: Run) -> None:
    run("--config=exp.py", "--workdir=w")
    assert not std_logging.getLogger("jax").isEnabledFor(std_logging.INFO)
    try:
        run("--config=exp.py", "--workdir=w", "--verbosity=0")
        assert std_logging.getLogger("jax").isEnabledFor(std_logging.INFO)
    finally:
        flags.FLAGS["verbosity"].unparse()


def test_ctrl_c_before_training_has_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "new_workdir", interrupted)
    result = run("--config=exp.py")
    assert (result.code, result.err) == (130, "error: interrupted\n")


def test_checks_import_nothing_heavy(tmp_path: Path) -> None:
    """In a process of its own: a wrong key is answered without distrax, orbax, writers' or env suites' imports."""
    (tmp_path / "exp.py").write_text(CONFIG)
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "parts.py").write_text(PARTS)
    code = f"""
import atexit, runpy, sys
heavy = ("distrax", "orbax", "tensorboardX", "gymnax", "gymnasium", "ale_py", "clu", "tensorflow", "torch")
atexit.register(lambda: print("imported:", [m for m in heavy if m in sys.modules]))
sys.argv = ["main.py", "--config=exp.py", "--config.optimizer.learing_rate=1"]
sys.path[0] = {str(ROOT)!r}
runpy.run_path({str(ROOT / "main.py")!r}, run_name="__main__")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: --config.optimizer.learing_rate: no such field; did you mean --config.optimizer.learning_rate?\n"
    )
    assert done.stdout == "imported: []\n"

"""The command line: every wrong input is one line and exit code 2, in time; every right one reaches the Trainer."""

from __future__ import annotations

import json
import logging as std_logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags

from flaxrl import cli
from tests.command_line import CONFIG, PARTS, ROOT, Run, command_line

FILMED = CONFIG.replace("return config", 'config.env = config_for("tests.drawn_envs:DrawnScripted")\n    return config')


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with command_line(tmp_path, monkeypatch, capsys) as command:
        yield command


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
    Path("exp.py").write_text(FILMED)
    run("--config=exp.py", "--workdir=w")
    assert run("--mode=eval", "--workdir=w", "--video=agent.gif").video == "agent.gif"
    for arguments, message in (
        (["--video=agent.webm"], "--video=agent.webm must end in .gif or .mp4; did you mean agent.gif?"),
        (["--video=exp.py/a.gif"], "--video=exp.py/a.gif: exp.py is a file, not a folder; did you mean a.gif?"),
        (
            ["--video=a.gif", "--config.eval.video_episodes=11"],
            "config.eval: EvalSettings.video_episodes = 11 must be <= its episodes = 10",
        ),
    ):
        result = run("--mode=eval", "--workdir=w", *arguments)
        assert (result.code, result.config, result.err) == (2, None, f"error: {message}\n")


def test_a_video_shows_one_of_several_seeds(run: Run) -> None:
    Path("exp.py").write_text(FILMED)
    run("--config=exp.py", "--workdir=w", "--config.num_seeds=2")
    result = run("--mode=eval", "--workdir=w", "--video=agent.gif")
    assert (result.code, result.config) == (2, None)
    assert result.err == (
        "error: --video films one agent, and the folder holds several: name one with --eval_seed=SEED\n"
    )
    assert run("--mode=eval", "--workdir=w", "--video=agent.gif", "--eval_seed=1").video == "agent.gif"


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

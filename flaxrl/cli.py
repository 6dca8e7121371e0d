"""What `main.py` would be too long for: flags, one-line errors, the config and the run's folder."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_dict

from flaxrl import checks, processes
from flaxrl.build import Config, build
from flaxrl.configuration import is_many
from flaxrl.errors import ConfigError, TrainingError
from flaxrl.overrides import apply as apply_overrides
from flaxrl.run_folder import RunFolder, check_values
from flaxrl.trainers.writers import plain as plain_metrics

_MODE_FLAGS = ("video", "out", "eval_seed", "eval_setting", "stopped_exit_code")
_OWN_FLAGS = ("config", "workdir", "mode", "coordinator", "num_processes", "process_id", *_MODE_FLAGS, "help")


def run(main: Callable[[list[str]], Any], argv: list[str] | None = None) -> None:
    """Runs `main` as absl does, and ends the process.

    Exit codes: what `main` returns, None being 0 (done, or interrupted and saved), 1 the training failed, 2 bad input.
    A fault of the user's gets one line on stderr; any other exception its traceback.
    """
    # A user's own package next to where the command is given: python puts the script's folder there, not this one.
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())
    app.run(_one_line(main), argv=argv, flags_parser=_one_line(parse_flags))


def _one_line(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with one_line_errors():
            return function(*args)

    return wrapped


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the errors that a user can mend into one line on stderr and an exit code."""
    try:
        yield
    except (ConfigError, app.UsageError) as error:
        _exit(error, str(error), 2)
    except TrainingError as error:
        _exit(error, str(error), 1)
    except KeyboardInterrupt as error:
        _exit(error, "interrupted", 130)


def _exit(error: BaseException, message: str, code: int) -> None:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    processes.fail(error)
    sys.exit(code)


def parse_flags(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses the command line.

    Args:
        argv: program name and arguments.
        flag_values: where the flags are defined; a `config` flag of ml_collections is among them.

    Returns:
        The program name and the overrides, 'a.b=value' each (a bare 'a.b' where no value was given).

    Raises:
        ConfigError: unknown flag, wrong value, leftover positional argument, a config file that does not load.
    """
    own, path, found = _split(argv)
    try:
        rest = flag_values(own)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(_unknown_flag(error)) from error
    except flags.Error as error:
        raise ConfigError(_wrong_value(own, flag_values) or str(error)) from error
    if rest:
        raise ConfigError(_leftover(rest[0]))
    if not flag_values["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # absl's INFO would show the inner life of jax and orbax
    if path is not None:
        _load_file(flag_values["config"], path)
    return [argv[0], *found]


def _split(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The command line without the config, the config's path, and the overrides of its fields."""
    own, path, found = [argv[0]], None, []
    rest = list(argv[1:])
    while rest:
        argument = rest.pop(0)
        if argument == "--":  # no flags after it
            return [*own, argument, *rest], path, found
        match = re.fullmatch(r"--?config(?:\.([^=]+))?(?:=(.*))?", argument, re.DOTALL)
        if match is None:
            own.append(argument)
            continue
        key, value = match.groups()
        if value is None and rest and (not rest[0].startswith("-") or re.match(r"-[\d.]", rest[0])):
            value = rest.pop(0)
        if key is not None:
            found.append(key if value is None else f"{key}={value}")
        elif not value:
            raise ConfigError(f"--config needs a file: --config=FILE.py{_config_files()}")
        else:
            path = value
    return own, path, found


def _config_files(folder: str = "configs") -> str:
    found = sorted(str(p) for p in Path(folder).glob("*.py") if not p.name.startswith("_"))
    return f"; here are {', '.join(found)}" if found else ""


def _unknown_flag(error: flags.UnrecognizedFlagError) -> str:
    name = error.flagname
    value = str(error.flagvalue or "").partition("=")[2]  # absl gives the whole argument
    if name.startswith("noconfig."):
        return f"unknown flag --{name}; write --{name.removeprefix('no')}=false"
    head, dot, rest = name.partition(".")
    if close := difflib.get_close_matches(head, _OWN_FLAGS, n=1):
        return f"unknown flag --{name}; did you mean --{close[0]}{dot}{rest}?"
    return f"unknown flag --{name}; fields of the config are set as --config.{name}={value or 'VALUE'}"


def _wrong_value(own: Sequence[str], flag_values: flags.FlagValues) -> str | None:
    """For a flag with a list of values: the nearest to the one given."""
    for argument in own[1:]:
        name, _, value = argument.lstrip("-").partition("=")
        known = getattr(flag_values[name].parser, "enum_values", None) if name in flag_values else None
        if known and value not in known:
            return f"--{name}={value} is unknown; {checks.nearest(value, known)}"
    return None


def _leftover(argument: str) -> str:
    if re.fullmatch(r"config(\.[^=]+)?=.*", argument):
        return f"{argument!r} is not a flag: its dashes are missing; did you mean --{argument}?"
    if "=" in argument:
        return f"{argument!r} is not a flag; did you mean --config.{argument}?"
    if argument.partition(":")[0].endswith(".py"):
        return f"{argument!r} is not a flag; did you mean --config={argument}?"
    return f"{argument!r} is not a flag; flags are --config, --config.FIELD, --workdir, --mode, --video and --out"


def _load_file(flag: flags.Flag, path: str) -> None:
    """Runs the config file into `flag.value`; any fault in it is told with its line."""
    file = path.partition(":")[0]
    if not os.path.isfile(file):
        folder = os.path.dirname(file) or "."
        siblings = [os.path.join(os.path.dirname(file), p.name) for p in sorted(Path(folder).glob("*.py"))]
        hint = checks.nearest(file, siblings) if siblings else f"the folder {folder!r} has no config files"
        raise ConfigError(f"no config file {file!r}; {hint}{'' if siblings else _config_files()}")
    try:
        with warnings.catch_warnings():
            # ml_collections loads the file by a method that Python means to retire.
            warnings.filterwarnings("ignore", r"the load_module\(\) method", DeprecationWarning)
            flag.parse(path)
        config = flag.value
        is_config = hasattr(config, "lock") and isinstance(config, config_dict.ConfigDict)
    except Exception as error:
        cause = _unwrapped(error)
        if isinstance(cause, ConfigError):
            raise cause from error
        frames = traceback.extract_tb(cause.__traceback__)
        lines = [f.lineno for f in frames if os.path.abspath(f.filename) == os.path.abspath(file)]
        where = f"{file}, line {lines[-1]}" if lines else file
        raise ConfigError(f"{where}: {type(cause).__name__}: {cause}") from error
    if not is_config:
        raise ConfigError(f"{file}: get_config() must return a ConfigDict; it returned {type(config).__name__}")


def _unwrapped(error: BaseException) -> BaseException:
    """The error that the config file raised, out of those that absl and ml_collections wrap around it."""
    wrappers = ("Error whilst parsing config file", "Configuration is not available", "Failed loading config")
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        wrapped = isinstance(error, flags.Error) or str(error).startswith(wrappers)
        inner = error.__cause__ or error.__context__ if wrapped else None
    return error


def load_config(config: Config, workdir: str | None, overrides: Sequence[str]) -> Config:
    """The config of the command with its overrides: that of --config, or else the one stored in the run's folder.

    Raises:
        ConfigError: neither is there; an override that does not fit; a value that is not a number.
    """
    if config is None:
        if workdir is None:
            raise ConfigError(f"--config is missing: --config=FILE.py{_config_files()}")
        config = RunFolder(workdir).load_config()
    apply_overrides(config, overrides)
    check_values(config)
    return config


def use_cores(config: Config) -> None:
    """Asks jax for a device a core where the config has many seeds, see `cpu_devices.use_cores`."""
    if {"num_seeds", "sweep"} <= set(config) and is_many(config):
        from flaxrl.cpu_devices import use_cores

        use_cores(config)


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None, train: bool) -> None:
    """Joins the other processes of the run, where the flags or a launcher say that there are some.

    Raises:
        ConfigError: flags that do not fit together.
        TrainingError: the others could not be reached.
    """
    if train:
        processes.connect(coordinator, num_processes, process_id)
    elif (coordinator, num_processes, process_id) != (None, None, None):
        raise ConfigError("--mode=eval runs in one process; leave out --coordinator, --num_processes and --process_id")


def check(config: Config, workdir: str, train: bool = True, video: str | None = None, chosen: bool = False) -> None:
    """Everything that can be refused before anything heavy is imported or compiled.

    Args:
        config: of the run.
        workdir: its folder.
        train: checks what only training needs (the batch on this machine's devices), else what an evaluation does.
        video: file that the agent is to be filmed into.
        chosen: one of the run's seeds or settings is named.

    Raises:
        ConfigError: fields that do not fit together, or not the run that `workdir` holds.
    """
    if train:
        from flaxrl.trainers import plan

        plan.check(config)
    else:
        build(config.eval, "config.eval")
    RunFolder(workdir).check(config)
    if video is not None:
        from flaxrl.trainers.video import check_one, check_video

        check_one(config, chosen)
        check_video(video, config)


def run_workdir(workdir: str | None, config_path: Callable[[], str]) -> str:
    """The run's folder: that of --workdir, or else a new one.

    Args:
        workdir: as given to this process.
        config_path: gives that of the config file.

    Raises:
        ConfigError: the processes were not given the same.
    """
    processes.same("--workdir", workdir)
    return workdir or new_workdir(config_path())


def new_workdir(config_path: str, root: str = "runs") -> str:
    """A folder for a new run: root/<config file>[-<argument>]/<date-time>, not there yet; process 0 names it."""
    file, _, argument = config_path.partition(":")
    name = Path(file).stem + ("-" + re.sub(r"[^\w.=-]+", "_", argument) if argument else "")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder, count = os.path.join(root, name, stamp), 1
    while os.path.exists(folder):
        count += 1
        folder = os.path.join(root, name, f"{stamp}-{count}")
    return processes.from_first(folder)


def table(metrics: dict[str, Any]) -> str:
    """Metrics as lines of 'name  value', aligned."""
    values = plain_metrics(metrics)
    width = max(map(len, values), default=0)
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""A run's folder: the config's round trip, what may change on a resume, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import config_dict

from flaxrl.build import config_for
from flaxrl.configuration import LATER
from flaxrl.errors import ConfigError
from flaxrl.run_folder import RunFolder, flatten, plain


@dataclasses.dataclass(frozen=True)
class Settings:
    every: int | None = None
    episodes: int = 10


@dataclasses.dataclass(frozen=True)
class Update:
    epochs: int = 1
    accumulation: int = 1
    target_period: int | None = None
    max_skipped: int = 10


@dataclasses.dataclass(frozen=True)
class Held:
    kwargs: dict = dataclasses.field(default_factory=dict)


SETTINGS, UPDATE, HELD = (f"{__name__}:{name}" for name in ("Settings", "Update", "Held"))


def make_config(**top: object) -> Any:
    config = config_dict.ConfigDict(
        {
            "seed": 0,
            "num_seeds": 1,
            "sweep": {},
            "total_steps": 1000,
            "note": None,
            "rules": (("a.*", "fsdp"), ("b", None)),
            "optimizer": config_for(SETTINGS, episodes=3),
            "learner": config_for(UPDATE, epochs=2),
            "eval": config_for(SETTINGS),
        },
        convert_dict=False,
    )
    with config.ignore_type():
        for key, value in top.items():
            config[key] = value
    return config.lock()


def test_round_trip_keeps_values_types_and_tuples(tmp_path: Path) -> None:
    config = make_config()
    RunFolder(tmp_path / "run").match(config)
    loaded = RunFolder(tmp_path / "run").load_config()
    assert loaded.to_dict() == config.to_dict()
    assert loaded.rules == (("a.*", "fsdp"), ("b", None)) and isinstance(loaded.rules[0], tuple)
    assert loaded.is_locked and loaded.note is None
    loaded.learner.target_period = 3  # optional fields are typed again
    loaded.learner.target_period = None
    with pytest.raises(TypeError):
        loaded.learner.target_period = "often"
    assert RunFolder(tmp_path / "run").load_versions().keys() >= {"python", "jax", "flax", "orbax-checkpoint"}


def test_a_run_from_before_many_seeds_is_one_of_one_seed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.match(make_config())
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in stored.items() if k not in LATER}))
    folder.check(make_config())
    assert folder.load_config().num_seeds == 1 and folder.load_config().sweep == {}
    with pytest.raises(ConfigError, match="num_seeds 1 -> 2"):
        folder.check(make_config(num_seeds=2))


def test_a_sweep_is_stored_and_must_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    config = make_config(sweep={"loss.entropy_cost": [0.1, 0.2]})
    folder.match(config)
    assert folder.load_config().sweep == {"loss.entropy_cost": (0.1, 0.2)}
    folder.check(config)
    with pytest.raises(ConfigError, match=r"sweep.loss.entropy_cost \(0.1, 0.2\) -> \(absent\)"):
        folder.check(make_config())


def test_free_fields_may_change_and_are_stored(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.match(make_config())
    changed = make_config(total_steps=2000)
    changed.eval.episodes, changed.learner.accumulation = 77, 4
    folder.match(changed)
    loaded = folder.load_config()
    assert (loaded.total_steps, loaded.eval.episodes, loaded.learner.accumulation) == (2000, 77, 4)


def test_other_fields_are_listed_with_both_values_and_nothing_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.match(make_config())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    changed = make_config(seed=5, total_steps=9)
    changed.learner.epochs = 4
    with pytest.raises(ConfigError) as info:
        folder.match(changed)
    message = str(info.value)
    assert "seed 0 -> 5" in message and "learner.epochs 2 -> 4" in message and "another --workdir" in message
    assert "total_steps 1000" not in message and "\n" not in message
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("value", [True, 0.5])
def test_number_and_bool_differ(tmp_path: Path, value: object) -> None:
    RunFolder(tmp_path).match(make_config(seed=1))
    with pytest.raises(ConfigError, match=f"seed 1 -> {value}"):
        RunFolder(tmp_path).check(make_config(seed=value))


def test_missing_and_new_keys_are_compared_by_path(tmp_path: Path) -> None:
    RunFolder(tmp_path).match(make_config())
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["learner"]["max_skipped"]
    stored["learner"]["gone"] = 1
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"learner\.gone 1 -> \(absent\), learner\.max_skipped \(absent\) -> 10"):
        RunFolder(tmp_path).check(make_config())
    with pytest.raises(ConfigError, match=r"config\.json: '.*Update' has no field 'gone'"):
        RunFolder(tmp_path).load_config()


def test_a_field_that_came_later_counts_as_its_default(tmp_path: Path) -> None:
    """So a run of an older version goes on, and can be evaluated."""
    RunFolder(tmp_path).match(make_config())
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["learner"]["max_skipped"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    RunFolder(tmp_path).check(make_config())
    RunFolder(tmp_path).check(RunFolder(tmp_path).load_config())
    changed = make_config()
    changed.learner.max_skipped = 11
    with pytest.raises(ConfigError, match=r"learner\.max_skipped 10 -> 11"):
        RunFolder(tmp_path).check(changed)
    RunFolder(tmp_path).match(make_config())
    assert json.loads((tmp_path / "config.json").read_text())["learner"]["max_skipped"] == 10


@pytest.mark.parametrize(
    "kwargs", [{"made_by": {"name": SETTINGS, "episodes": 4}}, {"name": "x", "size": 3}, {"a": {"name": "b"}}]
)
def test_a_plain_dict_may_hold_names(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    """It is not filled in as a block would be, so the same command goes on."""
    folder = RunFolder(tmp_path)
    config = make_config(env=config_for(HELD, kwargs=kwargs))
    folder.match(config)
    folder.check(config)
    assert folder.load_config().env.kwargs.to_dict() == kwargs
    with pytest.raises(ConfigError, match=r"env\.kwargs.* -> "):
        folder.check(make_config(env=config_for(HELD)))


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"no run's folder: it holds thesis\.tex"):
        RunFolder(tmp_path).match(make_config())
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").match(make_config())


def test_hidden_files_do_not_make_a_folder_unusable(tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").write_text("")
    RunFolder(tmp_path).match(make_config())
    assert sorted(os.listdir(tmp_path)) == [".gitkeep", "config.json", "versions.json"]


@pytest.mark.parametrize("content", ['{"seed": 1', "[1, 2]"])
def test_damaged_config_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is (damaged|not the config)"):
        RunFolder(tmp_path).load_config()


def test_no_run_names_the_runs_nearby(tmp_path: Path) -> None:
    RunFolder(tmp_path / "vtrace" / "one").match(make_config())
    with pytest.raises(ConfigError, match=r"did you mean '.*vtrace/one'"):
        RunFolder(tmp_path / "vtrace").load_config()
    with pytest.raises(ConfigError, match=r"did you mean '.*vtrace/one'"):
        RunFolder(tmp_path / "vtrace" / "onee").load_config()


def test_a_failed_write_keeps_the_old_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(tmp_path).match(make_config())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path).match(make_config(total_steps=5))
    assert RunFolder(tmp_path).load_config().total_steps == 1000


def test_plain_values() -> None:
    config = make_config(seed=np.int64(2**33))
    assert plain(config)["seed"] == 2**33 and type(plain(config)["seed"]) is int
    assert flatten({"a": {"b": 1, "c": {"d": (2,)}}, "e": None}) == {"a.b": 1, "a.c.d": (2,), "e": None}
    for bad in (float("nan"), (1.0, float("nan")), np.float32("nan")):
        with pytest.raises(ConfigError, match=r"config\.seed.* is NaN"):
            plain(make_config(seed=bad))
    with pytest.raises(ConfigError, match=r"config\.seed = .* cannot be stored"):
        plain(make_config(seed=np.zeros(3)))

"""Overrides: text -> a typed field; every wrong one is told in one line with what would be right."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any, Literal

import pytest
from ml_collections import config_dict

from flaxrl import overrides
from flaxrl.build import config_for
from flaxrl.errors import ConfigError
from tests.small_runs import small_config

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Rate:
    learning_rate: float = 1e-3
    clip: float | None = 0.5
    period: int | None = None
    nesterov: bool = False
    kind: Literal["adam", "sgd"] = "adam"
    limit: float | int = 1


@dataclasses.dataclass(frozen=True)
class Net:
    hidden: tuple[int, ...] = (64, 64)
    pair: tuple[int, float] = (1, 2.0)
    names: tuple[str, ...] = ("a",)
    rules: tuple = ()
    torso: Rate | None = None
    label: str | None = None


def make_config() -> Any:
    config = config_dict.ConfigDict({"seed": 0, "total_steps": 1000, "init_from": None})
    config.optimizer = config_for(f"{__name__}:Rate")
    config.model = config_for(f"{__name__}:Net")
    config.nested = config_dict.ConfigDict({"inner": config_for(f"{__name__}:Rate", learning_rate=2)})
    config.extra = config_dict.ConfigDict({"ratio": 0.5, "on": True, "word": "x", "sizes": (3, 4)})
    config.eval = config_dict.ConfigDict({"episodes": 10})
    return config.lock()


def at(config: Any, path: str) -> Any:
    return dict(overrides.paths(config))[path]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Unknown keys, at every depth, and fields that sit in another block.
        ("sed=1", "--config.sed: no such field; did you mean --config.seed"),
        ("optimizer.learing_rate=1", "did you mean --config.optimizer.learning_rate?"),
        ("optimzer.learning_rate=1", "did you mean --config.optimizer.learning_rate?"),
        ("nested.inner.nestrov=1", "did you mean --config.nested.inner.nesterov?"),
        ("learning_rate=1", "--config.optimizer.learning_rate or --config.nested.inner.learning_rate"),
        ("eval.zzz=1", "config.eval has: episodes"),
        ("seed.x=1", "config.seed is 0, which has no fields"),
        ("optimizer=adam", "--config.optimizer is a block of fields; set one of them, such as"),
        # Values.
        ("seed=1.5", "--config.seed=1.5: seed must be an integer"),
        ("seed=1e999999999", "seed must be an integer"),
        ("seed=true", "seed must be an integer"),
        ("optimizer.learning_rate=nan", "learning_rate must be a number"),
        ("optimizer.learning_rate=fast", "learning_rate must be a number"),
        ("optimizer.learning_rate=None", "learning_rate must be a number"),
        ("optimizer.clip=nan", "clip must be a number or None"),
        ("optimizer.nesterov=no", "--config.optimizer.nesterov=no: nesterov must be true or false"),
        ("optimizer.kind=adm", "kind must be one of adam, sgd (did you mean 'adam'?)"),
        ("extra.ratio=None", "ratio must be a number"),
        ("model.hidden=(128,1.5)", "hidden must be a tuple of integers, written a,b or (a,)"),
        ("model.hidden=wide", "hidden must be a tuple of integers"),
        ("model.hidden=(128,True)", "hidden must be a tuple of integers"),
        ("model.pair=1", "pair must be a tuple of integers and numbers"),
        ("model.torso=mlp", "torso must be a Rate, set as a block in the config file"),
        ("extra.sizes=1.5,2", "sizes must be a tuple of integers"),
        ("seed", "--config.seed needs a value: --config.seed=VALUE"),
        ("seed=", "seed must be an integer"),
    ],
)
def test_wrong_override_is_told_in_one_line(override: str, message: str) -> None:
    config = make_config()
    with pytest.raises(ConfigError) as info:
        overrides.apply(config, [override])
    assert message in str(info.value) and "\n" not in str(info.value)
    assert config.to_dict() == make_config().to_dict()


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("seed=1e6", "seed", 1_000_000),
        ("seed=3.0", "seed", 3),
        ("total_steps=3000000000", "total_steps", 3_000_000_000),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("optimizer.clip=None", "optimizer.clip", None),
        ("optimizer.clip=none", "optimizer.clip", None),
        ("optimizer.clip=2", "optimizer.clip", 2.0),
        ("optimizer.period=100", "optimizer.period", 100),
        ("optimizer.period=1e3", "optimizer.period", 1000),
        ("optimizer.nesterov=true", "optimizer.nesterov", True),
        ("optimizer.nesterov", "optimizer.nesterov", True),
        ("optimizer.nesterov=False", "optimizer.nesterov", False),
        ("optimizer.kind=sgd", "optimizer.kind", "sgd"),
        ("optimizer.limit=2", "optimizer.limit", 2),
        ("optimizer.limit=2.5", "optimizer.limit", 2.5),
        ("model.hidden=(128,)", "model.hidden", (128,)),
        ("model.hidden=128,128", "model.hidden", (128, 128)),
        ("model.hidden=(128,128)", "model.hidden", (128, 128)),
        ("model.hidden=128", "model.hidden", (128,)),
        ("model.hidden=()", "model.hidden", ()),
        ("model.pair=3,4", "model.pair", (3, 4.0)),
        ("model.names=json_lines,tensorboard", "model.names", ("json_lines", "tensorboard")),
        ("model.names=('a','b')", "model.names", ("a", "b")),
        ("model.rules=(('a.*','fsdp'),)", "model.rules", (("a.*", "fsdp"),)),
        ("model.label=x=y", "model.label", "x=y"),
        ("nested.inner.clip=None", "nested.inner.clip", None),
        ("extra.ratio=3", "extra.ratio", 3.0),
        ("extra.on=false", "extra.on", False),
        ("extra.word=None", "extra.word", "None"),
        ("extra.sizes=7,", "extra.sizes", (7,)),
        ("init_from=runs/a", "init_from", "runs/a"),
    ],
)
def test_overrides_are_typed(argument: str, path: str, value: Any) -> None:
    config = make_config()
    overrides.apply(config, [argument])
    found = at(config, path)
    assert found == value and type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in found] == [type(x) for x in value]
    assert config.is_locked


def test_optional_fields_go_to_a_number_and_back() -> None:
    config = make_config()
    overrides.apply(config, ["optimizer.period=5", "init_from=a"])
    assert (config.optimizer.period, config.init_from) == (5, "a")
    config = make_config()
    overrides.apply(config, ["optimizer.period=5", "optimizer.period=None", "init_from=a", "init_from=None"])
    assert (config.optimizer.period, config.init_from) == (None, None)


def test_a_field_that_is_a_dict_takes_new_keys() -> None:
    config = config_for("gymnax", game="MemoryChain-bsuite")
    whole: Any = config_dict.ConfigDict({"env": config}).lock()
    overrides.apply(whole, ["env.params.memory_length=20"])
    assert whole.env.params.to_dict() == {"memory_length": 20} and whole.is_locked and whole.env.params.is_locked


def test_what_a_plain_dict_holds_is_no_block() -> None:
    """`name` is an argument like any other there, and new ones may be given at any depth."""
    whole: Any = config_dict.ConfigDict({"env": config_for("gymnasium", kwargs={"name": "x", "in": {"name": "y"}})})
    overrides.apply(whole.lock(), ["env.kwargs.name=z", "env.kwargs.size=3", "env.kwargs.in.deep=true"])
    assert whole.env.kwargs.to_dict() == {"name": "z", "size": 3, "in": {"name": "y", "deep": True}}


def test_a_sweep_is_given_field_by_field() -> None:
    config = small_config()
    overrides.apply(config, ["sweep.optimizer.learning_rate=1e-3,3e-4", "sweep.loss.entropy_cost=0.1"])
    assert config.sweep == {"optimizer.learning_rate": (1e-3, 3e-4), "loss.entropy_cost": (0.1,)}
    assert small_config().sweep == {}
    overrides.apply(config, ["sweep=None", "sweep.loss.discount=0.9,1"])
    assert config.sweep == {"loss.discount": (0.9, 1.0)}
    for wrong, message in (
        ("sweep=3", r"--config.sweep needs a field and its values, such as --config.sweep.optimizer.learning_rate="),
        ("sweep.loss.discount", r"--config.sweep.loss.discount needs a field and its values"),
        ("sweep.loss.discount=a", r"--config.sweep.loss.discount=a: discount must be a tuple of numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            overrides.apply(config, [wrong])
    with pytest.raises(ConfigError, match="this config has no field 'sweep'"):
        overrides.apply(make_config(), ["sweep.loss.discount=0.9"])


def test_the_last_of_two_wins() -> None:
    config = make_config()
    overrides.apply(config, ["model.hidden=1,2", "model.hidden=3,"])
    assert config.model.hidden == (3,)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_none_of_the_shipped_configs_can_be_set_and_unset(path: Path) -> None:
    config = runpy.run_path(str(path))["get_config"]()
    empty = [name for name, value in overrides.paths(config) if value is None]
    assert empty
    for name in empty:
        try:
            overrides.apply(config, [f"{name}=1"])
        except ConfigError as error:
            assert "set as a block in the config file" in str(error)
            continue
        assert at(config, name) in (1, "1", (1,))
        overrides.apply(config, [f"{name}=None"])
        assert at(config, name) is None

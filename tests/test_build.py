"""config_for and build: names, fields, optional fields, types."""

from __future__ import annotations

import dataclasses

import pytest
from ml_collections import config_dict

from flaxrl import checks
from flaxrl.build import REGISTRY, build, config_for, resolve
from flaxrl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 3
    spec: str | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    rate: float = 1
    clip: float | None = None
    hidden: tuple[int, ...] = (64, 64)
    inner: Inner | None = None

    def __post_init__(self) -> None:
        checks.positive(self, "rate")


@dataclasses.dataclass(frozen=True)
class Holder:
    kwargs: dict = dataclasses.field(default_factory=dict)


class Plain:
    def __init__(self, needed: int, given: str = "x", *, only: bool = False):
        self.needed, self.given, self.only = needed, given, only


INNER, OUTER, PLAIN, HOLDER = (f"{__name__}:{n}" for n in ("Inner", "Outer", "Plain", "Holder"))


def test_every_registered_name_has_a_path() -> None:
    for name, path in REGISTRY.items():
        assert path.count(":") == 1 and path.startswith("flaxrl."), name


def test_config_has_all_fields_and_typed_optionals() -> None:
    block = config_for(OUTER, rate=2).lock()
    assert block.to_dict() == {"name": OUTER, "rate": 2.0, "clip": None, "hidden": (64, 64), "inner": None}
    assert isinstance(block.rate, float)
    block.clip = 3
    assert block.clip == 3.0
    block.clip = None
    assert block.clip is None
    with pytest.raises(TypeError):
        block.clip = "three"


def test_field_without_default_is_left_to_the_program() -> None:
    block = config_for(PLAIN)
    assert "needed" not in block
    assert build(block, needed=7).needed == 7
    with pytest.raises(ConfigError, match="needs needed"):
        build(block)


def test_build_nests_and_passes_context() -> None:
    made = build(config_for(OUTER, inner=config_for(INNER, size=5)), spec="known")
    assert made == Outer(inner=Inner(size=5, spec="known"))


def test_a_plain_dict_is_handed_over_as_it_is() -> None:
    """What it holds is its class's own affair, even where it looks like a block."""
    for kwargs in ({"name": "x", "size": 3}, {"inner": {"name": INNER, "size": 5}}):
        made = build(config_for(HOLDER, kwargs=kwargs))
        assert made.kwargs == kwargs and all(type(v) is not config_dict.ConfigDict for v in made.kwargs.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve("vtrac"), "did you mean 'vtrace'"),
        (lambda: resolve(f"{__name__}:Iner"), "did you mean 'Inner'"),
        (lambda: resolve("no_such_lab.parts:Inner"), "no module 'no_such_lab'"),
        (lambda: config_for(OUTER, clp=1), "did you mean 'clip'"),
        (lambda: build(config_dict.ConfigDict({"name": OUTER, "hiden": (1,)}), "config.loss"), r"config\.loss\.hiden"),
        (lambda: build(config_for(OUTER, hidden=(64, 1.5)), "config.x"), r"config\.x\.hidden = \(64, 1\.5\)"),
        (lambda: build(config_for(OUTER, rate=-1), "config.x"), r"config\.x: Outer\.rate = -1\.0 must be > 0"),
        (lambda: build(config_for(OUTER, rate=float("nan"))), "nan must be"),
        (lambda: build(3, "config.x"), "config.x must be a block"),
        (
            lambda: build(config_for(OUTER, inner=config_for(INNER, size="big")), "config.x"),
            r"config\.x\.inner\.size = 'big' must be int",
        ),
    ],
)
def test_faults_are_named(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        call()
    assert "\n" not in str(info.value)

"""`--config.a.b=value`: text -> a typed value in a ConfigDict.

The type of a field is what its class annotates (the block's `name` tells the class), or else the type of the value that
the config file gave it.
"""

from __future__ import annotations

import ast
import decimal
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from ml_collections import config_dict

from flaxrl import build, checks
from flaxrl.errors import ConfigError

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "None"}
_PLURALS = {int: "integers", float: "numbers", bool: "booleans", str: "names"}
_MAX_DIGITS = 30  # of an integer written with an exponent: 1e999999999 would fill the memory


def apply(config: config_dict.ConfigDict, overrides: Iterable[str]) -> None:
    """Sets fields of `config` in place, in the order given; a field given twice keeps the last value.

    Args:
        config: the config, locked or not.
        overrides: 'path.to.field=text' each; a bare 'path.to.field' sets a bool to True.

    Raises:
        ConfigError: unknown field, with the nearest; a value that does not fit, with what would.
    """
    optional: set[str] = set()
    for override in overrides:
        path, equals, text = override.partition("=")
        if path == "sweep" or path.startswith("sweep."):
            _apply_sweep(config, path, text)
            continue
        block, key, raw = _find(config, path)
        if key not in block:  # of a field that is a dict: its class knows which keys there are
            with block.unlocked():
                block[key] = None
        elif block[key] is None:
            optional.add(path)
        annotation = _annotation(block, key, path in optional, raw)
        if not equals:
            if annotation is not bool:
                raise ConfigError(f"--config.{path} needs a value: --config.{path}=VALUE")
            text = "true"
        value = _parse(path, text, annotation)
        with config.ignore_type():  # the type was checked above, against more than ml_collections knows
            block[key] = value


def _apply_sweep(config: config_dict.ConfigDict, path: str, text: str) -> None:
    """Sets the values of one swept field: `--config.sweep.optimizer.learning_rate=1e-3,3e-4`; None sweeps nothing."""
    fields: Any = config
    if "sweep" not in config:
        raise ConfigError(f"--config.{path}: this config has no field 'sweep'; make it with flaxrl.run_config(...)")
    if path == "sweep" and text in ("None", "none", "{}"):
        fields.sweep = {}
        return
    field = path.partition(".")[2]
    if not field or not text:
        raise ConfigError(
            f"--config.{path} needs a field and its values, such as --config.sweep.optimizer.learning_rate=1e-3,3e-4"
        )
    fields.sweep = {**fields.sweep, field: _parse(path, text, tuple[float, ...])}


def paths(config: config_dict.ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All (dotted path, value) pairs below a block, the inner blocks among them."""
    for key in config:
        value = config[key]
        yield prefix + key, value
        if isinstance(value, config_dict.ConfigDict):
            yield from paths(value, f"{prefix}{key}.")


def _find(config: config_dict.ConfigDict, path: str) -> tuple[config_dict.ConfigDict, str, bool]:
    """The block that holds the field at `path`, the field's key in it, and whether that is in a plain dict's depths."""
    *parents, key = path.split(".")
    block: Any = config
    above: Any = {}
    raw = False
    for depth, part in enumerate([*parents, key]):
        if not isinstance(block, config_dict.ConfigDict):
            here = ".".join(["config", *parents[:depth]])
            raise ConfigError(f"--config.{path}: {here} is {block!r}, which has no fields")
        if part not in block:
            if depth == len(parents) and (raw or (build.is_block(above) and not build.is_block(block))):
                return block, key, raw  # a new key of a field that is a dict
            raise ConfigError(f"--config.{path}: no such field; {_hint(config, block, path, depth)}")
        if depth < len(parents):
            raw = raw or (build.is_block(block) and part in build.raw_fields(build.resolve(str(block["name"]))))
            above, block = block, block[part]
    value = block[key]
    if isinstance(value, config_dict.ConfigDict):
        fields = ", ".join(f"--config.{path}.{k}" for k in list(value)[:3] or ["KEY"])
        raise ConfigError(f"--config.{path} is a block of fields; set one of them, such as {fields}")
    return block, key, raw


def _hint(config: config_dict.ConfigDict, block: config_dict.ConfigDict, path: str, depth: int) -> str:
    """The nearest valid fields: siblings of the wrong part first, then fields of that name in other blocks."""
    parts = path.split(".")
    known = sorted((p for p, _ in paths(config)), key=lambda p: (p.count("."), p))
    near = []
    for sibling in difflib.get_close_matches(parts[depth], list(block), n=3):
        whole = ".".join([*parts[:depth], sibling, *parts[depth + 1 :]])
        near.append(whole if whole in known else ".".join([*parts[:depth], sibling]))
    if not near:
        names = {p.rpartition(".")[2] for p in known}
        close = difflib.get_close_matches(parts[-1], names, n=2, cutoff=0.75)
        near = [p for name in close for p in known if p.rpartition(".")[2] == name][:3]
    if near:
        return f"did you mean {' or '.join(f'--config.{p}' for p in near)}?"
    return f"{'.'.join(['config', *parts[:depth]])} has: {', '.join(sorted(block))}"


def _annotation(block: config_dict.ConfigDict, key: str, optional: bool, raw: bool) -> Any:
    """Type of a field: its class's annotation where there is one that says enough, else the type of its value."""
    fields: Any = block
    known = build.is_block(block) and not raw
    hint = build.annotations_of(build.resolve(fields["name"])).get(key) if known else None
    if hint is not None and _understood(hint):
        return hint
    value = fields[key]
    if isinstance(value, (tuple, list)):
        kinds = list({type(v) for v in value})
        kind = kinds[0] if len(kinds) == 1 else Any
        return tuple[kind, ...] if kind in _PLURALS else tuple[Any, ...]
    found = block.get_type(key)
    if found is type(None) or found not in _WORDS:
        return Any
    return found | None if optional else found


def _understood(annotation: Any) -> bool:
    if annotation in _WORDS or typing.get_origin(annotation) is Literal:
        return True
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation not in (tuple, list, dict, object)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(_understood(a) for a in typing.get_args(annotation))
    return _is_sequence(annotation)


def _is_sequence(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (tuple, list, Sequence)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _parse(path: str, text: str, annotation: Any) -> Any:
    """`text` as a value of the annotated type; of a union, the strictest type that fits."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if text in ("None", "none") and type(None) in options:
        return None
    strict = [bool, int, float]
    for option in sorted(options, key=lambda o: strict.index(o) if o in strict else len(strict) + (o is str)):
        try:
            return _parse_one(text, option)
        except ValueError:
            continue
    raise ConfigError(f"--config.{path}={text}: {path.rpartition('.')[2]} must be {_describe(options, text)}")


def _parse_one(text: str, annotation: Any) -> Any:
    """`text` as a value of one type; ValueError where it is none."""
    if annotation is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(text)
        return text.lower() in ("true", "1")
    if annotation is int:
        return _integer(text)
    if annotation is float:
        number = float(text)
        if math.isnan(number):
            raise ValueError(text)
        return number
    if annotation is str:
        return text
    if annotation is Any:
        return _literal(text)
    if typing.get_origin(annotation) is Literal:
        known = {str(a): a for a in typing.get_args(annotation)}
        if text not in known:
            raise ValueError(text)
        return known[text]
    if _is_sequence(annotation):
        return _sequence(text, annotation)
    raise ValueError(f"a {annotation} cannot be written as text")


def _integer(text: str) -> int:
    """An exact integer: 12, 1_000, 1e6 and 3.0, but not 1.5."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError(text) from None
    if not number.is_finite() or number.adjusted() > _MAX_DIGITS or number != number.to_integral_value():
        raise ValueError(text)
    return int(number)


def _literal(text: str) -> Any:
    """A Python literal, or the text itself where it is none."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _sequence(text: str, annotation: Any) -> Any:
    """A tuple from '(128,)', '128,128', '(128,128)' or '128'; every element must fit the annotated type."""
    value = _literal(text)
    if isinstance(value, str):  # unquoted names: json_lines,tensorboard
        value = tuple(v.strip() for v in text.strip("()[] ").split(",") if v.strip())
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(args) != len(values):
            raise ValueError(text)
        kinds: tuple[Any, ...] = args
    else:
        kinds = (args[0],) * len(values)
    made = [_element(v, kind) for v, kind in zip(values, kinds, strict=True)]
    return made if origin is list else tuple(made)


def _element(value: Any, annotation: Any) -> Any:
    if annotation is Any or (value is None and checks.matches(None, annotation)):
        return value
    simple = not isinstance(value, (tuple, list, dict))
    if simple and (annotation in _WORDS or typing.get_origin(annotation) is Literal):
        return _parse_one(str(value), annotation)
    if not checks.matches(value, annotation):
        raise ValueError(value)
    return value


def _describe(options: Sequence[Any], text: str) -> str:
    """What the types accept, in words."""
    words = []
    for option in options:
        if option in _WORDS:
            words.append(_WORDS[option])
        elif typing.get_origin(option) is Literal:
            known = [str(a) for a in typing.get_args(option)]
            words.append(f"one of {', '.join(known)} ({checks.nearest(text, known)})")
        elif _is_sequence(option):
            kinds = dict.fromkeys(_PLURALS.get(a, str(a)) for a in typing.get_args(option) if a is not Ellipsis)
            words.append(f"a tuple of {' and '.join(kinds)}, written a,b or (a,)")
        elif isinstance(option, type):
            words.append(f"a {option.__name__}, set as a block in the config file by flaxrl.config_for(...)")
    return " or ".join(words)

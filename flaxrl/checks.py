"""Checks of what a user gives, before anything compiles: configuration values, in `__post_init__`, and files."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxrl.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt `name`: its near matches among `known`, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not close:
        lowered = {k.lower(): k for k in known}
        close = [lowered[k] for k in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"


def in_range(
    owner: Any,
    *names: str,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Checks that numeric fields lie in a range; None passes (an optional field that is off).

    Args:
        owner: the object whose fields are checked; its class names the fault.
        *names: field names; a tuple field is checked element by element.
        low: smallest allowed value (excluded if `open_low`).
        high: largest allowed value (excluded if `open_high`).
        open_low: `low` itself is refused.
        open_high: `high` itself is refused.

    Raises:
        ConfigError: naming the field, the rule and the value.
    """
    for name in names:
        value = getattr(owner, name)
        for x in value if isinstance(value, tuple) else (value,):
            if x is None:
                continue
            good = not math.isnan(x) and (x > low if open_low else x >= low) and (x < high if open_high else x <= high)
            if not good:
                rule = []
                if low != -math.inf:
                    rule.append(f"{'>' if open_low else '>='} {low:g}")
                if high != math.inf:
                    rule.append(f"{'<' if open_high else '<='} {high:g}")
                text = " and ".join(rule) or "a number"
                raise ConfigError(f"{type(owner).__name__}.{name} = {value} must be {text}")


def positive(owner: Any, *names: str) -> None:
    """Checks that fields are > 0 and finite; None passes."""
    in_range(owner, *names, low=0, open_low=True, high=math.inf, open_high=True)


def non_negative(owner: Any, *names: str) -> None:
    """Checks that fields are >= 0 and finite; None passes."""
    in_range(owner, *names, low=0, high=math.inf, open_high=True)


def choice(owner: Any, name: str, allowed: Iterable[str]) -> None:
    """Checks that a string field is one of `allowed`; None passes where it is among them."""
    value = getattr(owner, name)
    allowed = list(allowed)
    if value not in allowed:
        raise ConfigError(f"{type(owner).__name__}.{name} = {value!r} is unknown; {nearest(str(value), allowed)}")


def divides(batch: int, parts: int, what: str, among: str) -> None:
    """Checks that `batch` splits into `parts` without a rest.

    Raises:
        ConfigError: e.g. "132 samples do not split into 8 minibatches: 132 % 8 = 4".
    """
    if batch % parts:
        down, up = batch - batch % parts, batch + parts - batch % parts
        near = f"{down} or {up}" if down else f"{up}"
        raise ConfigError(
            f"{batch} {what} do not split into {parts} {among}: {batch} % {parts} = {batch % parts}; nearest: {near}"
        )


def matches(value: Any, annotation: Any) -> bool:
    """Whether a config value fits a field's type annotation (int, float, bool, str, tuple, None and unions of them).

    Annotations that are none of these (modules, callables, dicts) are not checked.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, a) for a in typing.get_args(annotation))
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if annotation is type(None) or annotation is None:
        return value is None
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in (bool, str):
        return isinstance(value, annotation)
    if origin is tuple:
        args = typing.get_args(annotation)
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(matches(v, args[0]) for v in value)
        return len(value) == len(args) and all(matches(v, a) for v, a in zip(value, args, strict=True))
    return True


def writable(path: Path, flag: str) -> None:
    """Checks that a file can be written; the folders that it lies in need not be there yet.

    Args:
        path: of the file.
        flag: that names it, for the message.

    Raises:
        ConfigError: what is there does not let it be written.
    """
    here = next(p for p in (path, *path.parents) if os.path.exists(p))
    if here == path and not path.is_dir():
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{flag}={path} is there and cannot be written; name another file")
    elif not here.is_dir():
        raise ConfigError(f"{flag}={path}: {here} is a file, not a folder; did you mean {here.parent / path.name}?")
    elif not os.access(here, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}={path}: the folder {here} cannot be written to; did you mean {path.name}?")

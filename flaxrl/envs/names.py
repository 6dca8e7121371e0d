"""Names of games as users spell them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flaxrl import checks
from flaxrl.errors import ConfigError


def resolve_game(name: str, known: Iterable[str], where: str) -> str:
    """The id that `name` stands for, in any case and with or without its suffix where that is unique.

    Args:
        name: e.g. 'CartPole-v1', 'cartpole', 'breakout-minatar', 'memory_chain'.
        known: all ids, each with a suffix ('-v1', '-MinAtar').
        where: the config field, for messages.

    Raises:
        ConfigError: naming near matches.
    """
    known = list(known)
    wanted = _plain(name)
    exact = [k for k in known if _plain(k) == wanted]
    found = exact or [k for k in known if _plain(k.rpartition("-")[0]) == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{where} = {name!r} is ambiguous: {', '.join(found)}")
    # Compare with the short form too: a typo in 'catch' is far from 'Catch-bsuite'.
    short = {_plain(k.rpartition("-")[0]): k for k in known} | {k: k for k in known}
    hint = checks.nearest(wanted, [s for s in short if "-" not in s])
    if hint.startswith("known"):
        hint = checks.nearest(name, known)
    raise ConfigError(f"{where} = {name!r} is unknown; {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

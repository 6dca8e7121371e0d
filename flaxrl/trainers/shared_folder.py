"""The run's folder lies where all processes of the run see it."""

from __future__ import annotations

import time

from flaxrl.errors import ConfigError
from flaxrl.run_folder import RunFolder
from flaxrl.trainers.peers import Peers

_PATIENCE_S = 10.0  # a network file system may show a new file to others only after some seconds
_POLL_S = 0.1


def check_shared(folder: RunFolder, peers: Peers) -> None:
    """Checks that a run which one process sees in `folder` is there for all; all call it at the same place.

    Raises:
        ConfigError: in all of them, where one still does not see it after some seconds.
    """
    if not peers.agree(folder.has_run, any):
        return
    deadline = time.monotonic() + _PATIENCE_S
    while not folder.has_run and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    blind = peers.agree(folder.has_run, lambda seen: [i for i, sees in enumerate(seen) if not sees])
    if blind:
        raise ConfigError(
            f"workdir {str(folder.path)!r} is not on a file system that all processes share: process {blind[0]} does "
            "not see the run in it"
        )

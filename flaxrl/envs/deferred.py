"""Modules that an env suite imports but a run does not use, loaded only if something is asked of them."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from typing import Any

_LOCK = threading.RLock()


class _Deferred(types.ModuleType):
    """A module whose code has not run yet. `importlib.util.LazyLoader` would run it at the next `import` of it."""

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there: what an import itself reads is (__spec__, __path__).
        with _LOCK:
            if isinstance(self, _Deferred):  # no other thread has loaded it meanwhile
                object.__setattr__(self, "__class__", types.ModuleType)
                spec = self.__spec__
                assert spec is not None and spec.loader is not None
                spec.loader.exec_module(self)
        return getattr(self, name)


def defer(*names: str) -> None:
    """Makes later imports of these modules cost nothing until an attribute of them is read.

    Modules that are imported already, or not installed, are left alone.

    Args:
        *names: 'package' or 'package.module'.
    """
    for name in names:
        if name in sys.modules:
            continue
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:  # its package is not installed
            continue
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Deferred
        sys.modules[name] = module
        package, _, child = name.rpartition(".")
        if package:
            setattr(sys.modules[package], child, module)

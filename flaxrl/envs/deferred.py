"""Modules that an env suite imports but a run does not use, loaded only if something is asked of them."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from typing import Any

_LOCK = threading.RLock()
_LOADING: set[str] = set()  # changes under the lock: who holds it and finds a name here is the thread that loads it


class _Deferred(types.ModuleType):
    """A module whose code has not run yet. `importlib.util.LazyLoader` would run it at the next `import` of it."""

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there: what an import itself reads is (__spec__, __path__).
        with _LOCK:
            # Not where another thread has loaded it meanwhile, nor where its own code asks for what is still to come.
            if type(self) is _Deferred and self.__name__ not in _LOADING:
                _load(self)
        return types.ModuleType.__getattribute__(self, name)


def _load(module: _Deferred) -> None:
    """Runs the module's code; only then may others see it as one like any other."""
    name, spec = module.__name__, module.__spec__
    assert spec is not None and spec.loader is not None
    _LOADING.add(name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(name) is module:  # the next import tries anew, as after any failed one
            del sys.modules[name]
        raise
    finally:
        _LOADING.discard(name)
    object.__setattr__(module, "__class__", types.ModuleType)


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

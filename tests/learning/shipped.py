"""The shipped configs as learning tests run them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def shipped(name: str, *argument: str) -> Any:
    """A config of configs/, on one device, without TensorBoard."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*argument)
    config.mesh.data = 1
    config.log.writers = ("json_lines",)
    return config

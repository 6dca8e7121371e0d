"""How many devices jax makes of a CPU, asked for in time: once jax is in use the number is fixed."""

from __future__ import annotations

import os
from typing import Any

import jax

from flaxrl.trainers.seeds import runs_of, split_over

_FORCED = "xla_force_host_platform_device_count"


def cores() -> int:
    """CPU cores that this process may run on; all of the machine's where the system does not tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cores(config: Any) -> None:
    """One virtual CPU device a core where a config asks for several seeds, so that they run side by side.

    Only as many as the runs split over evenly. A number that the user gave (`JAX_NUM_CPU_DEVICES`, `jax.config`,
    XLA_FLAGS) stays, and on an accelerator it changes nothing. To be called before anything asks jax for a device; a
    notebook whose jax is in use already keeps the devices it has.
    """
    runs = runs_of(config)
    given = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if runs == 1 or given != -1 or _FORCED in os.environ.get("XLA_FLAGS", ""):
        return
    devices = split_over(runs, cores())
    if devices == 1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # in use already
        return

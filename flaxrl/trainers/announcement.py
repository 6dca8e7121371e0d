"""What a run prints before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
from clu import parameter_overview

from flaxrl.envs.spec import EnvSpec
from flaxrl.trainers.plan import Plan
from flaxrl.types import TrainState


def announcement(plan: Plan, workdir: Path, spec: EnvSpec, state: TrainState) -> Iterator[str]:
    """The run's folder, its plan, the memory that it takes, and the table of parameters, line by line."""
    yield f"workdir       {workdir}"
    yield from plan.lines()
    runs = 1 if plan.seeds is None else plan.seeds.size // plan.seeds.mesh.size
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    rows = (plan.steps_per_update + plan.source.batch_size) // plan.mesh.size
    observation = sum(x.nbytes for x in jax.tree.leaves(spec.zeros()))
    yield (
        f"memory        a device: {size / 2**20:,.1f} MiB of parameters and optimizer state, "
        f"{runs * rows * observation / 2**20:,.1f} MiB of observations a batch"
    )
    params = state.params if plan.seeds is None else jax.tree.map(lambda x: x[0], state.params)
    yield parameter_overview.get_parameter_overview(params, include_stats=False)

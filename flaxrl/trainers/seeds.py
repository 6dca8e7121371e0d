"""Many independent runs in one program: each setting of a sweep with each seed.

State, data and metrics have a leading axis `[N]`, one entry a run. It is split over a mesh of one axis, `seed`, each
device running its entries whole; on a device they are mapped by `jax.vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxrl.configuration import MeshSettings, is_many
from flaxrl.envs.spec import EnvSpec
from flaxrl.errors import ConfigError
from flaxrl.losses.base import Loss
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import first_state, run_key
from flaxrl.trainers.source import Source
from flaxrl.trainers.sweep import Sweep, make_sweep, swept
from flaxrl.types import Array, PyTree, TrainState

AXIS = "seed"


class Member(struct.PyTreeNode):
    """What tells one run from the others.

    Attributes:
        seed: int32.
        values: swept field -> float32.
    """

    seed: Array
    values: dict[str, Array]

    def apply(self, loss: Loss, optimizer: Optimizer) -> tuple[Loss, Optimizer]:
        """Loss and optimizer with this run's values."""
        return swept("loss", loss, self.values), swept("optimizer", optimizer, self.values)


@dataclass(frozen=True)
class Seeds:
    """The runs of one program; run i is of setting `i // len(seeds)` and seed `seeds[i % len(seeds)]`.

    Attributes:
        seeds: a run's config.seed each.
        sweep: the settings.
        mesh: one axis, `seed`, of a size that divides the number of runs.
    """

    seeds: range
    sweep: Sweep
    mesh: Mesh

    @property
    def size(self) -> int:
        """N, how many runs there are."""
        return len(self.seeds) * len(self.sweep.settings)

    @property
    def sharding(self) -> NamedSharding:
        """The leading axis of every array, split over the devices."""
        return NamedSharding(self.mesh, P(AXIS))

    def name(self, index: int) -> str:
        """A run as a person calls it: 'seed 3', 'seed 3 of learning_rate=0.001'."""
        setting, seed = divmod(index, len(self.seeds))
        label = self.sweep.labels[setting]
        return f"seed {self.seeds[seed]}" + (f" of {label}" if label else "")

    def index(self, seed: int | None, setting: str | None) -> int:
        """The run with a seed and a setting's label; either may be None where there is only one.

        Raises:
            ConfigError: there are several, or none such.
        """
        labels, seeds = self.sweep.labels, self.seeds
        if setting is None and len(labels) == 1:
            setting = labels[0]
        if setting not in labels:
            given = "name one of the sweep's settings" if setting is None else f"the sweep has no setting {setting!r}"
            raise ConfigError(f"{given}; there are {' and '.join(map(repr, labels))}")
        if seed is None and len(seeds) == 1:
            seed = seeds[0]
        if seed is None or seed not in seeds:
            given = "name one of the run's seeds" if seed is None else f"the run has no seed {seed}"
            raise ConfigError(f"{given}; there are {seeds[0]} to {seeds[-1]}")
        return labels.index(setting) * len(seeds) + seeds.index(seed)

    def members(self) -> Member:
        """All runs, leaves `[N]`, where they are computed."""
        settings, count = len(self.sweep.settings), len(self.seeds)
        seeds = np.tile(np.asarray(self.seeds, np.int32), settings)
        values = {path: np.repeat(column, count) for path, column in self.sweep.columns().items()}
        return jax.device_put(Member(seeds, values), self.sharding)

    def over(self, f: Callable[..., Any], in_axes: Any = 0, one_by_one: bool = False) -> Callable[..., Any]:
        """`f` of one run -> a function of all, leaves `[N, ...]`, to be jitted.

        Args:
            f: pure; its arguments and results are trees of arrays.
            in_axes: as `jax.vmap` has it: None for an argument that all runs share.
            one_by_one: on a device one run after the other, of a function of one argument.
        """
        mapped = functools.partial(jax.lax.map, f) if one_by_one else jax.vmap(f, in_axes=in_axes)
        if self.mesh.size == 1:
            return mapped
        specs = P(AXIS) if in_axes == 0 else tuple(P() if axis is None else P(AXIS) for axis in in_axes)
        return jax.shard_map(mapped, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)

    def lines(self) -> list[str]:
        """What the plan says of them."""
        seeds, settings, devices = len(self.seeds), len(self.sweep.settings), self.mesh.size
        which = f"{self.seeds[0]} to {self.seeds[-1]}" if seeds > 1 else f"{self.seeds[0]}"
        each = f"{self.size // devices} a device; steps and rates are those of one run"
        if not self.sweep.paths:
            return [f"seeds         {seeds} ({which}), {each}"]
        fields = "; ".join(self.sweep.lines())
        return [f"sweep         {fields}", f"runs          {settings} setting(s) x {seeds} seed(s) ({which}), {each}"]


def make_seeds(config: Any, source: Source, mesh: MeshSettings, devices: list[Any] | None = None) -> Seeds | None:
    """The runs that a config asks for; None where it is one.

    Args:
        config: of the run, its other blocks checked already.
        source: built from it.
        mesh: built from it.
        devices: to run on; None takes all.

    Raises:
        ConfigError: one line with the field, the rule and the nearest right value.
    """
    if not is_many(config):
        return None
    count, sweep = _count(config), make_sweep(config)
    what = f"config.num_seeds = {count}" if count > 1 else "config.sweep"
    if config.seed + count > 2**31:
        raise ConfigError(f"config.seed = {config.seed} with {what} must leave all seeds < 2**31 = {2**31}")
    if not source.traceable or type(source).traced_init is Source.traced_init:
        raise ConfigError(
            f"{what} needs a source that runs on the device whole, such as jax_rollout; {config.source.name!r} does "
            "not: start one run a seed"
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"{what} runs in one process, and there are {jax.process_count()}: give each a seed of its own"
        )
    if mesh.data != -1 or mesh.fsdp != 1 or mesh.rules:
        raise ConfigError(
            f"{what} gives the devices to the seeds, so config.mesh must be data = -1, fsdp = 1, rules = (), its "
            f"defaults; it is data = {mesh.data}, fsdp = {mesh.fsdp}, rules = {mesh.rules}"
        )
    return Seeds(range(config.seed, config.seed + count), sweep, seed_mesh(count * len(sweep.settings), devices))


def runs_of(config: Any) -> int:
    """How many runs a config asks for.

    Raises:
        ConfigError: a number of seeds or a sweep that cannot be.
    """
    return _count(config) * len(make_sweep(config).settings) if is_many(config) else 1


def _count(config: Any) -> int:
    count = config.num_seeds
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"config.num_seeds = {count!r} must be an integer >= 1")
    return count


def split_over(runs: int, devices: int) -> int:
    """The largest number of devices, at most `devices`, that `runs` split over evenly."""
    return next(n for n in range(min(runs, devices), 0, -1) if runs % n == 0)


def seed_mesh(runs: int, devices: list[Any] | None = None) -> Mesh:
    """A mesh of one axis, over as many devices as the runs split over evenly."""
    devices = list(jax.devices()) if devices is None else devices
    return Mesh(np.asarray(devices[: split_over(runs, len(devices))]), (AXIS,))


def init_states(
    agent: Any,
    spec: EnvSpec,
    loss: Loss,
    optimizer: Optimizer,
    seeds: Seeds,
    abstract: bool = False,
    collections: PyTree | None = None,
) -> TrainState:
    """The first TrainState of every run, leaves `[N, ...]`; each is what a run of that seed alone starts from.

    Args:
        agent: the Linen module.
        spec: of the env.
        loss: tells whether there is a target network.
        optimizer: makes the optax chain.
        seeds: the runs.
        abstract: only shapes, dtypes and shardings, as a checkpoint's template.
        collections: what each run's `variables` hold beside those of the agent; None for nothing.
    """
    tx = optimizer.make()

    def init(member: Member) -> TrainState:
        own = member.apply(loss, optimizer)[1].make() if member.values else tx
        state = first_state(agent, spec, own, loss.uses_target, run_key(member.seed, "parameters"), collections)
        return state.replace(tx=tx)  # the run's own holds values of this trace

    if abstract:
        shapes = jax.eval_shape(jax.vmap(init), seeds.members())
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=seeds.sharding), shapes)
    # Not side by side: orthogonal initialisers need a QR factorisation, and jax's of a batch blocks a thread of XLA's
    # pool until others have done its parts: with as many devices as cores all of them wait, for ever.
    return jax.jit(seeds.over(init, one_by_one=True), out_shardings=seeds.sharding)(seeds.members())

"""What a run will do, checked and computed before anything compiles or a suite is imported."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from flaxrl import checks
from flaxrl.build import build, resolve
from flaxrl.configuration import (
    TOP_LEVEL,
    CheckpointSettings,
    EvalSettings,
    LearnerSettings,
    LogSettings,
    MeshSettings,
)
from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.errors import ConfigError
from flaxrl.losses.base import Loss
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.seeds import Seeds, make_seeds
from flaxrl.trainers.sharding import make_mesh
from flaxrl.trainers.source import Source


@dataclass(frozen=True)
class Plan:
    """A checked run.

    Steps are rows inserted by the innermost source, T x B an iterate; budgets and cadences round up to whole calls.

    Attributes:
        seeds: the runs, where the program is one of many; all else is of one of them. None: there is one.
        updates_per_call: iterates in one dispatch.
        total_updates: iterates of the whole run.
    """

    loss: Loss
    source: Source
    optimizer: Optimizer
    learner: LearnerSettings
    mesh_settings: MeshSettings
    mesh: Mesh
    log: LogSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    seed: int
    seeds: Seeds | None
    updates_per_call: int
    total_updates: int

    @property
    def steps_per_update(self) -> int:
        """Steps an iterate adds."""
        return self.source.steps_per_update

    @property
    def steps_per_call(self) -> int:
        """Steps a dispatch adds."""
        return self.steps_per_update * self.updates_per_call

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, in whole calls."""
        return self.total_updates * self.steps_per_update

    def due(self, every: int | None, updates: int) -> bool:
        """Whether a cadence of `every` steps, rounded up to whole calls, falls on the call that ended at `updates`."""
        if every is None:
            return False
        calls = -(-every // self.steps_per_call)
        return (updates // self.updates_per_call) % calls == 0

    def progress(self, updates: Any) -> Any:
        """Fraction of the run done after `updates` iterates; float32 where `updates` is on the device."""
        return updates / float(self.total_updates)  # more than 2**31 updates are no int32

    def lines(self) -> list[str]:
        """The plan as a person reads it."""
        mesh = self.mesh if self.seeds is None else self.seeds.mesh
        devices = mesh.devices.flatten()
        kinds = sorted({d.device_kind for d in devices})
        shape = " x ".join(f"{k}={v}" for k, v in mesh.shape.items())
        time = self.steps_per_update // self.source.batch_size
        pieces = f" in {self.learner.accumulation} pieces" if self.learner.accumulation > 1 else ""
        return [
            f"devices       {len(devices)} x {', '.join(kinds)} (mesh {shape})",
            *([] if self.seeds is None else self.seeds.lines()),
            f"batch         T {time} x B {self.source.batch_size} = {self.steps_per_update:,} steps an update, "
            f"{self.learner.epochs} epoch(s) x {self.learner.minibatches} minibatch(es){pieces}",
            f"run           {self.total_updates:,} updates = {self.total_steps:,} steps, "
            f"{self.updates_per_call} update(s) a call",
            f"cadence       log {self._every(self.log.every)}, evaluation {self._every(self.eval.every)}, "
            f"checkpoint {self._every(self.checkpoint.every)}",
        ]

    def _every(self, every: int | None) -> str:
        if every is None:
            return "at the end"
        return f"every {-(-every // self.steps_per_call) * self.steps_per_call:,} steps"


def check(config: Any) -> Plan:
    """Builds what is light and checks what can be checked without an env suite.

    Raises:
        ConfigError: one line with the field, the rule and the numbers that break it.
    """
    for key in config:
        if key not in TOP_LEVEL:
            raise ConfigError(f"config has no field {key!r}; {checks.nearest(key, TOP_LEVEL)}")
    missing = [k for k in TOP_LEVEL if k not in config]
    if missing:
        raise ConfigError(f"config lacks {', '.join(missing)}; make it with flaxrl.run_config(...)")
    for name, low in (("seed", 0), ("total_steps", 1)):
        value = config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"config.{name} = {value!r} must be an integer >= {low}")
    if config.seed >= 2**31:
        raise ConfigError(f"config.seed = {config.seed} must be < 2**31 = {2**31}")
    blocks = {k: build(config[k], f"config.{k}") for k in ("learner", "mesh", "log", "eval", "checkpoint", "optimizer")}
    loss, source = build(config.loss, "config.loss"), build(config.source, "config.source")
    for where, made, kind in (("loss", loss, Loss), ("source", source, Source)):
        if not isinstance(made, kind):
            raise ConfigError(f"config.{where}.name = {config[where].name!r} is not a flaxrl {kind.__name__}")
    env = build(config.env, "config.env", num_envs=source.batch_size)
    if not isinstance(env, (HostEnv, JaxEnv)):
        raise ConfigError(f"config.env.name = {config.env.name!r} is neither a flaxrl.JaxEnv nor a flaxrl.HostEnv")
    agent = build(config.model, "config.model", action_spec=None)
    seeds = make_seeds(config, source, blocks["mesh"])
    # Of many seeds each device runs its own, so to one of them there is one device.
    mesh = make_mesh(blocks["mesh"], _learner_devices(source) if seeds is None else jax.local_devices()[:1])
    for name in blocks["log"].writers:
        resolve(name)
    _check_video(env, blocks["eval"], blocks["log"])
    updates_per_call = source.iterates_per_call
    plan = Plan(
        loss=loss,
        source=source,
        optimizer=blocks["optimizer"],
        learner=blocks["learner"],
        mesh_settings=blocks["mesh"],
        mesh=mesh,
        log=blocks["log"],
        eval=blocks["eval"],
        checkpoint=blocks["checkpoint"],
        seed=config.seed,
        seeds=seeds,
        updates_per_call=updates_per_call,
        total_updates=-(-config.total_steps // (source.steps_per_update * updates_per_call)) * updates_per_call,
    )
    _check_batch(plan, agent)
    return plan


def _check_video(env: HostEnv | JaxEnv, settings: EvalSettings, log: LogSettings) -> None:
    """A run whose evaluations are filmed has an env that draws and a writer that shows."""
    if not settings.video_episodes:
        return
    if set(log.writers) <= {"json_lines"}:
        raise ConfigError(
            f"eval.video_episodes = {settings.video_episodes}, but log.writers = {log.writers} shows no videos; "
            "add 'tensorboard', or set it to 0"
        )
    env.prepare_render()


def _learner_devices(source: Source) -> list[Any]:
    """All devices but those that each process keeps for its actors."""
    reserved = source.reserved_devices
    if not reserved:
        return list(jax.devices())
    devices: list[Any] = []
    for process in range(jax.process_count()):
        own = jax.local_devices(process_index=process)
        if max(reserved) >= len(own):
            raise ConfigError(f"source.actor_devices = {reserved}: a process has devices 0 to {len(own) - 1}")
        devices += [d for i, d in enumerate(own) if i not in reserved]
    if not devices:
        raise ConfigError(f"source.actor_devices = {reserved} leaves no device to the learner")
    return devices


def _check_processes(mesh: Mesh) -> None:
    """Each process has the same share of the mesh, so of the batch."""
    shares = [0] * jax.process_count()
    for device in mesh.devices.flatten():
        shares[device.process_index] += 1
    if len(set(shares)) > 1:
        shape = ", ".join(f"mesh.{k} = {v}" for k, v in mesh.shape.items())
        raise ConfigError(
            f"{shape} takes {shares} devices of the {len(shares)} processes; it must take as many of each"
        )


def _remedy(loss: Loss) -> str:
    chosen = any(field.name == "minibatch" for field in dataclasses.fields(loss))
    return "set config.loss.minibatch = 'sequences'" if chosen else "set config.model.core to feed_forward"


def _check_batch(plan: Plan, agent: Any) -> None:
    """Cross-field rules of the batch."""
    batch, devices = plan.source.batch_size, plan.mesh.size
    _check_processes(plan.mesh)
    checks.divides(batch, devices, "envs", f"devices ({jax.default_backend()})")
    plan.loss.check_epochs(plan.learner.epochs)
    minibatches, accumulation = plan.learner.minibatches, plan.learner.accumulation
    sequences = plan.loss.minibatch == "sequences"
    rows, unit = (batch, "sequences") if sequences else (plan.steps_per_update, "samples")
    checks.divides(rows // devices, minibatches, f"{unit} a device", "minibatches")
    rows //= devices * minibatches
    checks.divides(rows, accumulation, f"{unit} of a minibatch on a device", "pieces (learner.accumulation)")
    if not sequences:
        carry = functools.partial(agent.init_with_output, batch_size=1, method="initial_carry")
        if jax.tree.leaves(jax.eval_shape(carry, jax.random.key(0))[0]):
            raise ConfigError(
                f"loss {type(plan.loss).__name__} shuffles single steps, which a recurrent agent cannot learn from: "
                f"{_remedy(plan.loss)}"
            )
    if plan.loss.uses_target and plan.learner.target_period is None:
        raise ConfigError(f"loss {type(plan.loss).__name__} uses a target network: set config.learner.target_period")
    if not plan.loss.uses_target and plan.learner.target_period is not None:
        raise ConfigError(
            f"learner.target_period = {plan.learner.target_period}, but loss {type(plan.loss).__name__} has no "
            "target network; set it to None"
        )

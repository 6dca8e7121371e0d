"""What every source must do.

Put your own through it: `check_source(MySource(...), make_env, agent, mesh)`. It plays a few unrolls with unchanged
parameters and fails with the broken rule. The agent should be recurrent and read last actions and rewards; episodes
should end within `samples` unrolls, and not together with them, so that every rule is put to the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flaxrl.configuration import MeshSettings
from flaxrl.envs.base import HostEnv, JaxEnv
from flaxrl.envs.spec import EnvSpec
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import init_state
from flaxrl.trainers.sharding import batch_spec, bind_unroll
from flaxrl.trainers.source import Runtime, Source
from flaxrl.types import FIRST, LAST, MID, TrainState, Trajectory

MakeEnv = Callable[[int], HostEnv | JaxEnv]


def start(
    source: Source, make_env: MakeEnv, agent: Any, mesh: Mesh, seed: int = 0, updates: int = 0
) -> tuple[TrainState, Any, Callable]:
    """Connects a source to a run that has done `updates`: (state, data, sample), `sample` jitted where it may be."""
    spec = make_env(source.batch_size).spec
    settings = MeshSettings(mesh.shape["data"], mesh.shape["fsdp"])
    state = init_state(agent, spec, Optimizer(), settings, mesh, seed, target=False)
    state = state.replace(updates=jax.device_put(jnp.int32(updates), state.updates.sharding))
    source.setup(Runtime(make_env, agent, mesh, seed, lambda done: done / 1000))
    data = source.init(state, jax.random.key(seed + 1))
    return state, data, jax.jit(source.sample) if source.traceable else source.sample


def check_source(
    source: Source, make_env: MakeEnv, agent: Any, mesh: Mesh, *, samples: int = 4, seed: int = 0
) -> list[Trajectory]:
    """Plays `samples` unrolls and checks the whole contract.

    Args:
        source: not yet set up; closed at the end.
        make_env: number of envs -> a HostEnv of as many, or the JaxEnv.
        agent: the Linen module.
        mesh: devices; B is split over them.
        samples: unrolls to play, at least 2.
        seed: of the run.

    Returns:
        The unrolls as numpy, for checks of your own.
    """
    spec = make_env(source.batch_size).spec
    handed, copies = [], []
    try:
        state, data, sample = start(source, make_env, agent, mesh, seed)
        for i in range(samples):
            data, trajectory, metrics = sample(data, state, jax.random.fold_in(jax.random.key(seed), i))
            handed.append(trajectory)
            copies.append(jax.tree.map(lambda x: np.array(x, copy=True), trajectory))
            _check_metrics(metrics)
            data = source.feedback(data, None)
        source.check(data)
    finally:
        source.close()
        source.close()
    for now, before in zip(handed, copies, strict=True):
        _assert_equal(now, before, "a batch changed after it was handed over")
    _check_placed(handed[0], mesh)
    unroll = jax.jit(bind_unroll(agent, state.variables, mesh))
    for trajectory, copy in zip(handed, copies, strict=True):
        _check_shapes(source, spec, agent, copy)
        _check_reproduced(unroll(state.params, trajectory), copy)
    _check_rows(agent, copies)
    return copies


def _check_metrics(metrics: dict[str, Any]) -> None:
    for name, value in metrics.items():
        assert "/" in name, f"metric {name!r} has no group, such as 'actor/{name}'"
        parts = value if isinstance(value, tuple) else (value,)
        assert len(parts) in (1, 2) and all(np.shape(x) == () for x in parts), f"{name} is no scalar or (total, count)"
        assert all(np.isfinite(x) for x in parts), f"{name} = {value}"


def _check_placed(trajectory: Trajectory, mesh: Mesh) -> None:
    for leaf in jax.tree.leaves(trajectory):
        want = NamedSharding(mesh, batch_spec())
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), f"a leaf lies as {leaf.sharding}, expected {want}"


def _check_shapes(source: Source, spec: EnvSpec, agent: Any, trajectory: Trajectory) -> None:
    batch = source.batch_size
    time = source.steps_per_update // batch

    def check(name: str, x: Any, lead: tuple[int, ...], shape: tuple[int, ...], dtype: Any) -> None:
        assert x.shape == (*lead, *shape) and x.dtype == dtype, f"{name} is {x.dtype} {x.shape}"

    inputs, rows, inner = trajectory.inputs, (time + 1, batch), (time, batch)
    jax.tree.map(lambda s, x: check("observation", x, rows, s.shape, s.dtype), spec.observation, inputs.observation)
    check("step_type", inputs.step_type, rows, (), np.int8)
    assert (inputs.action_mask is not None) == spec.action_mask
    if spec.action_mask:
        check("action_mask", inputs.action_mask, rows, (spec.mask_size,), bool)
    assert (inputs.last_action is not None) == agent.use_last_action
    assert (inputs.last_reward is not None) == agent.use_last_reward
    check("action", trajectory.action, inner, spec.action.shape, spec.action.dtype)
    for name in ("reward", "discount", "log_prob", "value"):
        x = getattr(trajectory, name)
        if x is not None:
            check(name, x, inner, (), np.float32)
    for x in jax.tree.leaves(trajectory.carry):
        assert x.shape[:2] == (1, batch), f"carry is {x.shape}; it must be [1, B, ...]"


def _check_reproduced(output: Any, trajectory: Trajectory) -> None:
    """The learner's unroll from the stored carry says what the actor said, across episode ends too."""
    mask = trajectory.mask
    if trajectory.value is not None:
        _close(output.value[:-1][mask], trajectory.value[mask], "value differs from the unroll's")
    if trajectory.log_prob is not None:
        log_prob = np.asarray(output[:-1].policy.log_prob(trajectory.action))
        _close(log_prob[mask], trajectory.log_prob[mask], "log_prob differs from the unroll's")


def _check_rows(agent: Any, unrolls: list[Trajectory]) -> None:
    """Rows of consecutive unrolls, joined, are one stream an env under the episode rule."""
    for before, after in itertools.pairwise(unrolls):
        ends, starts = (jax.tree.map(lambda x, i=i: x[i], u.inputs) for u, i in ((before, -1), (after, 0)))
        _assert_equal(ends, starts, "an unroll must start with the row that ended the last one, row b the same env")
    kind = np.concatenate([u.inputs.step_type[:-1] for u in unrolls] + [unrolls[-1].inputs.step_type[-1:]])
    names = ("reward", "discount", "action")
    reward, discount, action = (np.concatenate([getattr(u, name) for u in unrolls]) for name in names)
    assert np.all(kind[0] == FIRST), "the first row of a run is FIRST"
    assert np.any(kind == LAST) and np.any(kind == MID), "no episode ended: play more samples"
    assert any(np.any(u.inputs.step_type[0] == MID) for u in unrolls), "no unroll starts inside an episode: change T"
    np.testing.assert_array_equal(kind[1:] == FIRST, kind[:-1] == LAST, "FIRST comes after LAST, and only there")
    valid = kind[:-1] != LAST
    assert np.all((discount == 0) | (discount == 1) | ~valid), "discount is 0 or 1: gamma is the loss's"
    assert np.all((discount == 1) | (kind[1:] == LAST) | ~valid), "discount 0 without an episode end"
    assert len({column.tobytes() for column in np.moveaxis(action, 1, 0)}) == action.shape[1], "two envs acted alike"
    _check_memory(agent, unrolls, kind, action, reward)
    masks = _inputs(unrolls[0]).action_mask
    if masks is not None:
        mask = np.concatenate([_inputs(u).action_mask[:-1] for u in unrolls])
        legal = np.take_along_axis(mask, action[..., None], axis=-1)[..., 0]
        assert np.all(legal | ~valid), "an illegal action was taken"


def _check_memory(
    agent: Any, unrolls: list[Trajectory], kind: np.ndarray, action: np.ndarray, reward: np.ndarray
) -> None:
    """Last actions and rewards are those of the row before, 0 on FIRST rows."""
    first = kind[1:] == FIRST
    if agent.use_last_action:
        last = np.concatenate([_inputs(u).last_action[1:] for u in unrolls])
        wide = first.reshape(first.shape + (1,) * (action.ndim - 2))
        np.testing.assert_array_equal(last, np.where(wide, 0, action), "last_action")
        assert np.all(_inputs(unrolls[0]).last_action[0] == 0)
    if agent.use_last_reward:
        last = np.concatenate([_inputs(u).last_reward[1:] for u in unrolls])
        np.testing.assert_array_equal(last, np.where(first, 0, reward), "last_reward")
        assert np.all(_inputs(unrolls[0]).last_reward[0] == 0)


def _inputs(trajectory: Trajectory) -> Any:
    return trajectory.inputs


def _close(a: Any, b: Any, message: str) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=message)


def _assert_equal(a: Any, b: Any, message: str) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, message), a, b)

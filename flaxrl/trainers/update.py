"""The only place that takes gradients: a trajectory and a loss -> a new TrainState."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from flaxrl.losses.base import MINIBATCHES, Loss, Unroll
from flaxrl.trainers.metrics import Pairs, as_pairs, summed, weighted
from flaxrl.trainers.optimizer import set_learning_rate
from flaxrl.trainers.sharding import AXES, batch_spec, over_batch, shard_index
from flaxrl.trainers.statistics import Statistics
from flaxrl.types import Array, PyTree, TrainState, Trajectory

RNG_STREAMS = ("dropout", "noise")
"""Random streams that a model may ask for while it learns."""

NO_STATISTICS = Statistics()
"""Nothing but the parameters changes."""


class UpdateOutput(struct.PyTreeNode):
    """Metrics as (total, count) pairs, and priorities `[B]` in the trajectory's order (or None)."""

    metrics: Pairs
    priorities: Array | None


class Update(Protocol):
    """One iterate's learning."""

    def __call__(self, state: TrainState, trajectory: Trajectory, key: Array) -> tuple[TrainState, UpdateOutput]:
        """Learns from `trajectory` `[T, B, ...]`."""
        ...


def make_update(
    loss: Loss,
    bind_unroll: Callable[..., Unroll],
    mesh: Mesh,
    *,
    learning_rate: Callable[[Array], Array],
    progress: Callable[[Array], Array],
    epochs: int = 1,
    minibatches: int = 1,
    accumulation: int = 1,
    target_period: int | None = None,
    statistics: Statistics = NO_STATISTICS,
) -> Update:
    """Builds the update.

    A gradient step whose loss, gradient or parameter change is not finite is skipped and counted; its metrics do not
    enter the means.

    Args:
        loss: scores a batch.
        bind_unroll: the state's variables -> the model's unroll; takes `pieces` too, where `accumulation` is used.
        mesh: B is split over it; minibatches are drawn inside each shard.
        learning_rate: by progress, set once an iterate.
        progress: of `state.updates`, the fraction of the run done.
        epochs: passes over the trajectory.
        minibatches: parts of a pass.
        accumulation: pieces that the model runs over a minibatch in, one after another, within each shard. For memory:
            loss, gradient, metrics and priorities are those of the whole minibatch.
        target_period: optimizer steps between copies to the target network; None never copies.
        statistics: what of the state's variables changes. Rewards are scaled before all else; observations are taken in
            after the last minibatch, so that acting, `prepare` and every epoch see the same.

    Returns:
        A pure function, to be jitted by its caller.
    """
    shuffle = _Shuffle(mesh, minibatches, loss.minibatch)
    bind = functools.partial(bind_unroll, pieces=accumulation) if accumulation > 1 else bind_unroll

    def gradient_step(loss: Loss, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, UpdateOutput]:
        unroll = bind(state.variables)
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(RNG_STREAMS)}
        (value, out), grads = jax.value_and_grad(
            lambda params: loss(unroll, params, state.target_params, batch, rngs), has_aux=True
        )(state.params)
        return _apply(state, value, out, grads, target_period)

    def update(state: TrainState, trajectory: Trajectory, key: Array) -> tuple[TrainState, UpdateOutput]:
        done = progress(state.updates)
        rate, now = learning_rate(done), loss.at(done)
        state = state.replace(opt_state=set_learning_rate(state.opt_state, rate))
        state, trajectory, scaling = statistics.scaled(state, trajectory.sanitized())
        prepared = now.prepare(bind(state.variables), state, trajectory)
        batch = jax.lax.stop_gradient(prepared)
        step = functools.partial(gradient_step, now)
        if epochs * minibatches == 1 and not shuffle.steps:
            state, out = step(state, batch, key)
        else:
            state, out = _epochs(step, now, shuffle, state, batch, jax.random.split(key, epochs))
        metrics = out.metrics | as_pairs({"loss/learning_rate": rate} | scaling)
        state = statistics.observed(state, trajectory.inputs)
        return state.replace(updates=state.updates + 1), out.replace(metrics=metrics)

    return update


def _epochs(
    gradient_step: Callable, loss: Loss, shuffle: _Shuffle, state: TrainState, batch: Any, keys: Array
) -> tuple[TrainState, UpdateOutput]:
    """One pass over the batch a key, until the loss stops them."""

    def epoch(state: TrainState, key: Array) -> tuple[TrainState, UpdateOutput]:
        return _epoch(gradient_step, shuffle, state, batch, key)

    # Asked under any name, so that an epoch is traced once more, for its shapes, only where some may be skipped.
    if len(keys) == 1 or loss.stop(collections.defaultdict(lambda: jnp.zeros(()))) is None:
        state, out = jax.lax.scan(epoch, state, keys)
        return state, UpdateOutput(_over_steps(out.metrics), jax.tree.map(lambda x: x[-1], out.priorities))
    shapes = jax.eval_shape(epoch, state, keys[0])[1]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def unless_stopped(carry: tuple[TrainState, Array, PyTree], key: Array) -> Any:
        state, stopped, priorities = carry

        def skip(state: TrainState, key: Array) -> tuple[TrainState, UpdateOutput]:
            del key
            return state, nothing.replace(priorities=priorities)

        state, out = jax.lax.cond(stopped, skip, epoch, state, key)
        means = {k.removeprefix("loss/"): total / jnp.maximum(count, 1) for k, (total, count) in out.metrics.items()}
        stop = loss.stop(means)
        assert stop is not None
        metrics = out.metrics | as_pairs({"loss/epochs": 1.0 - stopped})
        return (state, stopped | stop, out.priorities), metrics

    (state, _, priorities), metrics = jax.lax.scan(unless_stopped, (state, jnp.bool_(False), nothing.priorities), keys)
    metrics = _over_steps(metrics)
    metrics["loss/epochs"] = (metrics["loss/epochs"][0], jnp.float32(1.0))
    return state, UpdateOutput(metrics, priorities)


def _over_steps(stacked: Pairs) -> Pairs:
    """Sums stacked pairs over gradient steps (or epochs); of a metric named 'first_...' the first is taken."""
    first = {k: jax.tree.map(lambda x: x[0], v) for k, v in stacked.items() if k.startswith("loss/first_")}
    return summed(stacked) | first


def _epoch(
    gradient_step: Callable, shuffle: _Shuffle, state: TrainState, batch: Any, key: Array
) -> tuple[TrainState, UpdateOutput]:
    """One pass over the batch in shuffled minibatches."""
    key_shuffle, key_steps = jax.random.split(key)
    parts = shuffle(batch, key_shuffle)
    keys = jax.random.split(key_steps, shuffle.minibatches)
    state, out = jax.lax.scan(lambda s, x: gradient_step(s, *x), state, (parts, keys))
    if shuffle.steps and out.priorities is not None:
        raise ValueError("a loss on single steps has no sequences to give priorities for; return None")
    priorities = None if out.priorities is None else shuffle.undo(out.priorities, key_shuffle)
    return state, UpdateOutput(_over_steps(out.metrics), priorities)


def _apply(
    state: TrainState, value: Array, out: Any, grads: PyTree, target_period: int | None
) -> tuple[TrainState, UpdateOutput]:
    """Takes the optimizer's step, or skips it where something is not finite."""
    changes, opt_state = state.tx.update(grads, state.opt_state, state.params)
    grad_norm, change_norm = optax.tree.norm(grads), optax.tree.norm(changes)
    good = jnp.isfinite(value) & jnp.isfinite(grad_norm) & jnp.isfinite(change_norm)
    params = optax.apply_updates(state.params, changes)
    new = (state.step + 1, params, opt_state)
    old = (state.step, state.params, state.opt_state)
    step, params, opt_state = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
    target = state.target_params
    if target_period is not None:
        copy = good & (step % target_period == 0)
        target = jax.tree.map(lambda p, t: jnp.where(copy, p, t), params, target)
    metrics = {f"loss/{name}": x for name, x in out.metrics.items()}
    metrics |= {
        "loss/gradient_norm": grad_norm,
        "loss/update_norm": change_norm,
        "loss/parameter_norm": optax.tree.norm(params),
    }
    pairs = weighted(metrics, good) | as_pairs({"loss/skipped": 1.0 - good})
    state = state.replace(
        step=step,
        params=params,
        opt_state=opt_state,
        target_params=target,
        skipped_in_row=jnp.where(good, 0, state.skipped_in_row + 1),
    )
    return state, UpdateOutput(pairs, out.priorities)


class _Shuffle:
    """Draws minibatches inside each shard, so that no row crosses devices.

    'sequences' permutes B and splits it; 'steps' flattens `[T, B]` to rows, permutes and splits those.
    """

    def __init__(self, mesh: Mesh, minibatches: int, unit: str):
        if unit not in MINIBATCHES:
            raise ValueError(f"Loss.minibatch is {unit!r}; expected one of {MINIBATCHES}")
        self.mesh, self.minibatches, self.steps = mesh, minibatches, unit == "steps"

    def __call__(self, batch: Any, key: Array) -> Any:
        """A batch of `[T, B, ...]` leaves -> minibatches, leaves `[K, T, B/K, ...]` (steps: `[K, 1, T*B/K, ...]`)."""
        if self.minibatches == 1 and not self.steps:
            return jax.tree.map(lambda x: x[None], batch)
        return over_batch(self._split, self.mesh, (batch_spec(), P()), P(None, None, AXES))(batch, key)

    def _permutation(self, rows: int, key: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, shard_index(self.mesh)), rows)

    def _split(self, batch: Any, key: Array) -> Any:
        if self.steps:
            batch = jax.tree.map(lambda x: x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:]), batch)
        rows = jax.tree.leaves(batch)[0].shape[1]
        order = self._permutation(rows, key)

        def split(x: Array) -> Array:
            x = jnp.take(x, order, axis=1)
            x = x.reshape(x.shape[0], self.minibatches, rows // self.minibatches, *x.shape[2:])
            return jnp.moveaxis(x, 1, 0)

        return jax.tree.map(split, batch)

    def undo(self, priorities: Array, key: Array) -> Array:
        """Priorities `[K, B/K]` of shuffled minibatches -> `[B]` in the batch's order."""
        if self.minibatches == 1:
            return priorities[0]

        def local(x: Array, key: Array) -> Array:
            order = self._permutation(x.size, key)
            return jnp.zeros(x.size, x.dtype).at[order].set(x.reshape(-1))

        return over_batch(local, self.mesh, (P(None, AXES), P()), P(AXES))(priorities, key)

"""The update: minibatches, epochs, skipped steps, target network, learning rate; on one device and on four."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from learner_setups import assert_close, compilations, host, key, means, same
from update_setups import BATCH, TIME, start, trajectory

from flaxrl.losses.base import Loss
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.types import LossOutput, Trajectory


@dataclass(frozen=True)
class Counts(Loss):
    """The gradient of w[i] is the number of times that row i was in the minibatch; priorities are the row's number."""

    shards: int = 1

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Trajectory, rngs: Any) -> Any:
        ids = batch.reward[0].astype(jnp.int32)
        per_shard, size = ids.size // self.shards, BATCH // self.shards
        strangers = jnp.sum(jnp.arange(ids.size) // per_shard != ids // size)
        metrics = {"rows": ids.size, "strangers": strangers}
        return jnp.sum(params["w"][ids]), LossOutput(metrics, batch.reward[0] + 100.0)


class Rows(struct.PyTreeNode):
    ids: jax.Array
    carry: Any = ()


@dataclass(frozen=True)
class StepCounts(Loss):
    """As Counts, for single steps; `prepare` numbers them t * B + b."""

    minibatch: ClassVar[str] = "steps"

    def prepare(self, unroll: Any, state: Any, trajectory: Trajectory) -> Any:
        return Rows(trajectory.reward.astype(jnp.int32) + BATCH * jnp.arange(TIME)[:, None])

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Rows, rngs: Any) -> Any:
        assert batch.ids.shape[0] == 1
        return jnp.sum(params["w"][batch.ids]), LossOutput({"rows": batch.ids.size})


@dataclass(frozen=True)
class Slope(Loss):
    """w0 * mean(reward); above discount 1 also sqrt(w1), of which only the gradient is infinite at w1 = 0."""

    uses_target: ClassVar[bool] = True

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Trajectory, rngs: Any) -> Any:
        w, reward = params["w"], jnp.mean(batch.reward)
        root = jax.lax.cond(jnp.mean(batch.discount) > 1, jnp.sqrt, jnp.zeros_like, w[1])
        return w[0] * reward + root, LossOutput({"reward": reward})


# -- minibatches -------------------------------------------------------------------------------------------------------


def test_one_step_is_the_optax_step():
    optimizer = Optimizer("adam", learning_rate=0.1, max_grad_norm=0.5)
    state, update, mesh = start(Slope(), 2, optimizer)
    batch = trajectory(mesh, reward=3.0)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    params, moments = state.params, tx.init(state.params)
    for i in range(3):
        state, out = update(state, batch, key(i))
        changes, moments = tx.update({"w": jnp.array([3.0, 0.0])}, moments, params)
        params = optax.apply_updates(params, changes)
        assert_close(state.params, params)
        assert int(state.step) == int(state.updates) == i + 1
        got = means(out.metrics)
        assert got["loss/gradient_norm"] == pytest.approx(3.0)  # before the clip
        assert got["loss/update_norm"] == pytest.approx(float(optax.tree.norm(changes)), rel=1e-5)
        assert got["loss/reward"] == 3.0 and got["loss/skipped"] == 0.0


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 2), (3, 2)])
def test_every_sequence_is_used_once_an_epoch(devices, epochs, minibatches):
    state, update, mesh = start(Counts(), BATCH, devices=devices, epochs=epochs, minibatches=minibatches)
    state, out = update(state, trajectory(mesh), key())
    assert host(state.params["w"]).tolist() == [-epochs] * BATCH
    assert int(state.step) == epochs * minibatches and int(state.updates) == 1
    got = means(out.metrics)
    assert got["loss/rows"] == BATCH / minibatches
    # sqrt(n) for n different rows, more where a row is repeated.
    assert got["loss/gradient_norm"] == pytest.approx(np.sqrt(BATCH / minibatches))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 3)])
def test_steps_are_flattened_and_used_once_an_epoch(devices, epochs, minibatches):
    state, update, mesh = start(StepCounts(), TIME * BATCH, devices=devices, epochs=epochs, minibatches=minibatches)
    state, out = update(state, trajectory(mesh), key())
    assert host(state.params["w"]).tolist() == [-epochs] * (TIME * BATCH)
    got = means(out.metrics)
    assert got["loss/rows"] == TIME * BATCH / minibatches
    assert got["loss/gradient_norm"] == pytest.approx(np.sqrt(TIME * BATCH / minibatches))


def test_minibatches_stay_in_their_shard():
    state, update, mesh = start(Counts(shards=4), BATCH, devices=4, minibatches=2, epochs=4)
    _, out = update(state, trajectory(mesh), key())
    assert means(out.metrics)["loss/strangers"] == 0


def test_minibatches_differ_by_key_and_shard():
    @dataclass(frozen=True)
    class Half(Counts):
        def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Trajectory, rngs: Any) -> Any:
            ids = batch.reward[0].astype(jnp.int32)
            # Only rows of the first minibatch (w still 0) count, so w shows which they were.
            fresh = jax.lax.stop_gradient(jnp.all(params["w"] == 0))
            return jnp.where(fresh, jnp.sum(params["w"][ids]), 0.0), LossOutput({})

    state, update, mesh = start(Half(), BATCH, devices=2, minibatches=2)
    chosen = [-host(update(state, trajectory(mesh), key(i))[0].params["w"]).astype(int) for i in range(12)]
    assert all(c[:4].sum() == 2 and c[4:].sum() == 2 for c in chosen)
    assert len({tuple(c) for c in chosen}) > 3
    assert any(c[:4].tolist() != c[4:].tolist() for c in chosen)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 2)])
def test_priorities_come_back_in_the_order_of_the_batch(devices, epochs, minibatches):
    state, update, mesh = start(Counts(), BATCH, devices=devices, epochs=epochs, minibatches=minibatches)
    for i in range(3):
        _, out = update(state, trajectory(mesh), key(i))
        assert host(out.priorities).tolist() == [100.0 + b for b in range(BATCH)]


def test_four_minibatches_on_one_device():
    state, update, mesh = start(Counts(), BATCH, minibatches=4)
    _, out = update(state, trajectory(mesh), key())
    assert host(out.priorities).tolist() == [100.0 + b for b in range(BATCH)]


def test_unknown_minibatch_unit_is_an_error():
    @dataclass(frozen=True)
    class Odd(Counts):
        minibatch: ClassVar[str] = "rows"

    with pytest.raises(ValueError, match=r"'rows'; expected one of \('sequences', 'steps'\)"):
        start(Odd(), BATCH)


# -- non-finite steps --------------------------------------------------------------------------------------------------

BAD = {
    "nan_reward": {"reward": np.where(np.arange(BATCH) == 3, np.nan, 1.0)},
    "infinite_loss": {"reward": np.inf},
    "infinite_gradient": {"reward": 1.0, "discount": 2.0},
}


@pytest.mark.parametrize("bad", BAD)
def test_a_non_finite_step_is_skipped_and_counted(bad):
    state, update, mesh = start(Slope(), 2, Optimizer("adam", learning_rate=0.1))
    state, _ = update(state, trajectory(mesh, reward=1.0), key())
    before = host((state.params, state.opt_state.inner_state, state.target_params, state.step))
    for i in range(3):
        state, out = update(state, trajectory(mesh, **BAD[bad]), key(i))
        after = host((state.params, state.opt_state.inner_state, state.target_params, state.step))
        assert same(before, after)
        assert int(state.skipped_in_row) == i + 1 and int(state.updates) == i + 2
        got = means(out.metrics)
        assert got["loss/skipped"] == 1.0
        assert "loss/reward" not in got and "loss/gradient_norm" not in got
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(host(out.metrics)))
    state, out = update(state, trajectory(mesh, reward=1.0), key())
    assert int(state.skipped_in_row) == 0 and means(out.metrics)["loss/skipped"] == 0.0
    assert not same(before[0], host(state.params))


def test_a_skipped_minibatch_leaves_the_means_of_the_others():
    state, update, mesh = start(Slope(), 2, minibatches=4)
    reward = np.where(np.arange(BATCH) == 3, np.nan, 5.0)
    state, out = update(state, trajectory(mesh, reward=reward), key())
    got = means(out.metrics)
    assert got["loss/skipped"] == 0.25 and got["loss/reward"] == 5.0
    assert int(state.step) == 3 and int(state.updates) == 1
    assert host(state.params["w"]).tolist() == [-15.0, 0.0]


def test_what_a_last_row_answers_does_not_count():
    state, update, mesh = start(Slope(), 2)
    reward = np.ones((TIME, BATCH))
    reward[1, 2] = np.nan
    state, out = update(state, trajectory(mesh, reward=reward, last=(1, 2)), key())
    assert means(out.metrics)["loss/skipped"] == 0.0
    assert host(state.params["w"])[0] == pytest.approx(-(TIME * BATCH - 1) / (TIME * BATCH))


# -- target network and learning rate ----------------------------------------------------------------------------------


def test_target_network_is_copied_every_third_step():
    state, update, mesh = start(Slope(), 2, target_period=3)
    copies, target = [], host(state.target_params)
    for i in range(1, 11):
        state, _ = update(state, trajectory(mesh, reward=1.0), key())
        if not same(target, host(state.target_params)):
            copies.append(i)
            assert same(host(state.target_params), host(state.params))
        target = host(state.target_params)
    assert copies == [3, 6, 9]


def test_a_skipped_step_neither_counts_for_the_target_nor_copies():
    state, update, mesh = start(Slope(), 2, target_period=2)
    for reward, copied in ((1.0, False), (np.nan, False), (1.0, True), (np.nan, True), (1.0, False)):
        state, _ = update(state, trajectory(mesh, reward=reward), key())
        assert same(host(state.target_params), host(state.params)) == copied


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (4, 2)])
def test_linear_learning_rate_by_iterate(epochs, minibatches):
    optimizer = Optimizer("sgd", learning_rate=0.1, schedule="linear")
    state, update, mesh = start(Counts(), BATCH, optimizer, total=19, epochs=epochs, minibatches=minibatches)
    for k in range(22):
        before = host(state.params["w"])
        state, out = update(state, trajectory(mesh), key(k))
        rate = max(0.1 * (1 - k / 19), 0.0)
        assert means(out.metrics)["loss/learning_rate"] == pytest.approx(rate, abs=1e-7)
        assert before - host(state.params["w"]) == pytest.approx(np.full(BATCH, rate * epochs), abs=1e-5)
        if k == 10:
            assert rate == pytest.approx(0.047368, abs=1e-6)


def test_update_compiles_once():
    state, update, mesh = start(Slope(), 2, Optimizer("adam", schedule="linear"), minibatches=2)
    sizes = []
    for i in range(4):
        state, _ = update(state, trajectory(mesh, reward=1.0), key(i))
        sizes.append(compilations(update))
    # The first state is not yet an output of the update.
    assert sizes[0] == 1 and sizes[1] == sizes[2] == sizes[3]

"""Batches: masks, sanitising, slicing, the mean over valid rows, the train state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden import close, vector
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxrl.models.heads import categorical
from flaxrl.types import FIRST, LAST, MID, AgentInput, Output, TrainState, Trajectory, masked_mean


def trajectory(**fields: Any) -> Trajectory:
    """Two envs, four steps; the first env's episode ends at row 2, the second's at the bootstrap row."""
    step_type = jnp.array([[FIRST, MID, LAST, FIRST, MID], [MID, MID, MID, MID, LAST]], jnp.int8).T
    nan = jnp.full((4, 2), jnp.nan)
    given = {"action": jnp.full((4, 2), 7), "reward": nan, "discount": nan, "log_prob": nan, "value": nan} | fields
    return Trajectory(inputs=AgentInput(observation=jnp.full((5, 2, 3), 2.0), step_type=step_type), **given)


def test_mask_and_continues():
    batch = trajectory()
    assert batch.mask.T.tolist() == [[True, True, False, True], [True] * 4]
    assert batch.continues.T.tolist() == [[1, 0, 1, 1], [1, 1, 1, 0]]
    assert batch.continues.dtype == jnp.float32
    assert batch.inputs.first.T.tolist() == [[True, False, False, True, False], [False] * 5]


def test_sanitized_replaces_masked_rows_alone():
    batch = trajectory(action={"arm": jnp.full((4, 2, 3), jnp.nan), "grip": jnp.full((4, 2), 7)}).sanitized()
    mask = np.asarray(batch.mask)
    for name in ("reward", "discount", "log_prob", "value"):
        assert np.isnan(getattr(batch, name)[mask]).all()
        assert getattr(batch, name)[~mask].tolist() == [0]
    assert np.isnan(batch.action["arm"][mask]).all() and batch.action["arm"][~mask].tolist() == [[0, 0, 0]]
    assert (batch.action["grip"][mask] == 7).all() and batch.action["grip"][~mask].tolist() == [0]
    assert batch.action["grip"].dtype == jnp.int32
    assert (batch.inputs.observation == 2).all()  # a LAST row's observation is real


def test_sanitized_without_log_prob_or_value():
    batch = trajectory(log_prob=None, value=None).sanitized()
    assert batch.log_prob is None and batch.value is None


def test_output_slices_every_leaf():
    output: Any = Output(
        policy_params=jnp.arange(24.0).reshape(4, 2, 3), value=jnp.arange(8.0).reshape(4, 2), make_policy=categorical
    )
    assert output[:-1].policy_params.shape == (3, 2, 3) and output[:-1].value.shape == (3, 2)
    assert output[-1].value.tolist() == [6, 7] and output[-1].q is None
    assert output[:-1].policy.logits.shape == (3, 2, 3)
    assert jax.jit(lambda o: o)(output).make_policy is categorical


def test_output_without_a_policy():
    with pytest.raises(ValueError, match="gives no policy"):
        _ = Output(q=jnp.zeros((4, 2, 3))).policy


def test_masked_mean_of_padded_cross_entropy():
    """Sum over valid rows by their number, not by the padded length; the padded row may be anything."""
    v = vector("bc_padded")
    losses = jnp.array([*v["expected"]["ce_per_sample"][:3], jnp.nan])
    close(masked_mean(losses, jnp.array(v["inputs"]["weight"], bool)), v["expected"]["loss"], v)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_masked_mean_hides_garbage_from_value_and_gradient(garbage):
    x, mask = jnp.array([1.0, 3.0, garbage, garbage]), jnp.array([True, True, False, False])
    value, grad = jax.jit(jax.value_and_grad(masked_mean))(x, mask)
    assert value == 2 and grad.tolist() == [0.5, 0.5, 0, 0]


def test_masked_mean_of_nothing_is_zero():
    value, grad = jax.value_and_grad(masked_mean)(jnp.full((3, 2), jnp.nan), jnp.zeros((3, 2), bool))
    assert value == 0 and not grad.any()


def test_masked_mean_sums_in_float32():
    x = jnp.ones((4096,), jnp.bfloat16)  # bfloat16 counts to 256
    assert masked_mean(x, jnp.ones(4096, bool)) == 1 and masked_mean(x, x > 0).dtype == jnp.float32


def test_masked_mean_is_global_over_a_sharded_batch():
    """Two devices with 3 and 1 valid rows: the mean of all rows, where the mean of the devices' means would be 6."""
    v = vector("global_masked_mean")
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    x, mask = (
        jax.device_put(np.asarray(v["inputs"][k], dtype).T, NamedSharding(mesh, PartitionSpec(None, "data")))
        for k, dtype in (("per_device_losses", np.float32), ("per_device_valid", bool))
    )
    assert len(x.sharding.device_set) == 2 and x.shape == (4, 2)
    value, grad = jax.jit(jax.value_and_grad(masked_mean))(x, mask)
    close(value, v["expected"]["mean"], v)
    np.testing.assert_allclose(grad, np.asarray(mask) / 4)


def test_train_state_keeps_other_collections_and_an_own_target():
    variables = {"params": {"w": jnp.ones(3)}, "statistics": {"mean": jnp.zeros(3)}}
    state: Any = TrainState.init(lambda: None, variables, optax.sgd(0.1), target=True)
    assert state.variables == {"statistics": variables["statistics"]}
    assert (int(state.step), int(state.updates), int(state.skipped_in_row)) == (0, 0, 0)
    assert state.target_params is not None
    # the target is a copy: donating the parameters must not delete it
    assert state.target_params["w"].unsafe_buffer_pointer() != state.params["w"].unsafe_buffer_pointer()
    assert TrainState.init(lambda: None, variables, optax.sgd(0.1), target=False).target_params is None

"""A checkpoint of another state or snapshot is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_states import make_state, restored_step, save_steps
from flax import struct

from flaxrl.errors import ConfigError
from flaxrl.trainers import checkpoint_tree
from flaxrl.trainers.checkpoint import Checkpointer

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"hidden": (8, 16)},
            r"params/Dense_1/bias is float32\[8\] in the checkpoint, float32\[16\] here; params/Dense_1/kernel is "
            r"float32\[8,8\] in the checkpoint, float32\[8,16\] here; params/Dense_2/kernel .*; and \d+ more$",
        ),
        ({"hidden": (8, 8, 8)}, r"params/Dense_3/bias is not in the checkpoint \(float32\[2\] here\)"),
        ({"hidden": (8,)}, r"params/Dense_1/bias is float32\[8\] in the checkpoint, float32\[2\] here"),
        ({"dtype": jnp.bfloat16}, r"params/Dense_0/bias is float32\[8\] in the checkpoint, bfloat16\[8\] here"),
        ({"tx": optax.adam(1e-3)}, r"opt_state/0/count is not in the checkpoint"),
        (
            {"tx": optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3))},
            r"opt_state/1/0/count is int32\[\] .* not here",
        ),
        (
            {"tx": optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.identity())},
            "opt_state/2 is not in the checkpoint",
        ),
        ({"target": False}, "target_params is not in the checkpoint"),
    ],
)
def test_another_state_is_refused_and_nothing_is_touched(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    save_steps(tmp_path, 10, 20)
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        checkpointer.restore(make_state(**other), None)
    checkpointer.close()
    assert "latest/20 does not fit this run's state: " in str(error.value) and "\n" not in str(error.value)
    assert restored_step(tmp_path) == 20


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    [
        (
            {"k": jax.random.key(0)},
            {"k": jax.random.PRNGKey(0)},
            r"k is key<fry>\[\] in the checkpoint, uint32\[2\] here",
        ),
        (
            {"k": jax.random.PRNGKey(0)},
            {"k": jax.random.key(0)},
            r"k is uint32\[2\] in the checkpoint, key<fry>\[\] here",
        ),
        ({"k": jax.random.key(0)}, {"k": jax.random.key(0, impl="rbg")}, r"k is key<fry>\[\] .*, key<rbg>\[\] here"),
        ({"n": jnp.int32(0)}, {"n": np.int64(0)}, r"n is int32\[\] in the checkpoint, int64\[\] here"),
        (None, {"n": jnp.int32(0)}, "saved without one"),
    ],
)
def test_another_snapshot_is_refused(tmp_path: Path, saved: Any, target: Any, message: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": jnp.ones(1)}, saved, {})
    with pytest.raises(ConfigError, match=f"this run's snapshot: .*{message}"):
        checkpointer.restore({"x": jnp.ones(1)}, target)
    checkpointer.close()


def test_names_stay_apart_where_paths_read_alike() -> None:
    class Both(struct.PyTreeNode):
        x: Any

    tree = [{"a/b": jnp.ones(1), "a": {"b": jnp.ones(2)}}, Both(x=jnp.ones(3))]
    assert sorted(checkpoint_tree.describe(tree).values()) == ["float32[1]", "float32[2]", "float32[3]"]
    assert checkpoint_tree.describe(jnp.ones(2)) == {"root": "float32[2]"}

"""Checkpoints: what is saved comes back, in time, on other devices, and stays as long as it should."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging as absl_logging
from checkpoint_states import ADAM, apply_fn, assert_equal, make_state, restored_step, save_steps
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxrl.errors import ConfigError
from flaxrl.trainers.checkpoint import Checkpointer, read_meta
from flaxrl.trainers.checkpoint_layout import Series

pytestmark = pytest.mark.filterwarnings("error")


class EnvState(struct.PyTreeNode):
    position: jax.Array
    key: jax.Array
    done: jax.Array
    nothing: None = None


def make_snapshot() -> dict[str, Any]:
    return {
        "env": EnvState(
            jnp.arange(6, dtype=jnp.int8).reshape(2, 3), jax.random.split(jax.random.key(5), 3), jnp.zeros(2, bool)
        ),
        "a.b": jnp.float32(1),  # these two would be one name with dots
        "a": {"b": jnp.bfloat16(2)},
        "raw": jax.random.PRNGKey(3),
        "no_rows": jnp.zeros((0, 3)),
        "no_keys": jax.random.split(jax.random.key(0), 3)[:0],
        "none": (None, (), optax.EmptyState()),
        "rows": np.int64(2**40),
        "host": np.arange(3, dtype=np.float64),
        "count": 2**35,
    }


def test_round_trip_of_everything_a_run_holds(tmp_path: Path) -> None:
    meta = {"config": {"name": "x", "lr": 1e-4, "none": None}, "steps": 2**62 + 1, "best": 1.5, "list": [1, "a"]}
    state, snapshot = make_state(3.0), make_snapshot()
    with_steps = state.replace(step=jnp.int32(7), updates=jnp.int32(5))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(7, with_steps, snapshot, meta)
    meta["list"].append(2)  # what the caller does to it afterwards is not saved
    restored = checkpointer.restore(state, snapshot)
    assert restored is not None and restored.step == 7
    assert restored.meta == {**meta, "list": [1, "a"]} == read_meta(tmp_path)
    assert_equal(restored.state, with_steps)
    assert restored.state.tx is ADAM and restored.state.apply_fn is apply_fn
    assert restored.snapshot is not None
    for name in ("rows", "host", "count"):
        saved, back = snapshot.pop(name), restored.snapshot.pop(name)
        assert type(back) is type(saved)
        np.testing.assert_array_equal(back, saved)
    assert_equal(restored.snapshot, snapshot)
    draw = jax.vmap(jax.random.uniform)
    np.testing.assert_array_equal(draw(restored.snapshot["env"].key), draw(snapshot["env"].key))
    checkpointer.close()


def test_restores_from_shapes_alone_and_without_the_snapshot(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    state, snapshot = make_state(2.0), {"keys": jax.random.split(jax.random.key(1), 2), "x": jnp.ones(3)}
    checkpointer.save(1, state, snapshot, {})
    shapes, snapshot_shapes = jax.eval_shape(lambda: (state, snapshot))
    restored = checkpointer.restore(shapes, snapshot_shapes)
    assert restored is not None
    assert_equal(restored.state, state)
    assert_equal(restored.snapshot, snapshot)
    restored = checkpointer.restore(state, None)
    assert restored is not None and restored.snapshot is None
    checkpointer.close()


def test_nothing_saved_yet(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "none")
    assert checkpointer.restore(make_state(), None) is None
    assert checkpointer.restore(make_state(), None, "best") is None
    assert checkpointer.latest_step() is None and checkpointer.best_step() is None
    checkpointer.close()
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        read_meta(tmp_path / "none")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: Checkpointer(d, keep=0), "'latest' = 0 must be >= 1"),
        (lambda d: Checkpointer(d, keep_best=0), "'best' = 0 must be >= 1"),
        (
            lambda d: Checkpointer(d).restore(make_state(), None, "lastest"),
            "'lastest' is unknown; did you mean 'latest'",
        ),
        (lambda d: Checkpointer(d).save(-1, make_state(), None, {}), "step = -1 must be >= 0"),
        (lambda d: Checkpointer(d).save(1, make_state(), None, {"x": np.int32(1)}), "meta must be JSON-able"),
        (lambda d: Checkpointer(d).save(1, make_state(), {"name": "pong"}, {}), "entry name is a str"),
    ],
)
def test_bad_input(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


# --- safety of what is saved


def test_donation_and_overwriting_right_after_save(tmp_path: Path) -> None:
    step_fn = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {"a": jnp.zeros((1000, 1000)), "b": jnp.zeros(3), "n": jnp.int32(0)}
    state = step_fn(step_fn(state))
    host = np.zeros(1000)
    checkpointer = Checkpointer(tmp_path)
    for number in range(2, 5):
        checkpointer.save(number, state, {"host": host, "key": jax.random.key(number)}, {})
        for _ in range(20):
            state = step_fn(state)
        host += 1
        restored = checkpointer.restore(state, {"host": host, "key": jax.random.key(0)})
        assert restored is not None and restored.snapshot is not None
        assert all((leaf == 2).all() for leaf in jax.tree.leaves(restored.state))
        assert (restored.snapshot["host"] == 0).all()
        state = step_fn(step_fn(jax.tree.map(jnp.zeros_like, state)))
        host[:] = 0
        # and what came back may be donated as well
        assert all((leaf == 3).all() for leaf in jax.tree.leaves(step_fn(restored.state)))
    checkpointer.close()


def test_rewriting_the_numpy_block_behind_a_jax_array(tmp_path: Path) -> None:
    raw = np.zeros(1_000_064, np.float32)
    block = raw[(-raw.ctypes.data % 64) // 4 :][:1_000_000]  # aligned, so that on CPU device_put takes it as it is
    array = jax.device_put(block)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": array}, {"x": array}, {})
    block[:] = 1
    restored = checkpointer.restore({"x": array}, {"x": array})
    checkpointer.close()
    assert restored is not None and restored.snapshot is not None
    assert (restored.state["x"] == 0).all() and (restored.snapshot["x"] == 0).all()


def test_complete_after_close_and_saving_a_step_twice(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, make_state(5), None, {"steps": 5})
    checkpointer.save(7, make_state(7), None, {"steps": 7})
    checkpointer.save(7, make_state(7), None, {"steps": 7})
    checkpointer.close()
    assert checkpointer.latest_step() == 7
    assert sorted(p.name for p in (tmp_path / "latest").iterdir()) == ["5", "7"]
    assert restored_step(tmp_path) == 7


def test_a_step_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(2, make_state(9), None, {"second": True})
    restored = checkpointer.restore(make_state(), None)
    checkpointer.close()
    assert restored is not None and restored.meta == {"second": True}
    assert_equal(restored.state, make_state(9))
    assert sorted(p.name for p in (tmp_path / "latest").iterdir()) == ["1", "2"]


def test_retention_keeps_the_newest_and_never_deletes_ahead(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=2)
    assert Series(tmp_path, "latest").steps() == [3, 2]
    save_steps(tmp_path, 1, keep=1)  # a run that began anew: its own step stays, and so do those ahead of it
    assert Series(tmp_path, "latest").steps() == [3, 2, 1]


def test_an_error_in_the_background_is_raised_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Series, "publish", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
        checkpointer.save(1, make_state(1), None, {"steps": 1})
        with pytest.raises(OSError, match="disk full"):
            checkpointer.wait()
        checkpointer.save(1, make_state(1), None, {"steps": 1})
        with pytest.raises(OSError, match="disk full"):
            checkpointer.save(2, make_state(2), None, {"steps": 2})
    checkpointer.save(1, make_state(1), None, {"steps": 1})
    checkpointer.close()
    assert restored_step(tmp_path) == 1


# --- devices and noise

FOUR_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from flaxrl.trainers.checkpoint import Checkpointer
def tree(count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))
    sharded, replicated = put(jnp.arange(32.0).reshape(8, 4), "data"), put(jnp.arange(3))
    return {"sharded": sharded, "replicated": replicated}, {"keys": put(jax.random.split(jax.random.key(7), 8), "data")}
assert len(jax.devices()) == 4
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, *tree(4), {})
state, snapshot = tree(2)
restored = checkpointer.restore(*tree(2))
checkpointer.close()
for saved, back in ((state, restored.state), (snapshot, restored.snapshot)):
    for name in saved:
        assert back[name].sharding == saved[name].sharding, (name, back[name].sharding)
        assert (back[name] == saved[name]).all()
"""


def test_restore_on_other_device_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    command = [sys.executable, "-W", "error", "-c", FOUR_DEVICES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    one = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))
    shapes = {"sharded": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=one), "replicated": jnp.arange(3)}
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    checkpointer = Checkpointer(tmp_path)
    restored = checkpointer.restore(shapes, {"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=one)})
    checkpointer.close()
    assert restored is not None and restored.snapshot is not None
    assert restored.state["sharded"].sharding == restored.snapshot["keys"].sharding == one
    np.testing.assert_array_equal(restored.state["sharded"], np.arange(32.0).reshape(8, 4))
    np.testing.assert_array_equal(restored.state["replicated"], np.arange(3))
    assert_equal(restored.snapshot["keys"], jax.random.split(jax.random.key(7), 8))
    # a target that no device holds on to comes back the same, so that jit may mix it with what is sharded
    assert not restored.state["replicated"].committed


def test_orbax_is_quiet_and_its_warnings_would_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="absl"):
        save_steps(tmp_path, 1)
        assert restored_step(tmp_path) == 1
        assert not caplog.records
        absl_logging.info("ours")
        assert [r.getMessage() for r in caplog.records] == ["ours"]


def test_index_and_meta_are_plain_text(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    index = json.loads((tmp_path / "latest" / "3" / "index.json").read_text())
    assert index["step"] == 3 and index["entries"]["state"]["params/Dense_0/kernel"] == "float32[4,8]"
    assert index["entries"]["state"]["opt_state/0"] == "empty"
    assert json.loads((tmp_path / "latest" / "3" / "meta.json").read_text()) == {"steps": 3}

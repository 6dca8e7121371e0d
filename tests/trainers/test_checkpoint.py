"""Checkpoints: what is saved comes back, damaged steps are passed over, a different tree is refused."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging as absl_logging
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxrl.errors import ConfigError, TrainingError
from flaxrl.trainers import checkpoint_tree
from flaxrl.trainers.checkpoint import Checkpointer, read_meta
from flaxrl.trainers.checkpoint_layout import Series
from flaxrl.types import TrainState

pytestmark = pytest.mark.filterwarnings("error")

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_state(
    fill: float = 1.0,
    hidden: tuple[int, ...] = (8, 8),
    tx: optax.GradientTransformation = ADAM,
    dtype: Any = jnp.float32,
    target: bool = True,
) -> TrainState:
    sizes = (4, *hidden, 2)
    params = {
        f"Dense_{i}": {"kernel": jnp.full((n, m), fill, dtype), "bias": jnp.full((m,), fill, dtype)}
        for i, (n, m) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    }
    return TrainState.init(_apply, {"params": params}, tx, target)


def _apply() -> None: ...


def save_steps(directory: Path, *steps: int, keep: int = 10) -> None:
    """Saves states whose parameters all hold the step number."""
    checkpointer = Checkpointer(directory, keep=keep)
    for step in steps:
        checkpointer.save(step, make_state(step), None, {"steps": step})
    checkpointer.close()


def restored_step(directory: Path, which: str = "latest") -> int | None:
    """Restores, checks that values and meta are those of the step, and returns it."""
    checkpointer = Checkpointer(directory, keep=10)
    try:
        restored = checkpointer.restore(make_state(), None, which)
    finally:
        checkpointer.close()
    if restored is None:
        return None
    assert_equal(restored.state, make_state(restored.step))
    assert restored.meta == {"steps": restored.step}
    return restored.step


def assert_equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


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
    assert restored.state.tx is ADAM and restored.state.apply_fn is _apply
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


# --- best


def test_best_and_latest_are_kept_apart(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step, value in ((10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)):
        checkpointer.save(step, make_state(step), None, {"steps": step})
        assert checkpointer.save_best(step, make_state(step), None, {"steps": step}, value) == (step == 10)
    checkpointer.close()
    assert (checkpointer.latest_step(), checkpointer.best_step()) == (40, 10)
    assert restored_step(tmp_path) == 40
    assert restored_step(tmp_path, "best") == 10
    assert (read_meta(tmp_path), read_meta(tmp_path, "best")) == ({"steps": 40}, {"steps": 10})


def test_best_counts_finite_improvements_only_also_after_a_restart(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_best=2)

    def offer(step: int, value: float) -> bool:
        return checkpointer.save_best(step, make_state(step), None, {"steps": step}, value)

    assert not offer(1, float("nan"))
    assert not offer(1, float("inf"))
    assert offer(20, -3.0)
    assert not offer(30, -3.0)
    assert not offer(40, float("nan"))
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path, keep_best=2)
    assert not offer(50, -4.0)
    assert not offer(50, float("nan"))
    assert offer(10, -1.0)  # a run that went back to an earlier step: the value decides, not the number
    checkpointer.wait()
    assert checkpointer.best_step() == 10
    assert offer(10, 0.5)
    checkpointer.close()
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == ["10", "20"]
    assert restored_step(tmp_path, "best") == 10
    assert Series(tmp_path, "best").best_value() == 0.5


# --- damage


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _largest(path: Path) -> Path:
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _truncate(path: Path) -> None:
    file = _largest(path / "state")
    file.write_bytes(file.read_bytes()[:-20])


def _flip(path: Path) -> None:
    file = _largest(path / "state")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def _cut_index(path: Path) -> None:
    (path / "index.json").write_text((path / "index.json").read_text()[:100])


def _foreign_index(path: Path) -> None:
    (path / "index.json").write_text("[]")


DAMAGE = [
    (_empty, "has no index.json"),
    (_truncate, r"has \d+ bytes, not \d+"),
    (_flip, "is corrupt"),
    (lambda path: shutil.rmtree(path / "state"), "is missing"),
    (lambda path: (path / "meta.json").unlink(), "meta.json is missing"),
    (_cut_index, "index.json cannot be read"),
    (_foreign_index, "not the index of a checkpoint"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_step_is_passed_over_and_can_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, reason: str
) -> None:
    save_steps(tmp_path, 10, 20)
    damage(tmp_path / "latest" / "20")
    checkpointer = Checkpointer(tmp_path, keep=1)
    with caplog.at_level(logging.WARNING):
        restored = checkpointer.restore(make_state(), None)
    assert restored is not None and restored.step == 10
    assert_equal(restored.state, make_state(10))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "latest/20 is passed over" in record.getMessage() and "20.broken" in record.getMessage()
    assert re.search(reason, record.getMessage())
    assert checkpointer.latest_step() == 10
    assert (tmp_path / "latest" / "20.broken").is_dir()
    checkpointer.save(20, make_state(20), None, {"steps": 20})
    checkpointer.close()
    assert restored_step(tmp_path) == 20
    assert Series(tmp_path, "latest").steps() == [20]


def test_an_empty_higher_step_that_was_never_restored(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    (tmp_path / "latest" / "99").mkdir()
    (tmp_path / "latest" / "notes").mkdir()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest_step() == 10
    assert read_meta(tmp_path) == {"steps": 10}
    checkpointer.save(99, make_state(99), None, {"steps": 99})
    checkpointer.close()
    assert restored_step(tmp_path) == 99


def test_all_damaged_is_an_error_every_time(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    _flip(tmp_path / "latest" / "10")
    _empty(tmp_path / "latest" / "20")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"all checkpoints in .*latest are broken \(20: .*; 10: .*corrupt"):
            restored_step(tmp_path)


def test_damaged_best_falls_back_to_the_second_best(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_best=2)
    for step, value in ((10, 1.0), (20, 2.0)):
        checkpointer.save_best(step, make_state(step), None, {"steps": step}, value)
    checkpointer.close()
    _empty(tmp_path / "best" / "20")
    assert restored_step(tmp_path, "best") == 10
    assert Series(tmp_path, "best").best_value() == 1.0


def test_a_kill_between_the_renames_that_replace_a_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    folder = tmp_path / "latest"
    (folder / "20").rename(folder / "20.old")
    (folder / "20.partial").mkdir()
    assert restored_step(tmp_path) == 20
    save_steps(tmp_path, 30)
    assert sorted(p.name for p in folder.iterdir()) == ["10", "20", "30"]


KILLED = """
import sys
import jax.numpy as jnp, numpy as np
from flaxrl.trainers.checkpoint import Checkpointer
noise = np.random.default_rng(0).integers(0, 2**30, 3_000_000, dtype=np.int32)
tree = {f"leaf_{i}": jnp.asarray(noise) for i in range(4)}
checkpointer = Checkpointer(sys.argv[1])
step = checkpointer.latest_step() or 0
while True:
    step += 1
    checkpointer.save(step, {k: v + step for k, v in tree.items()}, {"step": jnp.int32(step)}, {"steps": step})
    print(step, flush=True)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 2**30, 3_000_000, dtype=np.int32)
    target = {f"leaf_{i}": jax.ShapeDtypeStruct(noise.shape, jnp.int32) for i in range(4)}
    moments = random.Random(1)
    begun = done = 0
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(2):  # the second save starts when the first one is complete
            begun = int(child.stdout.readline())
        time.sleep(moments.uniform(0.0, 0.8))
        child.kill()
        begun = max([begun, *map(int, child.stdout.read().split())])
        child.wait()
        child.stdout.close()
        checkpointer = Checkpointer(tmp_path)
        restored = checkpointer.restore(target, {"step": jnp.int32(0)})
        checkpointer.close()
        assert restored is not None and restored.snapshot is not None
        assert max(done + 1, begun - 1) <= restored.step <= begun + 1
        done = restored.step
        assert restored.meta == {"steps": done} and restored.snapshot["step"] == done
        for leaf in jax.tree.leaves(restored.state):
            np.testing.assert_array_equal(leaf, noise + done)


# --- another tree


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"hidden": (8, 16)},
            r"params/Dense_1/bias is float32\[8\] in the checkpoint, float32\[16\] here; params/Dense_1/kernel is "
            r"float32\[8,8\] in the checkpoint, float32\[8,16\] here; params/Dense_2/kernel .*; and \d+ more$",
        ),
        ({"hidden": (8, 8, 8)}, r"params/Dense_3/bias is not in the checkpoint \(float32\[2\] here\)"),
        ({"hidden": (8,)}, r"params/Dense_2/bias is float32\[2\] in the checkpoint, not here"),
        ({"dtype": jnp.bfloat16}, r"params/Dense_0/bias is float32\[8\] in the checkpoint, bfloat16\[8\] here"),
        ({"tx": optax.adam(1e-3)}, r"opt_state/0/count is not in the checkpoint"),
        ({"tx": optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3))}, r"opt_state/1/0/nu"),
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

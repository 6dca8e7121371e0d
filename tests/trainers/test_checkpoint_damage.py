"""Damaged or unfinished checkpoints are passed over, whatever killed them."""

from __future__ import annotations

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
import pytest
from checkpoint_states import assert_equal, make_state, restored_step, save_steps

from flaxrl.errors import TrainingError
from flaxrl.trainers.checkpoint import Checkpointer, read_meta
from flaxrl.trainers.checkpoint_layout import Series

pytestmark = pytest.mark.filterwarnings("error")


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


@pytest.mark.parametrize("restore_first", [True, False])
def test_a_kill_between_the_renames_that_replace_a_step(tmp_path: Path, restore_first: bool) -> None:
    save_steps(tmp_path, 10, 20)
    folder = tmp_path / "latest"
    (folder / "20").rename(folder / "20.old")
    (folder / "20.partial").mkdir()
    if restore_first:
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

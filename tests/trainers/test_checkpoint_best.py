"""The best checkpoints: apart from the latest, finite improvements only, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_states import make_state, restored_step

from flaxrl.trainers.checkpoint import Checkpointer, read_meta
from flaxrl.trainers.checkpoint_layout import Series

pytestmark = pytest.mark.filterwarnings("error")


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

"""What is said of gradient steps that were skipped, and when the run ends of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from flaxrl.configuration import LearnerSettings
from flaxrl.errors import TrainingError
from flaxrl.trainers.program import Program


def told(metrics: dict[str, float], in_row: int = 1) -> list[str]:
    """Of three updates of 5 epochs and 2 minibatches."""
    program: Any = SimpleNamespace(plan=SimpleNamespace(learner=LearnerSettings(5, 2, max_skipped=4)))
    state: Any = SimpleNamespace(skipped_in_row=jnp.int32(in_row))
    lines: list[str] = []
    Program.check_skipped(program, metrics, 3, state, 1024, lines.append)
    return lines


@pytest.mark.parametrize(
    ("metrics", "counts"),
    [
        ({"loss/skipped": 0.1}, "3 of the 30"),
        # The loss ended the epochs early: 1.5 of 5 were taken in the mean.
        ({"loss/skipped": 1 / 3, "loss/epochs": 1.5}, "3 of the 9"),
    ],
)
def test_steps_that_were_skipped_are_counted_among_those_taken(metrics: dict[str, float], counts: str) -> None:
    assert told(metrics) == [
        f"warning: loss or gradient not finite: skipped {counts} gradient steps up to step 1,024, the last 1 in a row"
    ]


def test_without_skipped_steps_nothing_is_said() -> None:
    assert told({"loss/skipped": 0.0}, in_row=9) == told({}) == []


def test_too_many_in_a_row_end_the_run() -> None:
    with pytest.raises(TrainingError, match=r"in the last 4 gradient steps \(step 1,024, learner.max_skipped = 4\)"):
        told({"loss/skipped": 0.5}, in_row=4)

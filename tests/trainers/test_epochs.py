"""Epochs that a loss stops, its schedules, and metrics of a trajectory's first minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from learner_setups import key, means
from update_setups import BATCH, start, trajectory

from flaxrl.losses.base import Loss, with_values
from flaxrl.types import LossOutput, Trajectory


@dataclass(frozen=True)
class Stops(Loss):
    """Gradient 1 a step; stops after an epoch whose mean of -w was `at_least` (None: never); the slope moves."""

    at_least: float | None = 2.0
    slope: Any = 1.0

    def at(self, progress: Any) -> Stops:
        return with_values(self, slope=1.0 + progress)

    def stop(self, metrics: Any) -> Any:
        return None if self.at_least is None else metrics["w"] >= self.at_least

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Trajectory, rngs: Any) -> Any:
        w = params["w"][0]
        metrics = {"w": -w, "first_w": -w, "slope": self.slope}
        return self.slope * w, LossOutput(metrics, batch.reward[0] + jnp.float32(0))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_loss_stops_the_remaining_epochs(devices):
    """w falls by 1 a step, two steps an epoch: means of -w are 0.5, 2.5; the second is >= 2, so two of five epochs."""
    state, update, mesh = start(Stops(), 1, devices=devices, epochs=5, minibatches=2)
    state, out = update(state, trajectory(mesh), key())
    assert float(state.params["w"][0]) == -4.0 and int(state.step) == 4
    found = means(out.metrics)
    assert found["loss/epochs"] == 2.0
    assert found["loss/w"] == 1.5, "the mean is over the steps that were taken"
    assert found["loss/first_w"] == 0.0, "of the first minibatch alone"
    np.testing.assert_array_equal(out.priorities, np.arange(BATCH))


def test_a_loss_that_never_stops_takes_all_epochs():
    state, update, mesh = start(Stops(at_least=100.0), 1, epochs=3, minibatches=2)
    state, out = update(state, trajectory(mesh), key())
    assert int(state.step) == 6 and means(out.metrics)["loss/epochs"] == 3.0


def test_the_next_trajectory_starts_anew_and_moves_the_losss_schedule():
    state, update, mesh = start(Stops(at_least=0.1), 1, total=2, epochs=4, minibatches=2)
    state, _ = update(state, trajectory(mesh), key())
    assert int(state.step) == 2
    state, out = update(state, trajectory(mesh), key(1))
    found = means(out.metrics)
    assert int(state.step) == 4 and found["loss/slope"] == 1.5 and found["loss/first_w"] == 2.0


@pytest.mark.parametrize(("at_least", "traces"), [(None, 1), (2.0, 2)])
def test_an_epoch_is_traced_for_its_shapes_only_where_it_may_be_skipped(at_least, traces):
    seen = []

    class Traced(Stops):
        def __call__(self, *args: Any) -> Any:
            seen.append(self)
            return super().__call__(*args)

    state, update, mesh = start(Traced(at_least), 1, epochs=3, minibatches=2)
    update.lower(state, trajectory(mesh), key())
    assert len(seen) == traces

"""Three updates on gymnasium envs of every kind of action and observation, with V-trace and PPO."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from flaxrl import config_for
from tests.small_runs import all_finite, host_config, rows, train

MODULE = "tests.envs.gymnasium_envs"
BOUNDS = {"unbounded": {}, "half": {"low": -1.0}, "bounded": {"low": -1.0, "high": 2.0}}


def run(tmp_path: Path, loss: str = "vtrace", threads: int = 0, head: dict | None = None, **env) -> list[dict]:
    """The logged rows of 3 updates; parameters are finite, and in lock step what PPO learns from is its own policy."""
    config = host_config(3, threads, config_for("gymnasium", **env), loss=config_for(loss))
    with config.unlocked():
        config.log.every = 1
        config.model.head = config_for("policy_value", **(head or {}))
    trainer = train(config, tmp_path)
    assert trainer.updates == 3 and int(trainer.state.step) == 3
    assert all_finite(jax.device_get(trainer.state.params))
    found = [row for row in rows(tmp_path) if "loss/total" in row]
    assert len(found) == 3 and all(row["loss/skipped"] == 0 and np.isfinite(row["loss/total"]) for row in found)
    if loss == "ppo" and threads == 0:
        assert all(row["loss/first_ratio_deviation"] <= 1e-5 for row in found)
    return rows(tmp_path)


@pytest.mark.parametrize(("threads", "loss"), [(0, "ppo"), (2, "vtrace")])
def test_cartpole(tmp_path, threads, loss):
    assert run(tmp_path, loss, threads)[-1]["eval/return_mean"] >= 8


def test_cartpole_in_worker_processes(tmp_path):
    assert run(tmp_path, threads=1, workers=2)[-1]["eval/return_mean"] >= 8


@pytest.mark.parametrize(
    "name",
    [
        "StartsAtTen",
        "MaskedComponents",
        "JointMask",
        *[pytest.param(n, marks=pytest.mark.slow) for n in ("Components", "Switches", "Nested", "Masked")],
    ],
)
def test_spaces(tmp_path, name):
    """The envs check each action; each pays 1 + 2 + 3."""
    found = run(tmp_path, id=f"{MODULE}:Test{name}-v0", action_mask="Mask" in name)
    assert found[-1]["eval/return_mean"] == 6


@pytest.mark.parametrize("distribution", [pytest.param("gaussian", marks=pytest.mark.slow), "tanh_gaussian"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_box_actions_never_become_nan(tmp_path, bounds, distribution):
    """Bounds that are infinite, on one side or both, are nothing to rescale by."""
    head = {"distribution": distribution, "log_std_init": 1.0}
    found = run(tmp_path, "ppo", head=head, id=f"{MODULE}:TestContinuous-v0", kwargs=BOUNDS[bounds])
    assert found[-1]["eval/return_mean"] == 6

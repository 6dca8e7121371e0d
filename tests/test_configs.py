"""Every shipped config starts, trains, resumes and loads with only its sizes reduced."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import flaxrl
from flaxrl.build import resolve
from flaxrl.trainers.source import Source
from tests.small_runs import all_finite, rows, saved_steps, train

FOLDER = Path(__file__).parent.parent / "configs"

SMALLER: dict[str, Any] = {
    "num_envs": 2,
    "unroll_length": 4,
    "updates_per_call": 1,
    "threads": 1,
    "minibatches": 1,
    "epochs": 1,
    "hidden": {int: 8, tuple: (8,)},
    "features": 8,
    "channels": (4,),
    "blocks": 1,
    "max_frames": 40,
    "max_steps": 10,
    "env_threads": 1,
    "torso_chunk": 4,
}
"""Field -> value that makes it small, or that by the type of the config's value."""

ARGUMENTS = {
    "impala_gymnax": ("Breakout-MinAtar", "MemoryChain-bsuite"),
    "ppo_gymnasium": ("Pendulum-v1",),
    "ppo_maze": ("medium",),
    "ppo_recurrent": ("lstm", "feed_forward"),
}
"""Further arguments of a config, beside the one it takes by default."""

QUICK = ("impala_atari-None", "ppo_cartpole-None", "ppo_gymnasium-None")
"""Cases that every `pytest` runs: each source, loss and kind of env; `pytest -m slow` runs the others."""


def _cases() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        for argument in (None, *ARGUMENTS.get(path.stem, ())):
            name = f"{path.stem}-{argument}"
            marks = () if name in QUICK else pytest.mark.slow
            found.append(pytest.param(path, argument, id=name, marks=marks))
    return found


def shrink(block: Any) -> None:
    """Sets every field that SMALLER names, in all the blocks of a config."""
    for name in block:
        value = block[name]
        if hasattr(value, "unlock"):
            shrink(value)
        elif name in SMALLER:
            smaller = SMALLER[name]
            block[name] = smaller[type(value)] if isinstance(smaller, dict) else smaller


def load_config(path: Path, argument: str | None) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config() if argument is None else module.get_config(argument)


BUDGETS = {
    "ppo_acrobot": {"": 160_000},
    "ppo_cartpole": {"": 500_000},
    "ppo_maze": {"empty": 81_920, "medium": 819_200},
    "ppo_minatar": {
        **dict.fromkeys(("", "breakout", "SpaceInvaders-MinAtar", "space_invaders"), 1_280_000),
        **dict.fromkeys(("Freeway-MinAtar", "freeway", "freeway_minatar"), 320_000),
        **dict.fromkeys(("Asterix-MinAtar", "asterix", "ASTERIX_MINATAR"), 3_200_000),
    },
    "ppo_pendulum": {"": 1_000_000},
    "ppo_recurrent": {"gru": 500_000, "feed_forward": 500_000},
}
"""Config -> argument -> steps that its results are compared at."""


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, budgets in BUDGETS.items() for a in budgets])
def test_a_run_ends_at_its_budget_in_whole_calls(name: str, argument: str) -> None:
    """Or less than a call before it: steps are rounded up, which must not give a run more than it is compared with."""
    made = flaxrl.trainers.plan.check(load_config(FOLDER / f"{name}.py", argument or None))
    budget = BUDGETS[name][argument]
    assert budget - made.steps_per_call < made.total_steps <= budget


@pytest.mark.parametrize(("path", "argument"), _cases())
def test_config_trains_resumes_and_loads(tmp_path: Path, path: Path, argument: str | None) -> None:
    config = load_config(path, argument)
    config.mesh.data = 1
    flaxrl.trainers.plan.check(config)  # as it is, on one device
    with config.unlocked():
        shrink(config)
        source = resolve(config.source.name)
        assert issubclass(source, Source)
        step = config.source.num_envs * config.source.unroll_length
        config.total_steps = 2 * step
        config.log.every = config.checkpoint.every = step
        config.eval.every, config.eval.episodes = None, 1
    train(config, tmp_path / "run")
    config.total_steps = 3 * step
    trainer = train(config, tmp_path / "run")
    assert [line["step"] for line in rows(tmp_path / "run")] == [step, 2 * step, 3 * step]
    assert saved_steps(tmp_path / "run")[-1] == 3 * step
    assert int(trainer.state.updates) == 3 and all_finite(trainer.state.params)
    assert {"eval/return_mean", "loss/total"} <= trainer.last_metrics.keys()
    agent = flaxrl.load(tmp_path / "run")
    observation = jax.tree.map(lambda x: x[0], agent.spec.zeros(1))
    assert np.shape(agent.act(observation)) == agent.spec.action.shape

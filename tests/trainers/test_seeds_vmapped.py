"""Many seeds in one program: each is the run of its seed alone, on one device and split over several."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from learner_setups import assert_close, host

from flaxrl import Trainer, TrainingError, config_for
from flaxrl.trainers import seeds as seeds_module
from flaxrl.trainers.plan import check
from flaxrl.trainers.program import make_program
from flaxrl.trainers.rollout import RolloutData
from flaxrl.trainers.seed_metrics import STD
from flaxrl.trainers.setup import build_agent, env_factory
from flaxrl.trainers.source import Runtime
from tests.small_runs import Stopped, assert_same, every, rows, small_config, stop, train


def many_config(updates: int = 3, num_seeds: int = 2, **fields: Any) -> Any:
    """`small_config` for several seeds: 3, 4, ..."""
    fields = {"mesh": config_for("mesh"), "num_seeds": num_seeds} | fields
    return small_config(updates, **fields)


def entry(tree: Any, index: int) -> Any:
    """One run's part of a tree whose leaves are `[N, ...]`."""
    return jax.tree.map(lambda x: x[index], tree)


def leaves(trainer: Trainer) -> dict[str, Any]:
    """What a run holds, keys as numbers, without what is static."""
    state = trainer.state
    held = {
        "params": state.params,
        "moments": state.opt_state,
        "counters": (state.step, state.updates, state.skipped_in_row),
        "variables": state.variables,
        "data": trainer.data,
    }

    def plain(x: Any) -> Any:
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return host(jax.tree.map(plain, held))


def vtrace() -> Any:
    """With memory, whole unrolls shuffled."""
    core, learner = config_for("lstm", features=8), config_for("learner", minibatches=2)
    return small_config(3, core=core, learner=learner)


def ppo() -> Any:
    """With all that changes in an update: epochs that may stop, running statistics, schedules."""
    config = small_config(
        3,
        loss=config_for("ppo", target_kl=1e-3, clip_final=0.1),
        learner=config_for("learner", epochs=2, minibatches=2, reward_scaling=0.99),
    )
    config.model.normalize_observations = True
    return config


CONFIGS = {"vtrace": vtrace, "ppo": ppo}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loss and a seed -> its run alone: what it holds and logs after 3 updates."""

    @functools.cache
    def run(loss: str, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
        config = CONFIGS[loss]()
        config.seed = seed
        trainer = train(config, tmp_path_factory.mktemp(f"seed{seed}"))
        return leaves(trainer), trainer.last_metrics

    return run


@pytest.mark.parametrize(
    ("loss", "num_seeds", "devices"),
    [("ppo", 2, 2), *[pytest.param("vtrace", n, d, marks=pytest.mark.slow) for n, d in ((3, 1), (4, 4))]],
)
def test_each_seed_is_a_run_alone(
    tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch, loss: str, num_seeds: int, devices: int
) -> None:
    """Parameters, moments, counters, env states, evaluation: to 1e-5 after 3 updates."""
    mesh = seeds_module.seed_mesh
    monkeypatch.setattr(seeds_module, "seed_mesh", lambda runs, given=None: mesh(runs, jax.devices()[:devices]))
    config = CONFIGS[loss]()
    config.num_seeds, config.mesh = num_seeds, config_for("mesh")
    trainer = train(config, tmp_path)
    state = trainer.state
    assert all(len(x.addressable_shards) == devices for x in jax.tree.leaves((state.params, trainer.data)))
    together, line = leaves(trainer), rows(tmp_path)[-1]
    for index in range(num_seeds):
        held, metrics = alone(loss, 3 + index)
        assert_close(entry(together, index), held, 1e-5)
        for name in ("eval/return_mean", "actor/episode_return", "loss/skipped"):
            assert line[f"{name}/seed_{3 + index}"] == pytest.approx(metrics[name], rel=1e-5)
    for name in ("loss/total", "loss/entropy", "eval/return_max", "actor/episode_length"):
        values = [alone(loss, 3 + index)[1][name] for index in range(num_seeds)]
        assert line[name] == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6)
        assert line[name + STD] == pytest.approx(np.std(values), rel=1e-3, abs=1e-6)
    kernels = jax.tree.leaves(host(state.params))[-1]
    assert not np.array_equal(kernels[0], kernels[1])


def test_wide_layers_are_initialised_on_few_cores() -> None:
    """QR factorisations of a batch, one a device and thread of the pool, would wait for one another for ever."""
    config = many_config(1, 8)
    config.model.torso.hidden = (64, 64)
    plan, env = check(config), env_factory(config)(1)
    agent = build_agent(config, env.spec)
    state = make_program(plan, agent, env.spec, plan.source).init_state()
    kernel = np.asarray(state.params["torso"]["Dense_1"]["kernel"])
    assert kernel.shape == (8, 64, 64) and len({float(k[0, 0]) for k in kernel}) == 8


def test_resumed_seeds_end_bit_for_bit_the_same(tmp_path: Path) -> None:
    config = many_config(4, **every(2))
    whole = train(config, tmp_path / "whole")
    stop(config, tmp_path / "run", 3)
    resumed = train(config, tmp_path / "run")
    assert_same(resumed.state, whole.state)
    assert_same(resumed.data, whole.data)
    ours, theirs = rows(tmp_path / "run"), rows(tmp_path / "whole")
    assert [line["step"] for line in ours] == [16, 32]
    returns = [k for k in theirs[-1] if k.startswith("eval/")]
    assert len(returns) > 7 and all(ours[-1][k] == theirs[-1][k] for k in returns)


def test_nothing_compiles_once_everything_has_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Updates in pairs of a call; logs, evaluations and checkpoints between calls."""
    compiled: dict[int, int] = {}

    class Watched(Trainer):
        def _call(self) -> None:
            super()._call()
            compiled[self.updates] = sum(r.getMessage().startswith("Compiling") for r in caplog.records)

    source = config_for("jax_rollout", num_envs=2, unroll_length=4, updates_per_call=2)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        Watched(many_config(8, source=source, **every(2)), tmp_path).run()
    assert compiled[2] > 0 and compiled[6] == compiled[8]


def poison(trainer: Stopped, indices: list[int]) -> None:
    """Makes parameters of some runs NaN, so that each of their gradients is."""
    bad = np.isin(np.arange(np.size(trainer.state.step)), indices)

    def spoil(x: jax.Array) -> jax.Array:
        values = np.where(bad.reshape(-1, *[1] * (x.ndim - 1)), np.nan, np.asarray(x)).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    trainer.state = trainer.state.replace(params=jax.tree.map(spoil, trainer.state.params))


def test_a_seed_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = many_config(8, learner=config_for("learner", max_skipped=2), **every(1))
    trainer = Stopped(config, tmp_path / "one", 2, lambda: poison(trainer, [1]))
    trainer.run()
    out = capsys.readouterr().out
    assert "skipped 50.00% of the gradient steps up to step 24; most in a row just now: 1, by seed 4" in out
    assert out.count("seed 4 has failed") == 1 and "in its last 2 gradient steps (step 32)" in out
    assert "the other 1 run(s) go on" in out and "seed 3 has" not in out
    steps = np.asarray(trainer.state.step)
    assert steps.tolist() == [8, 2] and np.asarray(trainer.state.updates).tolist() == [8, 8]
    last = rows(tmp_path / "one")[-1]
    assert last["loss/skipped/seed_4"] == 1.0 and last["loss/skipped/seed_3"] == 0.0 and np.isfinite(last["loss/total"])
    assert out.splitlines()[-1].split()[-1] == "1"  # failed seeds, in the table at the end


def test_the_run_ends_when_all_seeds_have_failed(tmp_path: Path) -> None:
    config = many_config(8, learner=config_for("learner", max_skipped=2), **every(1))
    trainer = Stopped(config, tmp_path, 2, lambda: poison(trainer, [0, 1]))
    with pytest.raises(TrainingError, match=r"not finite in the last 2 gradient steps or more of every seed \(step 32"):
        trainer.run()


def test_masks_without_a_legal_action_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"^seed 3: env 0 gave an action mask without a legal action at step 0, "):
        train(many_config(1, env=config_for("scripted", mask="empty")), tmp_path)


def test_the_seed_is_named_whose_env_gave_no_legal_action() -> None:
    """Env 1 of the third seed of four, at t = 2 of update 5: step 5 * 8 + 2 * 2 + 1."""
    config = many_config(1, 4, env=config_for("scripted", mask="partial"))
    plan, make_env = check(config), env_factory(config)
    spec = make_env(1).spec
    agent = build_agent(config, spec)
    plan.source.setup(Runtime(make_env, agent, plan.mesh, plan.seed, plan.progress))
    program = make_program(plan, agent, spec, plan.source)
    fault = np.full((4, 2, 2), -1)
    data = RolloutData(envs=None, carry=(), last_action=(), fault=fault)  # type: ignore[arg-type]
    program.check(data)
    fault[2, 1] = 5, 2
    with pytest.raises(TrainingError, match=r"^seed 5: env 1 gave .* at step 45, "):
        program.check(data)

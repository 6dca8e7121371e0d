"""Sweeps: what is refused, and that each setting is the run with its values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from learner_setups import assert_close, host

from flaxrl import ConfigError, config_for
from flaxrl.build import build
from flaxrl.losses.vtrace import VTrace
from flaxrl.trainers.plan import check
from flaxrl.trainers.sweep import Sweep, make_sweep
from flaxrl.trainers.sweep import swept as swept_copy
from tests.small_runs import host_config, rows, small_config, train


def swept(updates: int = 3, num_seeds: int = 1, **sweep: Any) -> Any:
    """A small run with a sweep: `loss__entropy_cost=(...)` and the like."""
    grid = {path.replace("__", "."): values for path, values in sweep.items()}
    return small_config(updates, mesh=config_for("mesh"), num_seeds=num_seeds, sweep=grid)


@pytest.mark.slow
def test_each_setting_is_the_run_with_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = swept(3, 2, optimizer__learning_rate=(1e-2, 3e-3), loss__entropy_cost=[0.3])
    config.optimizer.max_grad_norm = 0.5
    trainer = train(config, tmp_path / "sweep")
    params, line, table = host(trainer.state.params), rows(tmp_path / "sweep")[-1], capsys.readouterr().out
    for index, (rate, seed) in enumerate([(1e-2, 3), (1e-2, 4), (3e-3, 3), (3e-3, 4)]):
        alone = small_config(3, loss=config_for("vtrace", entropy_cost=0.3))
        alone.seed, alone.optimizer.learning_rate, alone.optimizer.max_grad_norm = seed, rate, 0.5
        run = train(alone, tmp_path / f"{index}")
        assert_close(jax.tree.map(lambda x, i=index: x[i], params), host(run.state.params), 1e-5)
        label = f"learning_rate={rate!r},entropy_cost=0.3"
        assert line[f"eval/return_mean/{label}/seed_{seed}"] == run.last_metrics["eval/return_mean"]
        assert line[f"loss/learning_rate/{label}"] == pytest.approx(run.last_metrics["loss/learning_rate"])
    both = [line[f"eval/return_mean/learning_rate=0.01,entropy_cost=0.3/seed_{seed}"] for seed in (3, 4)]
    assert line["eval/return_mean/learning_rate=0.01,entropy_cost=0.3"] == pytest.approx(np.mean(both))
    assert line["eval/return_mean_seed_std/learning_rate=0.01,entropy_cost=0.3"] == pytest.approx(np.std(both))
    head, *settings = table.splitlines()[-3:]
    assert head.split()[:2] == ["optimizer.learning_rate", "loss.entropy_cost"] and len(settings) == 2
    assert {row.split()[0] for row in settings} == {"0.01", "0.003"}
    means = [float(row.split()[2]) for row in settings]
    assert means == sorted(means, reverse=True)


def test_an_argument_of_the_algorithm_can_be_swept(tmp_path: Path) -> None:
    """Adam's eps of 1e3 leaves next to no step."""
    trainer = train(swept(2, optimizer__args__eps=[1e-8, 1e3]), tmp_path)
    first, second = (jax.tree.map(lambda x, i=i: x[i], host(trainer.state.params)) for i in (0, 1))
    norm = rows(tmp_path)[-1]
    assert norm["loss/update_norm/eps=1000.0"] < 1e-3 * norm["loss/update_norm/eps=1e-08"]
    assert not np.allclose(jax.tree.leaves(first)[-1], jax.tree.leaves(second)[-1], atol=1e-4)


def test_the_grid_is_a_product_and_its_last_field_changes_fastest() -> None:
    sweep = make_sweep(swept(loss__entropy_cost=(0.1, 0.2), loss__discount=(0.9, 0.99, 1)))
    assert sweep.paths == ("loss.entropy_cost", "loss.discount")
    assert sweep.settings == ((0.1, 0.9), (0.1, 0.99), (0.1, 1.0), (0.2, 0.9), (0.2, 0.99), (0.2, 1.0))
    assert sweep.labels[1] == "entropy_cost=0.1,discount=0.99"
    assert sweep.columns()["loss.discount"].tolist() == np.asarray([0.9, 0.99, 1.0] * 2, np.float32).tolist()
    assert make_sweep(swept()) == Sweep() and Sweep().labels == ("",)
    plan = check(swept(1, 2, loss__entropy_cost=(0.1, 0.2)))
    assert plan.seeds is not None and plan.seeds.size == 4 and plan.seeds.mesh.size == 4
    assert [plan.seeds.name(i) for i in (1, 2)] == ["seed 4 of entropy_cost=0.1", "seed 3 of entropy_cost=0.2"]
    assert "2 setting(s) x 2 seed(s) (3 to 4), 1 a device" in plan.lines()[2]


def test_fields_of_one_name_are_told_apart() -> None:
    sweep = Sweep(("loss.clip", "optimizer.clip"), ((1.0, 2.0),))
    assert sweep.labels == ("loss.clip=1.0,optimizer.clip=2.0",)


def test_a_changed_copy_leaves_the_original() -> None:
    loss = VTrace()
    changed = swept_copy("loss", loss, {"loss.entropy_cost": 7.0, "optimizer.learning_rate": 1.0})
    assert (changed.entropy_cost, loss.entropy_cost) == (7.0, 0.01) and type(changed) is VTrace
    adam = build(config_for("optimizer"))
    other = swept_copy("optimizer", adam, {"optimizer.args.eps": 1.0, "optimizer.args.b1": 0.5})
    assert (other.args["eps"], other.args["b1"], other.args["b2"]) == (1.0, 0.5, 0.999) and adam.args["eps"] == 1e-8


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"optimizer.lerning_rate": [1e-3]}, r"no float of loss or optimizer; did you mean 'optimizer.learning_rate'"),
        ({"learner.epochs": [1, 2]}, "'learner.epochs', which is no float of loss or optimizer; known: "),
        ({"optimizer.algorithm": ["adam"]}, "'optimizer.algorithm', which is no float"),
        ({"optimizer.args.epz": [1.0]}, "did you mean 'optimizer.args.eps"),
        ({"loss.max_abs_reward": [1.0]}, r"off in this config \(loss.max_abs_reward = None\)"),
        ({"loss.entropy_cost": []}, r"loss.entropy_cost = \[\] must be a list of at least one number"),
        ({"loss.entropy_cost": 0.1}, r"loss.entropy_cost = 0.1 must be a list"),
        ({"loss.entropy_cost": [0.1, "a"]}, "holds 'a', which is no number"),
        ({"loss.clip_rho": [1.0, None]}, "holds None, which is no number"),
        ({"loss.entropy_cost": [0.1, True]}, "holds True, which is no number"),
        ({"loss.entropy_cost": [0.1, 0.1]}, "holds a value twice: 0.1, 0.1"),
        (
            {"optimizer.learning_rate": [1e-3, -1.0]},
            r"setting learning_rate=-1.0: config.optimizer: Optimizer.learning_rate = -1.0 must be > 0",
        ),
        (
            {"loss.clip_rho": [1.0, 2.0], "loss.clip_c": [1.0, 2.0]},
            r"setting clip_rho=1.0,clip_c=2.0: config.loss: VTrace.clip_c = 2.0 must be <= clip_rho = 1.0",
        ),
    ],
)
def test_a_wrong_sweep_is_refused(sweep: dict[str, Any], message: str) -> None:
    config = small_config(1, mesh=config_for("mesh"))
    config.sweep = sweep
    with pytest.raises(ConfigError, match=message) as refused:
        check(config)
    assert "\n" not in str(refused.value)


def test_what_many_seeds_cannot_have_is_refused() -> None:
    def refused(config: Any, message: str, **fields: Any) -> None:
        for name, value in fields.items():
            with config.ignore_type():
                config[name] = value
        with pytest.raises(ConfigError, match=message):
            check(config)

    refused(small_config(1), r"config.num_seeds = 2 gives the devices to the seeds, .*it is data = 1", num_seeds=2)
    mesh = {"mesh": config_for("mesh")}
    for value in (0, 2.0, True, "2"):
        refused(small_config(1, **mesh), rf"config.num_seeds = {value!r} must be an integer >= 1", num_seeds=value)
    refused(host_config(1, **mesh), "needs a source that runs on the device whole, such as jax_rollout", num_seeds=2)
    refused(host_config(1, **mesh), "config.sweep needs a source", sweep={"loss.entropy_cost": [0.1]})
    refused(small_config(1, **mesh), "must leave all seeds < 2", num_seeds=2, seed=2**31 - 1)
    refused(small_config(1, **mesh), "config.sweep = 3 must be a dict", sweep=3)


@dataclass(frozen=True)
class Curious(VTrace):
    """Looks at a number of its own in Python.

    Attributes:
        bonus: any number.
    """

    bonus: float = 0.5

    def __call__(self, *args: Any) -> Any:
        value, out = super().__call__(*args)
        return (value + self.bonus if self.bonus else value), out


def test_a_field_that_python_looks_at_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    loss = config_for(f"{__name__}:Curious")
    config = small_config(1, mesh=config_for("mesh"), loss=loss, sweep={"loss.bonus": [0.5, 1.0]})
    with pytest.raises(ConfigError, match=r"config.sweep cannot have loss.bonus: Python code needs the number"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Keeps(VTrace):
    """Computes something in `__post_init__` from a field.

    Attributes:
        bonus: any number.
    """

    bonus: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "half", self.bonus / 2)


def test_what_was_computed_before_a_swept_value_is_refused() -> None:
    def config(path: str) -> Any:
        loss = config_for(f"{__name__}:Keeps")
        return small_config(1, mesh=config_for("mesh"), loss=loss, sweep={path: [0.5, 1.0]})

    with pytest.raises(ConfigError, match=r"config.sweep cannot have fields of Keeps, which keeps half beside its f"):
        check(config("loss.bonus"))
    assert check(config("optimizer.learning_rate")).seeds is not None

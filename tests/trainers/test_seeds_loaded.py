"""Any seed of a run, any setting of a sweep, is read back from its checkpoint and evaluated as it was in the run."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import flaxrl
from flaxrl import ConfigError, config_for
from flaxrl.trainers import loading
from flaxrl.trainers.evaluate import evaluate_workdir
from tests.small_runs import assert_same, rows, small_config, train

SWEEP = {"optimizer.learning_rate": [1e-1, 1e-3]}
LABEL = "learning_rate=0.001"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, flaxrl.Trainer]:
    """Two settings x seeds 3 and 4."""
    folder = tmp_path_factory.mktemp("swept")
    env = config_for("tests.drawn_envs:DrawnScripted")
    return folder, train(small_config(4, env, mesh=config_for("mesh"), num_seeds=2, sweep=SWEEP), folder)


def test_each_run_is_read_back(swept: tuple[Path, flaxrl.Trainer]) -> None:
    workdir, trainer = swept
    for index, (setting, seed) in enumerate((s, n) for s in ("learning_rate=0.1", LABEL) for n in (3, 4)):
        loaded = flaxrl.load(workdir, seed=seed, setting=setting)
        assert_same(loaded.params, jax.tree.map(lambda x, i=index: x[i], trainer.state.params))
        assert loaded.act(np.zeros(4, np.float32)).shape == ()


def test_all_or_one_is_evaluated_as_in_the_run(swept: tuple[Path, flaxrl.Trainer]) -> None:
    workdir, _ = swept
    line = rows(workdir)[-1]
    told = {k: v for k, v in line.items() if k.startswith("eval/")}
    metrics = evaluate_workdir(workdir)
    assert metrics.pop("step") == 32 and metrics == told
    one = evaluate_workdir(workdir, seed=4, setting=LABEL)
    assert one["eval/return_mean"] == told[f"eval/return_mean/{LABEL}/seed_4"] and one["eval/episodes"] == 2
    assert evaluate_workdir(workdir, which="best")["step"] == 32


def test_one_is_filmed(swept: tuple[Path, flaxrl.Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All episodes where fewer are evaluated than a video has: two of five actions. Of several, none is loaded."""
    workdir, _ = swept
    target = tmp_path / "agent.gif"
    evaluate_workdir(workdir, seed=4, setting=LABEL, video=str(target))
    with Image.open(target) as image:
        assert image.n_frames == 2 * 6  # type: ignore[attr-defined]
    monkeypatch.setattr(loading, "load_stored", None)
    with pytest.raises(ConfigError, match="holds several: name one with --eval_seed=SEED, --eval_setting=SETTING"):
        evaluate_workdir(workdir, video=str(target))


def test_what_is_not_in_the_run_is_refused(swept: tuple[Path, flaxrl.Trainer], tmp_path: Path) -> None:
    workdir, _ = swept
    with pytest.raises(ConfigError, match="name one of the run's seeds; there are 3 to 4"):
        flaxrl.load(workdir, setting=LABEL)
    with pytest.raises(ConfigError, match="the run has no seed 5; there are 3 to 4"):
        flaxrl.load(workdir, seed=5, setting=LABEL)
    with pytest.raises(ConfigError, match="name one of the sweep's settings; there are 'learning_rate="):
        flaxrl.load(workdir, seed=3)
    with pytest.raises(ConfigError, match="the sweep has no setting 'learning_rate=1'"):
        flaxrl.load(workdir, seed=3, setting="learning_rate=1")
    train(small_config(1), tmp_path / "one")
    assert flaxrl.load(tmp_path / "one", seed=3).step == 8
    with pytest.raises(ConfigError, match="there is no seed 4: the folder holds one run, of seed 3"):
        flaxrl.load(tmp_path / "one", seed=4)

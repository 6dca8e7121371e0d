"""Learning curves: which runs are one group, what it is called, and the numbers that are drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flaxrl import ConfigError, config_for, curves
from flaxrl.curves import Run, run_folders
from flaxrl.run_folder import RunFolder
from tests.small_runs import small_config

EVAL, TRAIN = "eval/return_mean", "actor/episode_return"


def write_run(path: Path, values: dict[int, Any], metric: str = EVAL, seed: int = 0, **fields: Any) -> Path:
    """A run's folder with the metric's value at each step (or several metrics': name -> value)."""
    config = small_config(**fields).unlock()
    config.seed = seed
    RunFolder(path).match(config)
    rows = [{"step": step} | (v if isinstance(v, dict) else {metric: v}) for step, v in values.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drawn(*paths: Path) -> tuple[str, list[curves.Curve]]:
    return curves.curves([Run.read(p) for p in paths])


def test_seeds_are_one_group_with_mean_and_deviation(tmp_path: Path) -> None:
    """At step 10: 1, 3 and 8: mean 4, deviation sqrt((9 + 1 + 16) / 3); at step 20 all 6."""
    paths = [
        write_run(tmp_path / str(seed), {10: value, 20: 6.0}, seed=seed) for seed, value in enumerate((1.0, 3.0, 8.0))
    ]
    metric, (curve,) = drawn(*paths)
    assert metric == EVAL and curve.agents == 3 and curve.label == "vtrace on scripted"
    assert curve.steps.tolist() == [10, 20]
    np.testing.assert_allclose(curve.mean, [4.0, 6.0], rtol=1e-12)
    np.testing.assert_allclose(curve.std, [np.sqrt(26 / 3), 0.0], rtol=1e-12)


def test_between_its_points_a_run_is_interpolated_and_beyond_them_left_out(tmp_path: Path) -> None:
    """0, 10, 30 at steps 0, 10, 30 and 4, 8 at 10, 20: at 20 the first has 20; at 0 and 30 it is alone."""
    one = write_run(tmp_path / "a", {0: 0.0, 10: 10.0, 30: 30.0})
    other = write_run(tmp_path / "b", {10: 4.0, 20: 8.0}, seed=1)
    _, (curve,) = drawn(one, other)
    assert curve.steps.tolist() == [0, 10, 20, 30]
    np.testing.assert_allclose(curve.mean, [0.0, 7.0, 14.0, 30.0])
    np.testing.assert_allclose(curve.std, [0.0, 3.0, 6.0, 0.0])


def test_other_configs_are_other_groups_named_by_what_differs(tmp_path: Path) -> None:
    points = {10: 1.0, 20: 2.0}
    paths = [
        write_run(tmp_path / "a", points, loss=config_for("vtrace", entropy_cost=0.01)),
        write_run(tmp_path / "b", points, loss=config_for("vtrace", entropy_cost=0.02)),
        write_run(
            tmp_path / "c",
            points,
            seed=1,
            loss=config_for("vtrace", entropy_cost=0.02),
            log=config_for("log", every=80),
            eval=config_for("eval", every=8, episodes=2),
        ),
    ]
    _, found = drawn(*paths)
    assert [(c.label, c.agents) for c in found] == [("entropy_cost=0.01", 1), ("entropy_cost=0.02", 2)]


def test_the_fields_of_another_class_are_not_told(tmp_path: Path) -> None:
    points = {10: 1.0, 20: 2.0}
    scripted = write_run(tmp_path / "a", points)
    counting = write_run(tmp_path / "b", points, env=config_for("counting"))
    assert [c.label for c in drawn(scripted, counting)[1]] == ["env=scripted", "env=counting"]
    longer = write_run(tmp_path / "c", points, env=config_for("scripted", episode_length=9), updates=7)
    labels = [c.label for c in drawn(scripted, longer)[1]]
    assert labels == ["episode_length=5, total_steps=48", "episode_length=9, total_steps=56"]


def test_at_most_three_differences_are_told_and_equal_labels_numbered(tmp_path: Path) -> None:
    points = {10: 1.0, 20: 2.0}
    paths = []
    for lambda_ in (0.8, 0.9):
        loss = config_for("vtrace", baseline_cost=0.1, discount=0.9, entropy_cost=0.1, lambda_=lambda_)
        paths.append(write_run(tmp_path / str(lambda_), points, loss=loss))
    paths.append(write_run(tmp_path / "default", points))
    first, second, third = (c.label for c in drawn(*paths)[1])
    assert first == "baseline_cost=0.1, discount=0.9, entropy_cost=0.1, ... (1)"
    assert second == first.replace("(1)", "(2)")
    assert third.startswith("baseline_cost=0.5, discount=0.99, ") and third.endswith(", ...")


def test_short_names_tell_fields_of_one_name_apart() -> None:
    told = ["loss.rate", "optimizer.rate", "env.game", "model.torso.name"]
    assert [curves._short(n, told) for n in told] == ["loss.rate", "optimizer.rate", "game", "torso"]


def test_training_returns_where_not_all_runs_were_evaluated_twice(tmp_path: Path) -> None:
    once = write_run(tmp_path / "a", {10: {TRAIN: 1.0}, 20: {TRAIN: 2.0, EVAL: 9.0}})
    twice = write_run(tmp_path / "b", {10: {TRAIN: 3.0, EVAL: 8.0}, 20: {TRAIN: 4.0, EVAL: 9.0}}, seed=1)
    metric, (curve,) = drawn(once, twice)
    assert metric == TRAIN and curve.mean.tolist() == [2.0, 3.0]
    assert drawn(twice)[0] == EVAL


def test_missing_values_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {10: 1.0, 15: None, 20: 3.0})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "eval/ret')
    assert drawn(path)[1][0].steps.tolist() == [10, 20]


def test_every_seed_of_a_run_of_many_is_an_agent(tmp_path: Path) -> None:
    """The run's own mean counts only where no seed's value is told."""
    row = {EVAL: 3.0, f"{EVAL}_seed_std": 2.0, f"{EVAL}/seed_0": 1.0, f"{EVAL}/seed_1": 5.0}
    run = write_run(tmp_path / "a", {10: row, 20: row})
    single = write_run(tmp_path / "b", {10: 6.0, 20: 6.0}, seed=7)
    _, (curve,) = drawn(run, single)
    assert curve.agents == 3 and curve.mean.tolist() == [4.0, 4.0]
    np.testing.assert_allclose(curve.std, np.sqrt([14 / 3] * 2))  # (9 + 1 + 4) / 3


def test_settings_of_a_sweep_are_groups(tmp_path: Path) -> None:
    low, high = "optimizer.learning_rate=0.001", "optimizer.learning_rate=0.1"
    seeds = {f"{EVAL}/{low}/seed_0": 1.0, f"{EVAL}/{low}/seed_1": 3.0, f"{EVAL}/{low}": 2.0, f"{EVAL}/{high}": 8.0}
    run = write_run(tmp_path / "a", {10: seeds | {EVAL: 5.0}, 20: seeds | {EVAL: 5.0}})
    _, found = drawn(run)
    assert [(c.label, c.agents, c.mean.tolist()) for c in found] == [(low, 2, [2.0, 2.0]), (high, 1, [8.0, 8.0])]


def test_a_plain_run_beside_a_sweep_has_a_name(tmp_path: Path) -> None:
    low, high = (f"{EVAL}/entropy_cost={value}" for value in (0.1, 0.2))
    values = {10: {low: 1.0, high: 2.0}, 20: {low: 1.0, high: 2.0}}
    swept = write_run(tmp_path / "a", values, sweep={"loss.entropy_cost": [0.1, 0.2]})
    plain = write_run(tmp_path / "b", {10: 3.0, 20: 3.0})
    assert [c.label for c in drawn(swept, plain)[1]] == ["entropy_cost=0.1", "entropy_cost=0.2", "vtrace on scripted"]


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "runs" / str(i), {10: 1.0}) for i in range(3)]
    assert run_folders([str(tmp_path / "runs")]) == paths
    assert run_folders([str(paths[2]), str(tmp_path / "runs"), str(paths[0])]) == [paths[2], paths[0], paths[1]]
    with pytest.raises(ConfigError, match=r"--workdir=.*runz neither is a run's folder nor holds one"):
        run_folders([str(tmp_path / "runz")])


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", {})
    with pytest.raises(ConfigError, match="bare has no metrics to draw yet"):
        drawn(bare)
    short = write_run(tmp_path / "short", {10: 1.0})
    with pytest.raises(ConfigError, match=r"short has too little for a curve: all runs need 2 or more points"):
        drawn(short)


def test_a_users_class_need_not_be_there(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {10: 1.0, 20: 2.0})
    stored = json.loads((path / "config.json").read_text())
    stored["env"] = {"name": "gone.away:Env", "size": 3}
    (path / "config.json").write_text(json.dumps(stored))
    assert drawn(path)[1][0].label == "vtrace on gone.away:Env"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    paths = [write_run(tmp_path / str(seed), {10: float(seed), 20: 6.0}, seed=seed) for seed in range(2)]
    other = write_run(tmp_path / "other", {10: 1.0, 20: 2.0}, env=config_for("counting"))
    out = tmp_path / "new" / f"x{suffix}"
    text = curves.plot([str(p) for p in (*paths, other)], str(out))
    heads = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert out.read_bytes().startswith(heads[suffix])
    assert text.splitlines() == [
        "env=scripted: 2 seeds, 6 +- 0 at step 20",
        "env=counting: 1 seed, 2 at step 20",
        f"drew the evaluation return into {out}",
    ]


def test_the_lines_of_the_picture_are_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    paths = [write_run(tmp_path / str(seed), {10: 4.0 * seed, 20: 6.0}, seed=seed) for seed in range(2)]
    curves.plot([str(p) for p in paths], str(tmp_path / "x.png"))
    (axes,) = figures[0].axes
    (line,) = axes.lines
    assert np.asarray(line.get_xydata()).tolist() == [[10.0, 2.0], [20.0, 6.0]]
    (band,) = axes.collections
    corners = {tuple(v) for v in band.get_paths()[0].vertices.tolist()}  # type: ignore[union-attr]
    assert corners == {(10.0, 0.0), (10.0, 4.0), (20.0, 6.0)}
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["vtrace on scripted (2 seeds)"]  # type: ignore[union-attr]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("agent steps", "evaluation return")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("x.jpg", r"--out=x.jpg must end in .png, .svg or .pdf; did you mean x.png\?"),
        ("curves", r"did you mean curves.png\?"),
        (".", r"--out=. is a folder; give a file, curves.png"),
        ("file.txt/new/x.png", r"--out=file.txt/new/x.png: file.txt is a file, not a folder; did you mean x.png\?"),
    ],
)
def test_wrong_files_are_one_line(out: str, message: str) -> None:
    Path("file.txt").write_text("")
    with pytest.raises(ConfigError, match=message):
        curves.plot(["nowhere"], out)


def test_without_matplotlib_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib: pip install 'flaxrl\[plot\]'"):
        curves.plot(["nowhere"])

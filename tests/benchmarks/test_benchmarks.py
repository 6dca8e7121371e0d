"""Each benchmark runs, small, and its last line holds what it promises."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks import atari, learner, memory, report, seeds, startup
from flaxrl import ConfigError

ROOT = Path(__file__).parent.parent.parent
CONFIG = """
from tests.small_runs import host_config, small_config

def get_config(kind="host"):
    return small_config(50) if kind == "jax" else host_config(50, threads=1)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "bench_config.py"
    path.write_text(CONFIG)
    return str(path)


def _last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_measure_counts_units_in_whole_calls(monkeypatch: pytest.MonkeyPatch):
    now = iter(range(1000))
    monkeypatch.setattr(report.time, "perf_counter", lambda: float(next(now)))
    # The clock moves 1 s at each look: one at the start of a repeat, one after each call.
    assert report.measure(lambda: 10, seconds=4, repeats=3) == report.Rate(10.0, 10.0, 10.0)
    assert report.measure(lambda: None, seconds=0, repeats=1) == report.Rate(1.0, 1.0, 1.0)


def test_rate_is_the_median_and_the_range():
    assert report.rate_of([3.0, 1.0, 2.0]) == report.Rate(2.0, 1.0, 3.0)
    assert str(report.rate_of([3000.0, 1.0, 0.123])) == "1 [0.123-3,000]"


def test_table_and_json_line(capsys: pytest.CaptureFixture[str]):
    report.print_table([("part", "rate"), ("env", 12.345), ("learner", report.rate_of([2.0]))])
    assert capsys.readouterr().out.splitlines() == [
        "| part    | rate    |",
        "|---------|---------|",
        "| env     | 12.3    |",
        "| learner | 2 [2-2] |",
    ]
    report.print_json({"a": report.rate_of([1.0, 2.0, 4.0]), "b": 3})
    line = _last_line(capsys)
    assert (line["a"], line["b"], line["device"]) == (2.0, 3, "cpu")


def test_config_with_overrides(config: str):
    assert report.load_config(config, ["--config.seed=9"]).seed == 9
    assert report.load_config(f"{config}:jax").source.name == "jax_rollout"
    with pytest.raises(ConfigError, match="seed"):
        report.load_config(config, ["--config.sead=9"])
    with pytest.raises(SystemExit, match="--second=1"):
        report.load_config(config, ["--second=1"])


def test_atari(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = [f"--config={config}", "--seconds=0.05", "--repeats=2", f"--profile={tmp_path / 'trace'}"]
    result = atari.main([*arguments, "--config.env.step_seconds=0.002"])
    line = _last_line(capsys)
    assert line.items() >= result.items()
    assert {"env", "inference", "learner", "parts", "whole", "end_to_end_of_parts"} < set(line)
    assert 0 < line["env"] <= 2 / 0.002 and line["num_envs"] == 2
    assert line["parts"] < min(line[part] for part in ("env", "inference", "learner"))
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.timeout(20)
def test_atari_does_not_wait_for_a_dead_actor():
    actors = SimpleNamespace(threads=1, _queues=[queue.Queue(1)], _error=RuntimeError("the emulator is on fire"))
    bench: Any = SimpleNamespace(actors=actors)
    with pytest.raises(RuntimeError, match="on fire"):
        atari.Bench._rest(bench)


def test_atari_refuses_a_source_without_actors(config: str):
    with pytest.raises(ConfigError, match="actor_threads"):
        atari.main([f"--config={config}:jax"])


@pytest.mark.slow
@pytest.mark.parametrize(("torso", "core"), [("nature", "lstm"), ("minatar", "feed_forward")])
def test_learner(capsys: pytest.CaptureFixture[str], torso: str, core: str):
    sizes = ["--torsos", torso, "--cores", core, "--unroll", "1", "--batch", "4"]
    result = learner.main([*sizes, "--seconds", "0.01", "--repeats", "1"])
    line = _last_line(capsys)
    assert line.items() >= result.items()
    name = torso if core == "feed_forward" else f"{torso}_{core}"
    for network in (name, f"{name}_ppo"):
        assert all(line[f"{network}_{ratio}"] > 0 for ratio in ("vs_conv", "of_ceiling", "rows_per_second"))


def test_the_twin_has_the_same_parameters():
    for name, twin in learner.TWINS.items():
        module, spec = learner.TORSOS[name]
        ours, plain = (jax.eval_shape(m.init, jax.random.key(0), spec.zeros(1)) for m in (module, twin()))
        assert sorted(p.shape for p in jax.tree.leaves(ours)) == sorted(p.shape for p in jax.tree.leaves(plain))


def test_memory(config: str, capsys: pytest.CaptureFixture[str]):
    memory.main([f"--config={config}:jax", "--first=4", "--last=8"])
    line = _last_line(capsys)
    assert line["growth"] == pytest.approx(line["last_mib"] / line["first_mib"] - 1)
    assert line["first_mib"] > 50


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            ["--first=4", "--last=80"],
            "ends after 50 updates, before --last=80: give it --config.total_steps=640 or more",
        ),
        (["--first=8", "--last=8"], "--first=8 must be >= 1 and below --last=8"),
        (["--first=0", "--last=8"], "--first=0 must be >= 1"),
        (["--first=4", "--last=8", "--config.source.updates_per_call=10"], "same call of 10 updates: give --last=11"),
    ],
)
def test_memory_refuses_what_it_cannot_look_at_twice(config: str, sizes: list[str], message: str):
    with pytest.raises(SystemExit, match=message):
        memory.main([f"--config={config}:jax", *sizes])


@pytest.mark.slow
def test_seeds(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    seeds.main([f"--config={config}:jax", "--seeds=1,2", "--repeats=1", "--config.mesh.data=-1"])
    line = _last_line(capsys)
    assert line["seeds_1_updates_cost"] == line["seeds_1_wall_cost"] == 1.0
    assert line["seeds_2_updates_cost"] > 0 and line["seeds_2_steps_per_second"] > 0


@pytest.mark.slow
def test_startup(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    startup.main([f"--configs={config}", "--modules=json"])
    line = _last_line(capsys)
    assert line["bench_config_first_s"] > line["bench_config_refusal_s"] > 0
    assert line["bench_config_second_s"] > 0 and line["import_json_s"] >= 0
    assert line["bench_config_second_cpu_s"] > 0 and line["bench_config_first_cpu_s"] > 0

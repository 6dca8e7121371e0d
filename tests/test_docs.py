"""The docs say what the code does: what is generated is fresh, what is shown runs, what is listed is complete."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import flaxrl
from flaxrl import config_for, curves, overrides, run_folder
from flaxrl.trainers import plan
from tests.small_runs import host_config, rows, small_config, train

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")])


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _load(DOCS / "make_reference.py")


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _run(blocks: list[str], **names: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = dict(names)
    for block in blocks:
        exec(compile(block, "<docs>", "exec"), namespace)
    return namespace


# -- generated -----------------------------------------------------------------------------------------------------


def test_what_the_docs_take_from_the_code_is_fresh():
    assert [p.name for p in reference.stale()] == [], "run python docs/make_reference.py"


def test_a_changed_file_makes_its_page_stale():
    text = (DOCS / "extending.md").read_text()
    assert reference.with_files_shown(text) == text
    changed = text.replace("class Reinforce(", "class Enforce(")
    assert changed != text and reference.with_files_shown(changed) == text


def test_extending_shows_the_whole_example_package():
    files = {f"examples/my_lab/{p.name}" for p in (ROOT / "examples" / "my_lab").glob("*.py")}
    assert set(reference.shown_files((DOCS / "extending.md").read_text())) == files - {"examples/my_lab/__init__.py"}
    assert reference.shown_files((ROOT / "README.md").read_text()) == ["examples/my_lab/reinforce.py"]


def test_the_reference_refuses_a_field_that_nobody_describes():
    import dataclasses

    @dataclasses.dataclass
    class Bare:
        """Something.

        Attributes:
            told: what it is.
        """

        told: int = 1
        untold: int = 2

    Bare.__module__ = "flaxrl.losses.base"
    with pytest.raises(ValueError, match="untold"):
        reference.class_lines("bare", Bare)


def test_the_reference_reads_inherited_and_long_descriptions():
    from flaxrl.models.cores import LSTM
    from flaxrl.models.torsos import ACTIVATIONS, MLP

    assert {"features", "initial_state"} < set(reference.attributes(LSTM))
    assert all(repr(name) in reference.attributes(MLP)["activation"] for name in ACTIVATIONS)
    assert "\n" not in reference.attributes(flaxrl.Trajectory)["inputs"]


def test_the_env_blocks_build(monkeypatch: pytest.MonkeyPatch):
    """Constructing an env checks its fields, and imports no suite."""
    made: list[Any] = []

    def recorded(*args: Any, **fields: Any) -> Any:
        made.append(config_for(*args, **fields))
        return made[-1]

    monkeypatch.setattr(flaxrl, "config_for", recorded)
    _run(_blocks(DOCS / "envs.md", "python"))
    assert {"gymnasium", "jumanji"} <= {block["name"] for block in made}
    assert all(flaxrl.build.build(block, num_envs=4) for block in made)


# -- links and commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_exist(page: Path):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [t.partition("#")[0] for t in targets if not t.startswith(("http:", "https:", "#"))]
    assert [t for t in local if not (page.parent / t).exists()] == []


def test_anchors_of_the_reference_exist():
    text = (DOCS / "config.md").read_text()
    headings = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def _commands() -> list[tuple[str, str]]:
    lines = [(page, line) for page in PAGES for block in _blocks(page, "bash") for line in block.splitlines()]
    return sorted({(page.name, line) for page, line in lines if "main.py" in line})


@pytest.mark.parametrize(("page", "line"), _commands())
def test_commands_parse_and_check(page: str, line: str, monkeypatch: pytest.MonkeyPatch):
    """Each `python main.py` line: the config file is there, its overrides fit, and the plan accepts it."""
    arguments = shlex.split(line.partition("main.py ")[2], comments=True)
    flags: dict[str, str] = {}
    for given in arguments:
        key, _, value = given.removeprefix("--").partition("=")
        flags[key] = value
    file, _, argument = flags.pop("config", "configs/impala_gymnax.py").partition(":")
    path = ROOT / ("examples" if file.startswith("my_lab") else "") / file
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    config = _load(path).get_config(*([argument] if argument else []))
    overrides.apply(config, [f"{k.removeprefix('config.')}={v}" for k, v in flags.items() if k.startswith("config.")])
    if "config.source.num_envs" not in flags and "config.mesh.data" not in flags and config.num_seeds == 1:
        config.mesh.data = 1  # its number of envs is that of one device
    plan.check(config)
    own = {"workdir", "mode", "video", "out", "coordinator", "num_processes", "process_id", "eval_seed", "eval_setting"}
    assert {k for k in flags if not k.startswith("config.")} <= own


def test_the_pictures_of_results_are_drawn_by_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = [line for page, line in _commands() if "--mode=plot --workdir=docs/" in line]
    assert lines
    monkeypatch.chdir(ROOT)
    for line in lines:
        _, workdir, out = (argument.partition("=")[2] for argument in shlex.split(line.partition("main.py ")[2]))
        drawn = tmp_path / Path(out).name
        curves.plot([workdir], str(drawn))
        with Image.open(drawn) as new, Image.open(ROOT / out) as shown:
            assert new.size == shown.size


def test_the_readme_has_the_two_commands_and_ci_runs_its_tests():
    blocks = [b.strip() for b in _blocks(ROOT / "README.md", "bash")]
    assert "pip install -e . && python main.py --config=configs/impala_atari.py" in blocks
    assert "pip install -e '.[test]' && pytest" in blocks
    # CI adds --quiet to pip
    assert re.search(r"pip install [^\n]*-e '\.\[test\]' && pytest", (ROOT / ".ci" / "run").read_text())


# -- code that is shown --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """What the code in docs/stochastic-actor.md defines."""
    return _run(_blocks(DOCS / "stochastic-actor.md", "python"))


def test_the_stochastic_actor_runs_and_keeps_its_promises(shown: dict[str, Any]):
    actor = shown["actor"]
    observation = jax.random.normal(jax.random.key(5), (256, 4))
    variables = actor.init(jax.random.key(0), observation)

    def sample(seed: int) -> np.ndarray:
        return np.asarray(actor.apply(variables, observation, rngs={"sample": jax.random.key(seed)})[0])

    greedy, log_prob = actor.apply(variables, observation)
    assert (sample(1) == sample(1)).all() and (sample(1) != sample(2)).any() and (sample(1) != greedy).any()
    # the mode is the likeliest of three actions, and its probability is what is reported
    assert (jnp.exp(log_prob) >= 1 / 3).all()
    # "a lone key": the module stays greedy
    assert (actor.apply(variables, observation, rngs=jax.random.key(1))[0] == greedy).all()
    assert shown["actions"].shape == shown["log_probs"].shape == (5, 8)
    # the first observations are all zero, so greedy actions would all be the same
    assert len(np.unique(shown["actions"][0])) > 1


def test_the_tempered_policy_sharpens(shown: dict[str, Any]):
    tempered = shown["Tempered"]
    from flaxrl.models.heads import categorical
    from flaxrl.trainers.setup import act_context

    rows_ = 512
    output = flaxrl.Output(policy_params=jnp.tile(jnp.asarray([1.0, 0.0, 0.0]), (rows_, 1)), make_policy=categorical)
    rngs = {"sample": jax.random.key(0)}
    hits = [
        int((tempered(t).apply({}, output, act_context(jnp.arange(rows_), 0.0), rngs=rngs)[0] == 0).sum())
        for t in (0.1, 1.0, 10.0)
    ]
    assert hits[0] > 500 and hits[0] > hits[1] > hits[2]


def test_the_source_of_ones_own_scales_what_the_loss_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_source.py").write_text(_blocks(DOCS / "extending.md", "python")[-1])
    monkeypatch.syspath_prepend(str(tmp_path))
    source = config_for("my_source:ScaledRollout", num_envs=2, unroll_length=4, reward_scale=100.0)
    metrics = train(small_config(2, source=source), tmp_path / "run").last_metrics
    del sys.modules["my_source"]
    # raw returns are at most 5, so the value term of unscaled rewards would be below 0.5 * 0.5 * 6**2
    assert metrics["loss/baseline"] > 100
    assert metrics["eval/return_max"] <= 5


# -- a run's folder and metrics ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of three tiny runs: envs in JAX by V-trace and by PPO, and envs on the host with an actor thread."""
    folder = tmp_path_factory.mktemp("runs")
    writers = config_for("log", every=16, writers=("json_lines", "tensorboard"))
    learner = config_for("learner", reward_scaling=0.9)
    train(small_config(4, log=writers, learner=learner), folder / "jax")
    train(host_config(4, threads=1), folder / "host")
    train(
        small_config(4, log=writers, loss=config_for("ppo", target_kl=1.0), learner=config_for("learner", epochs=2)),
        folder / "ppo",
    )
    return [folder / "jax", folder / "host", folder / "ppo"]


def test_the_metrics_table_is_complete(runs: list[Path]):
    written = {name for run in runs for row in rows(run) for name in row}
    table = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \| ([^|]+) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    listed = [name for name, _, _ in table]
    assert len(listed) == len(set(listed))
    assert written - set(listed) == set(), "written by a run, but not in docs/metrics.md"
    assert set(listed) - written == set(), "in docs/metrics.md, but written by no run"
    assert all(unit.strip() and meaning.strip() for _, unit, meaning in table)


def test_a_runs_folder_is_as_told(runs: list[Path]):
    text = (DOCS / "how-a-run-works.md").read_text()
    patterns = re.findall(r"^\| `([\w.*/]+)` \| [^|]+ \|$", text.partition("## The folder of a run")[2], re.MULTILINE)
    found = {p.name for p in runs[0].iterdir()}
    for pattern in patterns:
        assert list(runs[0].glob(pattern)), f"{pattern} is told, but not there"
    assert {p.name for pattern in patterns for p in runs[0].glob(pattern)} == found
    layout = (DOCS / "checkpoints.md").read_text().partition("## When")[0]
    for series in (runs[0] / "checkpoints").iterdir():
        assert f"{series.name}/<step>/" in layout
        for step in series.iterdir():
            assert all(p.name in layout for p in step.iterdir() if not p.name.startswith(("_", "commit"))), step


def test_what_may_change_is_told():
    row = re.search(r"^\| (`total_steps`.*?) \|", (DOCS / "checkpoints.md").read_text(), re.MULTILINE)
    assert row is not None and re.findall(r"`([\w.]+)`", row[1]) == list(run_folder.FREE)


def test_the_code_that_loads_an_agent_runs(runs: list[Path]):
    observation = np.zeros(4, np.float32)
    names = _run(
        _blocks(DOCS / "checkpoints.md", "python"), workdir=runs[0], observation=observation, key=jax.random.key(0)
    )
    assert 0 <= int(names["action"]) < 3

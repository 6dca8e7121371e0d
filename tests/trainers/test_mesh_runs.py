"""Whole runs on meshes of four devices: where the state lies, what is told of it, and moving to another mesh."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from learner_setups import assert_close, host

from flaxrl import Trainer, config_for, load
from flaxrl.trainers.evaluate import evaluate_workdir
from tests.small_runs import all_finite, assert_same, every, rows, saved_steps, small_config, train

KERNELS = (("kernel", "fsdp"),)
MESHES = {
    "one": {"data": 1},
    "data": {"data": 4},
    "both": {"data": 2, "fsdp": 2, "rules": KERNELS},
    "fsdp": {"data": 1, "fsdp": 4, "rules": KERNELS},
}
SLOW = pytest.mark.slow
SOURCES = {
    "jax": ("scripted", "jax_rollout", {}),
    "lock-step": ("host_scripted", "actor_threads", {"threads": 0}),
    "threads": ("host_scripted", "actor_threads", {"threads": 2}),
}


def config_of(mesh: str, updates: int, source: str = "jax", core: str = "lstm", **fields: Any) -> Any:
    """Updates of 8 steps."""
    env, name, settings = SOURCES[source]
    made = config_for(name, num_envs=4, unroll_length=2, **settings)
    block = config_for(core) if core == "feed_forward" else config_for(core, features=8)
    mesh_block = config_for("mesh", **MESHES[mesh])
    return small_config(updates, config_for(env), made, block, mesh=mesh_block, **fields)


def assert_split(state: Any, parts: int) -> None:
    """No device holds a whole kernel, nor a whole moment of one; each holds 1 / `parts`; the rest is everywhere."""
    kernels = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        split = parts if "kernel" in jax.tree_util.keystr(path) else 1
        kernels += split > 1
        assert len(leaf.addressable_shards) == 4
        for shard in leaf.addressable_shards:
            assert shard.data.size * split == leaf.size, path
    # Adam has two moments a parameter.
    assert parts == 1 or kernels == 3 * sum(
        "kernel" in str(p) for p, _ in jax.tree_util.tree_leaves_with_path(state.params)
    )


class Watched(Trainer):
    """Looks at where the state lies, first of all and after each update."""

    seen = 0

    def _call(self) -> None:
        parts = self.plan.mesh.shape["fsdp"]
        assert_split(self.state, parts)
        super()._call()
        assert_split(self.state, parts)
        self.seen += 1


@pytest.mark.parametrize(
    ("mesh", "source"),
    [
        ("both", "threads"),
        pytest.param("data", "jax", marks=SLOW),
        pytest.param("fsdp", "lock-step", marks=SLOW),
        *[pytest.param("both", source, marks=SLOW) for source in ("jax", "lock-step")],
        *[pytest.param("data", source, marks=SLOW) for source in ("lock-step", "threads")],
        *[pytest.param("fsdp", source, marks=SLOW) for source in ("jax", "threads")],
    ],
)
def test_runs_evaluate_save_and_resume_on_any_mesh(tmp_path: Path, mesh: str, source: str) -> None:
    first = Watched(config_of(mesh, 2, source, **every(1)), tmp_path)
    first.run()
    trainer = Watched(config_of(mesh, 3, source, **every(1)), tmp_path)
    trainer.run()
    assert (first.seen, trainer.seen) == (2, 1)
    lines = rows(tmp_path)
    assert [line["step"] for line in lines] == saved_steps(tmp_path) == [8, 16, 24]
    assert all(0 <= line["eval/return_mean"] <= 5 and line["eval/episodes"] == 2 for line in lines)
    assert all(np.isfinite(line["loss/total"]) and line["loss/skipped"] == 0 for line in lines)
    agent = load(tmp_path)
    assert agent.step == 24
    assert_same(host(agent.params), host(trainer.state.params))
    evaluated = evaluate_workdir(tmp_path)
    assert {k: evaluated[k] for k in ("eval/return_mean", "eval/length_mean")} == {
        k: lines[-1][k] for k in ("eval/return_mean", "eval/length_mean")
    }


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if m == "both" else SLOW) for m in MESHES])
def test_the_start_tells_what_a_device_holds(tmp_path: Path, mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(mesh, 1, "lock-step", "feed_forward", log=config_for("log", every=8, writers=()))
    config.model.torso.hidden = (64, 512)
    config.source.num_envs, config.env.num_actions = 64, 1200
    trainer = train(config, tmp_path)
    found = re.search(
        r"a device: ([\d.,]+) MiB of parameters and optimizer state, ([\d.,]+) MiB of observations",
        capsys.readouterr().out,
    )
    assert found is not None
    state, batch = (float(x.replace(",", "")) for x in found.groups())
    devices = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(trainer.state):
        for shard in leaf.addressable_shards:
            devices[shard.device] += shard.data.nbytes
    assert state == pytest.approx(max(devices.values()) / 2**20, abs=0.05)
    # Adam: three numbers a parameter, of which the kernels alone are split.
    sizes = {jax.tree_util.keystr(p): x.size for p, x in jax.tree_util.tree_leaves_with_path(trainer.state.params)}
    parts = trainer.plan.mesh.shape["fsdp"]
    numbers = sum(n // parts if "kernel" in name else n for name, n in sizes.items())
    assert state == pytest.approx(3 * 4 * numbers / 2**20, abs=0.05) and state > 1
    assert batch == pytest.approx(3 * 64 * 1201 * 4 / trainer.plan.mesh.size / 2**20, abs=0.05)


# -- another mesh ------------------------------------------------------------------------------------------------------

MOVES = [
    *[
        pytest.param(*move, "vtrace", marks=SLOW)
        for move in (
            ("data", "one"),
            ("one", "data"),
            ("data", "both"),
            ("both", "data"),
            ("one", "fsdp"),
            ("fsdp", "one"),
        )
    ],
    *[pytest.param(*move, "ppo", marks=SLOW) for move in (("one", "data"), ("fsdp", "one"))],
]
LOSSES = {"vtrace": {}, "ppo": {"minibatch": "sequences"}}


def moving(mesh: str, updates: int, loss: str) -> Any:
    """A run whose numbers no mesh changes: it does not shuffle."""
    return config_of(mesh, updates, loss=config_for(loss, **LOSSES[loss]), **every(2))


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Any, Any]]:
    """For a mesh and loss, state and data after two updates and then after four, of a run that stayed there."""

    @functools.cache
    def ends(mesh: str, loss: str) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp(mesh)
        two, four = (
            (host(jax.tree.map(_plain, (t.state, t.data))), folder)
            for t in (train(moving(mesh, n, loss), folder) for n in (2, 4))
        )
        return two, four

    return ends


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize(("before", "after", "loss"), MOVES)
def test_a_checkpoint_moves_to_another_mesh(tmp_path: Path, before: str, after: str, loss: str, stayed: Any) -> None:
    train(moving(before, 2, loss), tmp_path)
    # Nothing is left to do, so this only restores: bit for bit what was saved, laid out as the new mesh wants it.
    there = train(moving(after, 2, loss), tmp_path)
    assert_same(host(jax.tree.map(_plain, (there.state, there.data))), stayed(before, loss)[0][0])
    if after != "one":
        assert_split(there.state, there.plan.mesh.shape["fsdp"])
    agent = load(tmp_path)  # on one device
    assert_same(host(agent.params), host(there.state.params))
    # It goes on: without a shuffle every mesh computes the same.
    later = train(moving(after, 4, loss), tmp_path)
    assert [line["step"] for line in rows(tmp_path)] == [16, 32] and int(later.state.updates) == 4
    assert all_finite(later.state)
    assert_close(host(later.state.params), stayed(before, loss)[1][0][0].params, 1e-4)

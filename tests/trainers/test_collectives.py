"""What a sharded update moves between devices, read from the compiled text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from collectives import Collective, collectives
from jax.sharding import PartitionSpec as P
from learner_setups import IMAGE, KERNELS, VECTOR, VTRACE, key, learner, made_up_trajectory, make_agent, mesh_of
from surrogate import Surrogate

from flaxrl import config_for
from flaxrl.losses.ppo import PPO
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.plan import check
from flaxrl.trainers.program import make_program
from flaxrl.trainers.setup import build_agent, env_factory
from flaxrl.trainers.source import Runtime
from tests.small_runs import small_config

ADAM = Optimizer("adam", learning_rate=1e-2)
BATCH, TIME = 16, 8
SPECS = {"lstm": VECTOR, "convolution": IMAGE}
SCALARS = 64
"""More numbers than the sums and counts of all means together."""


def _text(function: Any, *args: Any) -> str:
    text = function.lower(*args).compile().as_text()
    assert text is not None
    return text


def _compiled(spec: Any, core: str, **settings: Any) -> tuple[list[Collective], int]:
    """Collectives of a compiled update, and its number of parameters; a torso of images runs in chunks of 8 rows."""
    agent = make_agent(spec, core)
    state, update, mesh = learner(agent, spec, ADAM, **settings)
    batch = made_up_trajectory(agent, spec, mesh, TIME, BATCH)
    size = sum(x.size for x in jax.tree.leaves(state.params))
    return collectives(_text(update, state, batch, key())), size


def _one_step(name: str, **settings: Any) -> tuple[list[Collective], int]:
    return _compiled(SPECS[name], "lstm" if name == "lstm" else "feed_forward", **settings)


def _moved(found: list[Collective]) -> dict[str, int]:
    """Numbers moved by kind of collective."""
    return {kind: sum(sum(c.sizes) for c in found if c.kind == kind) for kind in {c.kind for c in found}}


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPECS)
def test_data_mesh_reduces_the_gradient_once(name: str, accumulation: int) -> None:
    found, parameters = _one_step(name, data=4, accumulation=accumulation)
    assert all(c.depth == 0 for c in found), "a collective inside a loop"
    moved = _moved(found)
    # Every parameter once, and a few scalars: sums and counts of means.
    assert set(moved) == {"all-reduce"} and parameters <= moved["all-reduce"] <= parameters + SCALARS, found


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPECS)
def test_fsdp_mesh_moves_nothing_in_loops_and_no_batch(name: str, accumulation: int) -> None:
    found, parameters = _one_step(name, data=2, fsdp=2, rules=KERNELS, accumulation=accumulation)
    assert all(c.depth == 0 for c in found), "a collective inside a loop"
    moved = _moved(found)
    assert 0 < moved.pop("all-gather") <= parameters, found
    # Whether the gradient is reduced whole or scattered is the compiler's choice.
    assert sum(moved.values()) <= parameters + SCALARS, found


# Two epochs of two minibatches each: a loop in a loop. What lies deeper is the loop over time, over chunks of the torso
# or over the pieces of a minibatch.
SHUFFLED = {
    "sequences": (VTRACE, IMAGE, "lstm", {}),
    "sequences-in-pieces": (VTRACE, IMAGE, "lstm", {"accumulation": 2}),
    "steps": (PPO(), IMAGE, "feed_forward", {}),
    "steps-in-pieces": (PPO(target_kl=0.1), IMAGE, "feed_forward", {"accumulation": 2}),
    "sequences-of-ppo": (PPO(minibatch="sequences"), VECTOR, "lstm", {}),
    "surrogate-in-pieces": (Surrogate(), IMAGE, "feed_forward", {"accumulation": 2}),
}
LAYOUTS = {"data": {"data": 4}, "both": {"data": 2, "fsdp": 2}, "fsdp": {"data": 1, "fsdp": 4}}


@pytest.mark.parametrize("layout", ["both", *[pytest.param(m, marks=pytest.mark.slow) for m in ("data", "fsdp")]])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("sequences", "steps") else pytest.mark.slow) for name in SHUFFLED]
)
def test_a_minibatch_reduces_the_gradient_once_and_nothing_else_moves(name: str, layout: str) -> None:
    loss, spec, core, settings = SHUFFLED[name]
    settings = settings | {"loss": loss, "epochs": 2, "minibatches": 2, "rules": KERNELS} | LAYOUTS[layout]
    found, parameters = _compiled(spec, core, **settings)
    before, minibatch = [c for c in found if c.depth == 0], [c for c in found if c.depth == 2]
    assert len(before) + len(minibatch) == len(found), "a collective in a loop other than that over minibatches"
    gathered = 0 if layout == "data" else parameters
    # The loss prepares with the parameters alone; the shuffle moves nothing.
    assert sum(sum(c.sizes) for c in before) <= gathered + SCALARS, before
    moved = _moved(minibatch)
    assert moved.pop("all-gather", 0) <= gathered, minibatch
    assert 0 < sum(moved.values()) <= parameters + SCALARS, minibatch
    if layout == "data":
        assert set(moved) == {"all-reduce"} and moved["all-reduce"] >= parameters, minibatch


def _whole_call(layout: dict[str, int], core: str, loss: Any) -> tuple[list[Collective], int]:
    """Collectives of all that a call of `jax_rollout` does, acting and learning, and its number of parameters."""
    memory = config_for(core) if core == "feed_forward" else config_for(core, features=8)
    source = config_for("jax_rollout", num_envs=BATCH, unroll_length=TIME)
    mesh = config_for("mesh", **layout, rules=KERNELS if "fsdp" in layout else ())
    config = small_config(1, source=source, core=memory, loss=loss, mesh=mesh)
    plan, make_env = check(config), env_factory(config)
    spec = make_env(1).spec
    agent = build_agent(config, spec)
    program = make_program(plan, agent, spec, plan.source)
    state = program.init_state()
    plan.source.setup(Runtime(make_env, agent, plan.mesh, plan.seed, plan.progress))
    data = program.init_data(state)
    size = sum(x.size for x in jax.tree.leaves(state.params))
    return collectives(_text(program.make_call(state, data), state, data)), size


@pytest.mark.parametrize("layout", ["both", *[pytest.param(m, marks=pytest.mark.slow) for m in ("data", "fsdp")]])
@pytest.mark.parametrize("core", ["lstm", pytest.param("feed_forward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", ["vtrace", pytest.param("ppo", marks=pytest.mark.slow)])
def test_acting_moves_nothing_but_parameters(layout: str, core: str, loss: str) -> None:
    """Envs step and agents act on each device alone: what moves is the gradient, parameters, and sums of metrics."""
    block = config_for(loss, **({"minibatch": "sequences"} if loss == "ppo" else {}))
    found, parameters = _whole_call(LAYOUTS[layout], core, block)
    assert all(c.depth == 0 for c in found), "a collective inside a loop"
    moved = _moved(found)
    # Gathered to act, to prepare and to learn.
    assert moved.pop("all-gather", 0) <= (0 if layout == "data" else 3 * parameters), found
    assert 0 < sum(moved.values()) <= parameters + SCALARS, found


def test_the_reader_sees_collectives_in_loops() -> None:
    mesh = mesh_of(4)[1]

    def body(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, ("data", "fsdp")) * 0.5, None), x, None, length=3)[0]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(), check_vma=False))
    found = collectives(_text(mapped, jnp.ones((8, 5))))
    assert [(c.kind, c.sizes, c.depth) for c in found] == [("all-reduce", (10,), 1)]

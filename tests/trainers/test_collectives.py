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

from flaxrl.trainers.optimizer import Optimizer

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
    "steps": (Surrogate(), IMAGE, "feed_forward", {}),
    "steps-in-pieces": (Surrogate(), IMAGE, "feed_forward", {"accumulation": 2}),
}
LAYOUTS = {"data": {"data": 4}, "both": {"data": 2, "fsdp": 2}, "fsdp": {"data": 1, "fsdp": 4}}


@pytest.mark.parametrize("layout", ["both", *[pytest.param(m, marks=pytest.mark.slow) for m in ("data", "fsdp")]])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "pieces" in name else ()) for name in SHUFFLED]
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


def test_the_reader_sees_collectives_in_loops() -> None:
    mesh = mesh_of(4)[1]

    def body(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, ("data", "fsdp")) * 0.5, None), x, None, length=3)[0]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(), check_vma=False))
    found = collectives(_text(mapped, jnp.ones((8, 5))))
    assert [(c.kind, c.sizes, c.depth) for c in found] == [("all-reduce", (10,), 1)]

"""Cores: the reset before FIRST rows, in value and gradient; the initial state."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from golden import close, vector

from flaxrl.errors import ConfigError
from flaxrl.models.cores import GRU, LSTM, FeedForward, Recurrent

FEATURES = 5


class Leaky(Recurrent):
    """h = 0.5 h + x: numbers worked by hand."""

    def _project(self, x: Any) -> Any:
        return x

    def _step(self, weights: Any, carry: Any, x_t: Any) -> Any:
        h = 0.5 * carry + x_t
        return h, h

    def _zeros(self, batch_size: int) -> Any:
        return jnp.zeros((batch_size, self.features))


def rows(time: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(time, 2, 3)).astype(np.float32)


def firsts(time: int, *where: int) -> Any:
    """True on those rows, of both envs."""
    first = np.zeros((time, 2), bool)
    first[list(where)] = True
    return first


@functools.cache
def setup(core: Any) -> tuple[Any, Any]:
    """Random parameters (the initial state's too) and a carry that is not the initial one."""
    rng = np.random.default_rng(7)
    carry = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), jax.eval_shape(lambda: core._zeros(2)))
    shapes = jax.eval_shape(core.init, jax.random.key(0), rows(1), firsts(1), carry)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes), carry


@functools.cache
def applied(core: Any) -> Any:
    """The core, compiled once for each number of rows."""
    return jax.jit(core.apply)


def initial(core: Any, variables: Any, batch: int = 2) -> Any:
    return core.apply(variables, batch, method="initial_carry")


CORES = [
    pytest.param(core(FEATURES, initial_state=start), id=f"{core.__name__}-{start}")
    for core in (LSTM, GRU)
    for start in ("zeros", "learned")
]


def test_golden_reset():
    v = vector("rnn_reset")
    x = jnp.asarray(v["inputs"]["x"])[:, None, None]
    first = jnp.asarray(v["inputs"]["is_first"], bool)[:, None]
    out: Any = Leaky(1).apply({}, x, first, jnp.full((1, 1), v["inputs"]["h0"]))
    y, carry = out
    close(y[:, 0, 0], v["expected"]["h"], v)  # .5*8+1, .5*5+2, 3 alone, .5*3+4
    close(carry[0, 0], v["expected"]["h"][-1], v)


def near(x: Any, y: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), x, y)


@pytest.mark.parametrize("core", CORES)
def test_an_episode_does_not_know_the_one_before(core):
    """[A|B] answers for B what B alone answers from the initial state; without the reset it would not."""
    (variables, carry), apply = setup(core), applied(core)
    x = np.concatenate([rows(4, seed=1), rows(4, seed=2)])
    together, end = apply(variables, x, firsts(8, 4), carry)
    alone, _ = apply(variables, np.concatenate([x[4:], x[:4]]), firsts(8), initial(core, variables))
    near(together[4:], alone[:4])
    again, _ = apply(variables, np.concatenate([x[4:], x[:4]]), firsts(8, 0), carry)  # FIRST on the first row
    near(again, alone)
    straight, _ = apply(variables, x, firsts(8), carry)
    assert np.abs(straight[4:] - together[4:]).max(axis=(1, 2))[0] > 1e-3
    near(end[1] if isinstance(core, LSTM) else end, together[-1])  # the carry is that after the last row


@pytest.mark.parametrize("core", CORES)
def test_no_gradient_crosses_an_episode_start(core):
    variables, carry = setup(core)
    x, first = rows(8), firsts(8, 4)

    def loss_of_b(variables: Any, x: Any, carry: Any) -> Any:
        return jnp.sum(jnp.sin(core.apply(variables, x, first, carry)[0][4:]))

    to_params, to_x, to_carry = jax.jit(jax.grad(loss_of_b, argnums=(0, 1, 2)))(variables, x, carry)
    np.testing.assert_array_equal(to_x[:4], 0)
    assert (np.abs(to_x[4:]).max(axis=(1, 2)) > 0).all()
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), to_carry)
    starts = [g for name, g in to_params["params"].items() if name.startswith("initial_")]
    assert len(starts) == (0 if core.initial_state == "zeros" else len(jax.tree.leaves(carry)))
    assert all(np.abs(g).min() > 0 for g in starts)  # a learned start learns from B's start


@pytest.mark.parametrize("core", CORES)
def test_only_the_env_that_restarts_is_reset(core):
    (variables, carry), apply = setup(core), applied(core)
    x, one = rows(8), firsts(8)
    one[2, 0] = True
    mixed, _ = apply(variables, x, one, carry)
    near(mixed[:, 0], apply(variables, x, firsts(8, 2), carry)[0][:, 0])
    near(mixed[:, 1], apply(variables, x, firsts(8), carry)[0][:, 1])


@pytest.mark.parametrize("core", CORES)
def test_two_halves_are_the_whole(core):
    """The carry after one unroll starts the next."""
    (variables, carry), apply = setup(core), applied(core)
    x, first = rows(8), firsts(8, 1, 5)
    whole, end = apply(variables, x, first, carry)
    one, middle = apply(variables, x[:4], first[:4], carry)
    two, end_two = apply(variables, x[4:], first[4:], middle)
    near((whole, end), (jnp.concatenate([one, two]), end_two))


@pytest.mark.parametrize("core", CORES)
def test_the_initial_carry(core):
    variables, _ = setup(core)
    carry = initial(core, variables, 3)
    leaves = jax.tree.leaves(carry)
    assert [x.shape for x in leaves] == [(3, FEATURES)] * (2 if isinstance(core, LSTM) else 1)
    assert all((x == x[:1]).all() for x in leaves)
    assert all(x.any() == (core.initial_state == "learned") for x in leaves)


def test_a_learned_start_begins_at_zero():
    core = GRU(2, initial_state="learned")
    variables = core.init(jax.random.key(0), rows(1), firsts(1), core._zeros(2))
    assert not any(x.any() for x in jax.tree.leaves(initial(core, variables)))


def flax_parameters(core: Any, own: Any) -> Any:
    """A core's parameters as flax's cells name them."""
    names = "ifgo" if isinstance(core, LSTM) else "rzn"
    tree: Any = {}
    for i, gate in enumerate(names):
        part = slice(i * FEATURES, (i + 1) * FEATURES)
        tree[f"i{gate}"] = {"kernel": own["input"]["kernel"][:, part]}
        tree[f"h{gate}"] = {"kernel": own["recurrent_kernel"][:, part]}
        # flax keeps an LSTM's bias beside the recurrent kernel, a GRU's beside the input kernel.
        tree[f"{'h' if isinstance(core, LSTM) else 'i'}{gate}"]["bias"] = own["input"]["bias"][part]
    if isinstance(core, GRU):
        tree["hn"]["bias"] = own["candidate_bias"]
    return {"params": tree}


@pytest.mark.parametrize(
    ("core", "cell"), [(LSTM(FEATURES), nn.OptimizedLSTMCell(FEATURES)), (GRU(FEATURES), nn.GRUCell(FEATURES))]
)
def test_the_cells_are_those_of_flax(core: Any, cell: Any):
    variables, carry = setup(core)
    x = rows(3)
    y, end = applied(core)(variables, x, firsts(3), carry)
    theirs = flax_parameters(core, variables["params"])
    for t in range(3):
        carry, want = cell.apply(theirs, carry, x[t])
        np.testing.assert_allclose(y[t], want, atol=1e-6)
    near(end, carry)


def test_the_input_product_is_ahead_of_the_scan():
    core: Any = LSTM(FEATURES)
    variables, carry = setup(core)
    jaxpr: Any = jax.make_jaxpr(core.apply)(variables, rows(8), firsts(8), carry)
    (scan,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    inside = str(scan.params["jaxpr"]).count("dot_general")
    assert inside == 1 and str(jaxpr).count("dot_general") == 2


@pytest.mark.parametrize("core", [LSTM(4), GRU(4)])
def test_each_gate_is_drawn_by_itself(core: Any):
    params = core.init(jax.random.key(0), rows(1), firsts(1), core._zeros(2))["params"]
    gates = jnp.split(params["recurrent_kernel"], params["recurrent_kernel"].shape[1] // 4, axis=1)
    for gate in gates:
        np.testing.assert_allclose(gate @ gate.T, np.eye(4), atol=1e-5)
    assert not np.allclose(gates[0], gates[1])


def test_the_forget_gate_starts_open():
    for bias in (1.0, 0.0):
        core: Any = LSTM(3, forget_bias=bias)
        params: Any = core.init(jax.random.key(0), rows(1), firsts(1), core._zeros(2))["params"]
        assert params["input"]["bias"].tolist() == [0] * 3 + [bias] * 3 + [0] * 6


@pytest.mark.parametrize("core", [LSTM(FEATURES, dtype="bfloat16"), GRU(FEATURES, dtype="bfloat16")])
def test_bfloat16_is_in_the_products_alone(core: Any):
    variables, carry = setup(core)
    y, end = applied(core)(variables, rows(3), firsts(3), carry)
    full, _ = applied(type(core)(FEATURES))(variables, rows(3), firsts(3), carry)
    assert {x.dtype for x in jax.tree.leaves((y, end))} == {jnp.dtype("float32")}
    assert 1e-6 < np.abs(y - full).max() < 0.1
    text = str(jax.make_jaxpr(core.apply)(variables, rows(3), firsts(3), carry))
    products = re.findall(r"(\w+)\[[^]]*\] = dot_general", text)
    assert products == ["bf16", "bf16"]


def test_feed_forward_passes_through():
    x = rows(3)
    y, carry = FeedForward().apply({}, x, firsts(3), ())
    np.testing.assert_array_equal(y, x)
    assert carry == () == FeedForward().apply({}, 4, method="initial_carry")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": 0}, "LSTM.features = 0 must be > 0"),
        ({"initial_state": "learnt"}, "LSTM.initial_state = 'learnt' is unknown; did you mean 'learned'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        LSTM(**fields)

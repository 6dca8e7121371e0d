"""What every head must do.

Put your own through it: `check_head(MyHead(action_spec=spec), spec)`. It runs the head on random features and fails
with the broken rule.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from flaxrl.types import Output

T, B, F = 4, 3, 8


def check_head(head: nn.Module, action_spec: ActionSpec) -> Output:
    """Checks a head's whole contract.

    Args:
        head: features `[T, B, F]` and an action mask or None -> Output.
        action_spec: of the env that it answers.

    Returns:
        Its output on the random features, for checks of your own.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, B, F)).astype(np.float32)
    shapes = jax.eval_shape(head.init, jax.random.key(0), x, None)
    variables = jax.tree.map(lambda v: 0.3 * rng.normal(size=v.shape).astype(np.float32), shapes)
    apply = jax.jit(head.apply)
    output: Any = apply(variables, x, None)

    _check_shapes(output)
    eager = head.apply(variables, x, None)
    _same(output, eager, "jit and eager differ")
    _same(apply(variables, x[1:2, 1:], None), output[1:2, 1:], "a row's output depends on the rows beside it")
    _check_scan(head, variables, x, output)
    if output.make_policy is not None:
        _check_policy(output, action_spec)
        _check_gradient(head, variables, x)
    if not isinstance(action_spec, Box):
        _check_masks(apply, variables, x, output, action_spec)
    return output


def _same(actual: Any, expected: Any, rule: str) -> None:
    structure = jax.tree.structure(actual), jax.tree.structure(expected)
    assert structure[0] == structure[1], f"{rule}: {structure[0]} is not {structure[1]}; is make_policy made anew?"
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5, err_msg=rule), actual, expected)


def _check_shapes(output: Any) -> None:
    assert isinstance(output, Output), f"a head returns flaxrl.Output, not {type(output).__name__}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(output):
        name = jax.tree_util.keystr(path)
        assert leaf.shape[:2] == (T, B), f"{name} has shape {leaf.shape}; [T, B, ...] = [{T}, {B}, ...] lead"
        assert leaf.dtype == jnp.float32, f"{name} is {leaf.dtype}; outputs are float32 whatever the head computes in"
    assert output.value is None or output.value.shape == (T, B), f"value has shape {output.value.shape}, not [T, B]"
    something = (output.value, output.q, output.policy_params)
    assert any(x is not None for x in something), "a head gives a policy, a value or q"
    whole = (output.policy_params is None) == (output.make_policy is None)
    assert whole, "policy_params and make_policy come together"


def _check_scan(head: nn.Module, variables: Any, x: Any, output: Output) -> None:
    """An Output is the output of a `lax.scan` over time."""
    _, rows = jax.lax.scan(lambda carry, row: (carry, head.apply(variables, row, None)), 0, x)
    _same(rows, output, "scanned over time")


@functools.partial(jax.jit, static_argnums=1)
def _ask(output: Output, draws: int) -> dict[str, Any]:
    """What the policy answers; `log_prob` is of the draws."""
    policy = output.policy
    actions = policy.sample(seed=jax.random.key(3), sample_shape=(draws,))
    mode = policy.mode()
    return {
        "draws": actions,
        "mode": mode,
        "log_prob": jax.vmap(policy.log_prob)(actions),
        "best": policy.log_prob(mode),
        "entropy": policy.entropy(),
        "kl": policy.kl_divergence(policy),
    }


@functools.partial(jax.jit, static_argnums=1)
def _expectations(output: Output, draws: int) -> dict[str, Any]:
    """Entropy, and KL to the policy of the next row of B, each with the terms whose mean over draws estimates it."""
    policy, other = output.policy, jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), output).policy
    actions = policy.sample(seed=jax.random.key(4), sample_shape=(draws,))
    log_prob = jax.vmap(policy.log_prob)(actions)
    ratio = log_prob - jax.vmap(other.log_prob)(actions)
    return {"entropy": (policy.entropy(), -log_prob), "KL": (policy.kl_divergence(other), ratio)}


@jax.jit
def _log_prob(output: Output, action: Any) -> Any:
    return output.policy.log_prob(action)


@jax.jit
def _log_prob_by_row(output: Output, action: Any) -> Any:
    make_policy = output.make_policy
    assert make_policy is not None
    return jax.vmap(jax.vmap(lambda p, a: make_policy(p).log_prob(a)))(output.policy_params, action)


def _check_policy(output: Output, spec: ActionSpec) -> None:
    said = _ask(output, 16)
    action, log_prob = said["draws"][0], said["log_prob"][0]
    for x, what in ((said["mode"], "mode"), (action, "a sample")):
        assert x.shape == (T, B, *spec.shape), f"{what} has shape {x.shape}; actions are {spec}"
        integer = jnp.issubdtype(x.dtype, jnp.integer)
        assert integer != isinstance(spec, Box), f"{what} is {x.dtype}; actions are {spec}"
        assert x.dtype == spec.dtype, f"{what} is {x.dtype}; the env's actions are stored as {np.dtype(spec.dtype)}"
    for x, what in ((log_prob, "log_prob"), (said["entropy"], "entropy")):
        assert x.shape == (T, B), f"{what} has shape {x.shape}, not [T, B]: one number a row"
        assert np.isfinite(x).all(), f"{what} is not finite"
    assert (np.std(said["draws"], axis=0) > 0).any(), "samples do not vary"
    if not isinstance(spec, Box):
        assert (np.asarray(said["best"]) >= np.max(said["log_prob"], axis=0) - 1e-5).all(), "a sample beats the mode"
    np.testing.assert_allclose(said["kl"], 0, atol=1e-5, err_msg="KL of a policy to itself")
    hash(output.make_policy)
    draws = 2000
    for name, (told, terms) in _expectations(output, draws).items():
        bound = 6 * np.std(terms, axis=0) / draws**0.5 + 1e-3
        assert told.shape == (T, B), f"{name} has shape {told.shape}, not [T, B]: one number a row"
        assert (np.abs(told - np.mean(terms, axis=0)) < bound).all(), (
            f"{name} is not the expectation that it stands for"
        )

    def near(x: Any, y: Any, how: str) -> None:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=f"log_prob of a policy {how}")

    near(_log_prob(output[:-1], action[:-1]), log_prob[:-1], "sliced in time")
    flat = jax.tree.map(lambda x: x.reshape(1, T * B, *x.shape[2:]), output)
    near(_log_prob(flat, action.reshape(1, T * B, *spec.shape)), log_prob.reshape(1, T * B), "flattened to [1, T*B]")
    near(_log_prob_by_row(output, action), log_prob, "taken row by row, as policies sample")


def _check_gradient(head: nn.Module, variables: Any, x: Any) -> None:
    def f(variables: Any) -> Any:
        output: Any = head.apply(variables, x, None)
        action = jax.lax.stop_gradient(output.policy.sample(seed=jax.random.key(5)))  # a Gaussian's mode has none
        return jnp.mean(output.policy.log_prob(action)) + jnp.mean(output.policy.entropy())

    grads = jax.tree.leaves(jax.jit(jax.grad(f))(variables))
    assert all(np.isfinite(g).all() for g in grads), "gradient of log_prob and entropy"
    assert any(np.any(g) for g in grads), "no gradient flows"


def _check_masks(apply: Any, variables: Any, x: Any, output: Output, spec: ActionSpec) -> None:
    """Partly masked rows, rows with one legal action, and rows with none, which count as all-legal."""
    sizes = (spec.n,) if isinstance(spec, Discrete) else spec.nvec if isinstance(spec, MultiDiscrete) else ()
    legal = np.random.default_rng(1).random((T, B, sum(sizes))) > 0.5
    start = 0
    for size in sizes:
        legal[..., start] |= ~legal[..., start : start + size].any(-1)
        start += size
    legal[0] = True
    _same(apply(variables, x, legal)[:1], output[:1], "an all-True mask changes something")
    empty = legal.copy()
    empty[1] = False
    masked: Any = apply(variables, x, empty)
    _same(masked[1:2], output[1:2], "a row without a legal action counts as all-legal")
    if masked.value is not None and output.value is not None:
        np.testing.assert_allclose(masked.value, output.value, rtol=1e-5, err_msg="the value is masked")
    if masked.make_policy is None:
        return
    partly = apply(variables, x, legal)
    said = _ask(partly, 200)
    for action, what in ((said["mode"][None], "the mode"), (said["draws"], "a sample")):
        assert _allowed(np.asarray(action), legal, sizes).all(), f"{what} is illegal"
    assert np.isfinite(said["entropy"]).all(), "entropy of masked rows"
    _check_illegal_log_prob(partly, legal, sizes, said["draws"][0])


def _allowed(action: np.ndarray, legal: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Whether each component of actions `[N, T, B, ...]` is legal."""
    parts = action.reshape(*action.shape[:3], len(sizes)) + np.cumsum((0, *sizes[:-1]))
    return np.take_along_axis(np.broadcast_to(legal, (len(action), *legal.shape)), parts, axis=-1)


def _check_illegal_log_prob(output: Output, legal: np.ndarray, sizes: tuple[int, ...], drawn: Any) -> None:
    """An action with one illegal component has probability 0."""
    shape = drawn.shape
    start = 0
    for i, size in enumerate(sizes):
        part = legal[..., start : start + size]
        action = np.array(drawn).reshape(T, B, len(sizes))
        action[..., i] = part.argmin(-1)
        illegal = ~part.all(-1)
        assert illegal.any()
        log_prob = np.asarray(_log_prob(output, action.reshape(shape)))
        assert (log_prob[illegal] == -np.inf).all(), "an illegal action has a probability"
        start += size

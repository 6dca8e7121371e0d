"""What every env must do.

Put your own through it: `check_jax_env(MyEnv())` or `check_host_env(lambda: MyHostEnv(num_envs=4))`. Both play seeded
random actions and fail with the broken rule; `steps` must be enough for an episode to end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxrl.envs.base import AutoReset, HostEnv, JaxEnv
from flaxrl.envs.spec import Discrete, EnvSpec, MultiDiscrete, env_action
from flaxrl.types import FIRST, LAST, MID, Timestep

Rows = list[Timestep]


def check_jax_env(env: JaxEnv, *, steps: int = 40, batch: int = 4, varies: bool = True) -> Rows:
    """Runs a JaxEnv through AutoReset, jitted, and checks the whole contract.

    Args:
        env: the env.
        steps: rows after the first.
        batch: envs at once.
        varies: episodes depend on the seed (False for an env without randomness).

    Returns:
        The rows it played, for checks of your own.
    """
    auto = AutoReset(env)
    traces: list[None] = []

    def traced_step(state: Any, action: Any, keys: Any) -> Any:
        traces.append(None)
        return auto.step(state, action, keys)

    reset, step = jax.jit(auto.reset), jax.jit(traced_step)

    def play(seed: int, actions: np.ndarray, other: np.ndarray) -> Rows:
        state = reset(_keys(seed, batch))
        rows = [_numpy(state.timestep)]
        for t in range(steps):
            action = _where_last(rows[-1], other[t], actions[t])
            state = step(state, jnp.asarray(action), _keys(seed + 1000 + t, batch))
            rows.append(_numpy(state.timestep))
        return rows

    rows = _check(env.spec, play, steps, batch, varies)
    assert len(traces) == 1, "step compiled anew: some leaf changes its dtype or weak type between reset and step"
    return rows


def check_host_env(
    make: Callable[[], HostEnv], *, steps: int = 40, varies: bool = True, life_loss: bool = False
) -> Rows:
    """Checks a HostEnv against the whole contract.

    Args:
        make: builds the env, with at least 2 envs in its batch.
        steps: rows after the first.
        varies: episodes depend on the seed.
        life_loss: discount may be 0 on MID rows.

    Returns:
        The rows it played.
    """
    env = make()
    spec, batch = env.spec, env.num_envs
    kept: list[tuple[Timestep, Timestep]] = []

    def play(seed: int, actions: np.ndarray, other: np.ndarray) -> Rows:
        rows = [env.reset(seed)]
        copies = [_numpy(rows[0])]
        for t in range(steps):
            rows.append(env.step(env_action(spec.action, _where_last(copies[-1], other[t], actions[t]))))
            copies.append(_numpy(rows[-1]))
        kept.extend(zip(rows, copies, strict=True))
        return copies

    rows = _check(spec, play, steps, batch, varies, life_loss)
    for row, copy in kept:
        _assert_same(row, copy, "a row changed after it was answered: rows belong to the caller")
    for leaf in jax.tree.leaves(kept[-1][0]):
        assert isinstance(leaf, np.ndarray), "host rows are numpy arrays"
    _check_rows_writable(make, rows, steps)
    env.close()
    env.close()
    return rows


def _check_rows_writable(make: Callable[[], HostEnv], rows: Rows, steps: int) -> None:
    """A caller that overwrites its rows must not disturb a second env, nor this one's next answers."""
    env = make()
    actions = _actions(env.spec, steps, env.num_envs)
    row = env.reset(0)
    for t in range(steps):
        _assert_same(row, rows[t], "a new env, or one whose rows were overwritten, answers otherwise")
        for leaf in jax.tree.leaves(row):
            leaf[...] = 0
        row = env.step(env_action(env.spec.action, actions[t]))
    env.close()


def _check(spec: EnvSpec, play: Callable, steps: int, batch: int, varies: bool, life_loss: bool = False) -> Rows:
    actions = _actions(spec, steps, batch)
    rows = play(0, actions, actions)
    check_rows(spec, rows, life_loss)
    again = play(0, actions, actions)
    ignored = play(0, actions, _actions(spec, steps, batch, seed=9))
    for t in range(steps + 1):
        _assert_same(again[t], rows[t], f"row {t}: the same seed and actions gave another result")
        _assert_same(ignored[t], rows[t], f"row {t}: an action given on a LAST row was not ignored")
    if varies:
        same = np.broadcast_to(actions[:, :1], actions.shape)
        first, second = play(0, same, same), play(100, same, same)
        assert not _same(first, second), "another seed gave the same rows"
        envs = [jax.tree.map(lambda x, i=i: x[i], first) for i in range(batch)]
        assert not any(_same(envs[0], e) for e in envs[1:]), "two envs of a batch played the same episodes"
    return rows


def check_rows(spec: EnvSpec, rows: Rows, life_loss: bool = False) -> None:
    """Checks consecutive answers, from a reset on, against the episode rule and the spec."""
    assert np.all(rows[0].step_type == FIRST), "a reset answers FIRST rows"
    assert any(np.any(r.step_type == LAST) for r in rows), "no episode ended: give more steps"
    previous = None
    for t, row in enumerate(rows):
        _check_types(spec, row, t)
        first, last = row.step_type == FIRST, row.step_type == LAST
        assert np.all(first | last | (row.step_type == MID)), f"row {t}: unknown step type"
        if previous is not None:
            np.testing.assert_array_equal(first, previous.step_type == LAST, f"row {t}: FIRST answers LAST, only")
            length = np.where(first, 0, previous.episode_length + 1)
            total = np.where(first, 0, previous.episode_return + row.reward)
            np.testing.assert_array_equal(row.episode_length, length, f"row {t}: episode_length")
            np.testing.assert_allclose(row.episode_return, total, 1e-5, 1e-5, err_msg=f"row {t}: episode_return")
        for name, value in (("reward", 0), ("discount", 1), ("episode_return", 0), ("episode_length", 0)):
            assert np.all(getattr(row, name)[first] == value), f"row {t}: {name} must be {value} on FIRST"
        assert np.all((row.discount == 0) | (row.discount == 1)), f"row {t}: discount is 0 or 1, gamma is the loss's"
        assert life_loss or np.all(row.discount[~last] == 1), f"row {t}: discount 0 without an episode end"
        previous = row


def _check_types(spec: EnvSpec, row: Timestep, t: int) -> None:
    batch = row.step_type.shape[0]

    def check(want: Any, x: Any) -> None:
        assert x.shape == (batch, *want.shape), f"row {t}: observation {x.shape}, spec {want}"
        assert x.dtype == np.dtype(want.dtype), f"row {t}: observation {x.dtype}, spec {want}"
        assert x.dtype != np.float64, f"row {t}: float64 observation"

    jax.tree.map(check, spec.observation, row.observation)
    dtypes = {
        "reward": np.float32,
        "discount": np.float32,
        "step_type": np.int8,
        "episode_return": np.float32,
        "episode_length": np.int32,
    }
    for name, dtype in dtypes.items():
        x = getattr(row, name)
        assert x.shape == (batch,) and x.dtype == dtype, f"row {t}: {name} is {x.dtype} {x.shape}"
    assert (row.action_mask is not None) == spec.action_mask, f"row {t}: action mask against the spec"
    if row.action_mask is not None:
        assert row.action_mask.dtype == bool and row.action_mask.shape == (batch, spec.mask_size), f"row {t}: mask"


def _actions(spec: EnvSpec, steps: int, batch: int, seed: int = 1) -> np.ndarray:
    """Random actions `[T, B, ...]`."""
    random = np.random.default_rng(seed)
    if isinstance(spec.action, Discrete):
        return random.integers(spec.action.n, size=(steps, batch)).astype(spec.action.dtype)
    if isinstance(spec.action, MultiDiscrete):
        return random.integers(spec.action.nvec, size=(steps, batch, len(spec.action.nvec))).astype(spec.action.dtype)
    low, high = np.clip(spec.action.low, -10, 10), np.clip(spec.action.high, -10, 10)
    return random.uniform(low, high, (steps, batch, *spec.action.shape)).astype(spec.action.dtype)


def _where_last(row: Timestep, on_last: np.ndarray, elsewhere: np.ndarray) -> np.ndarray:
    last = (row.step_type == LAST).reshape(-1, *[1] * (elsewhere.ndim - 1))
    return np.where(last, on_last, elsewhere)


def _keys(seed: int, batch: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), batch)


def _numpy(row: Timestep) -> Timestep:
    return jax.tree.map(lambda x: np.array(x, copy=True), row)


def _same(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


def _assert_same(a: Any, b: Any, message: str) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, message), a, b)

"""Running mean and variance by hand and against numpy; observations normalised by them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl.errors import ConfigError
from flaxrl.models.normalization import MAX_COUNT, STATISTICS, Moments, Normalizer

RANDOM = np.random.default_rng(0)


def seen(moments: Moments, *batches: Any, mask: Any = None) -> Moments:
    """`moments` after some batches, in one compiled function."""
    merge = jax.jit(lambda m, x, mask: m.merged(x, mask))
    for x in batches:
        moments = merge(moments, jnp.asarray(x, jnp.float32), mask)
    return moments


def test_worked_sums():
    """[1, 3]: mean 2, variance 1. Then [5, 6, 7, 8]: mean 6.5, variance 1.25.

    Together: weight 4/6, delta 4.5, mean 2 + 3 = 5, variance 1/3 * 1 + 2/3 * (1.25 + 1/3 * 20.25) = 17/3, which is
    ((4^2 + 2^2) + (0 + 1 + 4 + 9)) / 6.
    """
    first = seen(Moments.start(), [1.0, 3.0])
    assert (float(first.count), float(first.mean), float(first.variance)) == (2.0, 2.0, 1.0)
    both = seen(first, [[5.0, 6.0], [7.0, 8.0]])
    assert (float(both.count), float(both.mean)) == (6.0, 5.0)
    assert float(both.variance) == pytest.approx(17 / 3, rel=1e-6)


def test_nothing_seen_changes_nothing():
    start = Moments.start((2,))
    assert start.deviation.tolist() == [1.0, 1.0]
    same = seen(start, np.full((3, 2), 7.0), mask=jnp.zeros(3, bool))
    jax.tree.map(np.testing.assert_array_equal, same, start)


def test_many_batches_are_one():
    """Batches of different sizes, means and spreads, elements of different scale."""
    scale = np.array([[1e-4, 1.0, 100.0]])
    batches = [scale * (i / 10 + RANDOM.normal(size=(1 + 7 * i, 3))) for i in range(20)]
    found = seen(Moments.start((3,)), *batches)
    rows = np.concatenate(batches).astype(np.float32).astype(np.float64)
    assert float(found.count) == len(rows) == 20 + 7 * 190
    np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.variance, rows.var(0), rtol=1e-5)


def test_mask_and_numbers_that_are_not_finite_leave_rows_out():
    x = RANDOM.normal(size=(4, 5, 2)).astype(np.float32)
    mask = RANDOM.uniform(size=(4, 5)) < 0.7
    mask[0, 0] = mask[1, 1] = mask[2, 2] = True
    x[~mask] = np.nan
    x[0, 0, 1], x[1, 1, 0] = np.inf, np.nan
    found = seen(Moments.start((2,)), x, mask=jnp.asarray(mask))
    rows = x[mask & np.isfinite(x).all(-1)]
    assert float(found.count) == len(rows) == mask.sum() - 2
    np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.variance, rows.var(0), rtol=1e-5)


def test_squares_that_overflow_skip_the_batch():
    before = seen(Moments.start(), [1.0, 3.0])
    jax.tree.map(np.testing.assert_array_equal, seen(before, [1.0, 1e30]), before)
    assert float(seen(before, [1.0, 1e30], [2.0]).count) == 3


def test_a_large_mean_keeps_its_digits():
    """10,000 small steps of a mean near 1000, each less than half of float32's spacing there (3e-5)."""
    batches = 1000 + RANDOM.normal(size=(10_000, 4)).astype(np.float32)
    start = Moments(*map(jnp.float32, (2**22, 999.9, 0, 1, 0)))
    found = jax.lax.scan(lambda m, x: (m.merged(x), None), start, jnp.asarray(batches))[0]
    weight, total = 2.0**22, 40_000
    mean = (weight * float(np.float32(999.9)) + batches.sum(dtype=np.float64)) / (weight + total)
    assert abs(float(found.mean) + float(found.mean_rest) - mean) < 1e-6
    share = total / (weight + total)
    delta = batches.mean(dtype=np.float64) - float(np.float32(999.9))
    variance = 1 - share + share * batches.astype(np.float64).var() + share * (1 - share) * delta**2
    assert float(found.variance) == pytest.approx(variance, rel=1e-6)
    single = seen(Moments.start(), 1e4 + RANDOM.normal(size=(64, 64)))
    assert float(single.variance) == pytest.approx(1.0, abs=0.1)


def test_the_count_ends_where_float32_stops_counting():
    """Beyond 2**24 rows a new row still counts as one, and spread and mean still follow."""
    start = Moments(*map(jnp.float32, (MAX_COUNT - 1, 0, 0, 1, 0)))
    rows = np.where(np.arange(1 << 16) % 2, 3.0, -1.0).astype(np.float32)  # mean 1, variance 4
    found = jax.lax.scan(lambda m, x: (m.merged(x), None), start, jnp.asarray(rows.reshape(1 << 12, 16)))[0]
    assert float(found.count) == MAX_COUNT
    kept = (1 - 16 / (MAX_COUNT + 16)) ** (1 << 12)
    assert float(found.mean) == pytest.approx(1 - kept, rel=1e-5)
    assert float(found.variance) == pytest.approx(kept + (1 - kept) * 4 + kept * (1 - kept), rel=1e-5)


def test_a_constant_element_is_zero():
    found = seen(Moments.start((1,)), *[np.full((17, 1), 1234.5678)] * 30)
    assert found.mean[0] == np.float32(1234.5678) and found.variance[0] == 0


def observed(normalizer: Normalizer, *batches: Any) -> tuple[Any, Any]:
    """Variables at the start, and after some batches `[T, B, ...]`."""
    rows = jax.tree.map(lambda x: x[0], batches[0])
    start = variables = normalizer.init({}, rows)
    for batch in batches:
        _, variables = normalizer.apply(variables, batch, method="observe", mutable=[STATISTICS])
    return start, variables


def test_a_tree_leaf_by_leaf():
    """Float leaves by their own statistics, bytes as they are; clipped; before the first rows as they are."""
    random = np.random.default_rng(1)
    batch = {
        "joints": {"angle": random.normal(3, 2, (50, 4, 2)).astype(np.float32)},
        "height": random.normal(-5, 0.1, (50, 4)).astype(np.float16),
        "image": random.integers(256, size=(50, 4, 3, 3)).astype(np.uint8),
    }
    batch["joints"]["angle"][0, 0, 0] = 60.0
    rows = jax.tree.map(lambda x: x.reshape(200, *x.shape[2:]), batch)
    start, variables = observed(Normalizer(clip=10.0), batch)
    assert set(variables[STATISTICS]) == {"joints/angle", "height"}
    fresh = Normalizer(clip=None).apply(start, rows)
    jax.tree.map(np.testing.assert_array_equal, fresh, rows)
    out: Any = Normalizer(clip=10.0).apply(variables, rows)
    assert out["image"] is rows["image"]
    for name, x in (("angle", rows["joints"]["angle"]), ("height", rows["height"])):
        got, x = (out["joints"]["angle"] if name == "angle" else out["height"]), x.astype(np.float64)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, np.clip((x - x.mean(0)) / x.std(0), -10, 10), rtol=1e-4, atol=1e-4)
    assert out["joints"]["angle"][0, 0] == 10.0
    assert Normalizer(clip=None).apply(variables, rows)["joints"]["angle"][0, 0] > 10.5  # type: ignore[index]


def test_only_observe_changes_the_statistics():
    x = RANDOM.normal(size=(5, 4, 3)).astype(np.float32)
    _, variables = observed(Normalizer(), x)
    _, after = Normalizer().apply(variables, x[0] + 100, mutable=[STATISTICS])
    jax.tree.map(np.testing.assert_array_equal, after, variables)


def test_nothing_to_normalise_is_refused():
    with pytest.raises(ConfigError, match=r"normalize_observations = True has nothing to normalise: .* is uint8"):
        Normalizer().init({}, np.zeros((1, 84, 84, 4), np.uint8))


def test_two_leaves_of_one_name_are_refused():
    """Else the statistics of the second would take the place of the first's; uint8 leaves count, which would too."""
    for x in (np.ones((1, 2), np.float32), np.ones((1, 2), np.uint8)):
        with pytest.raises(ConfigError, match=r"\['a'\]\['b'\] and \['a/b'\] would both be named 'a/b'"):
            Normalizer().init({}, {"a": {"b": np.ones((1, 2), np.float32)}, "a/b": x})

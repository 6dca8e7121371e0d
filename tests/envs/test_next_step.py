import numpy as np
import pytest

from flaxrl.envs.next_step import NextStepRows
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.types import FIRST, LAST, MID


def test_rows_of_a_termination_and_a_truncation():
    rows = NextStepRows(EnvSpec(ArraySpec((1,)), Discrete(2)), 2)
    yes, no = True, False
    first = rows.first(np.zeros((2, 1)))
    middle = rows.next(np.ones((2, 1)), np.array([1, 2]), np.array([no, no]), np.array([no, no]))
    # env 0 terminates (3 + 1 = 4 in 2 steps), env 1 is truncated (5 + 2 = 7)
    last = rows.next(np.ones((2, 1)), np.array([3, 5]), np.array([yes, no]), np.array([no, yes]))
    # what a vector env answers on the reset step is not experience, whatever it holds
    again = rows.next(np.ones((2, 1)), np.array([9, 9]), np.array([no, no]), np.array([no, no]))
    after = rows.next(np.ones((2, 1)), np.array([1, 2]), np.array([no, no]), np.array([no, no]))
    got = [
        (
            r.step_type.tolist(),
            r.reward.tolist(),
            r.discount.tolist(),
            r.episode_return.tolist(),
            r.episode_length.tolist(),
        )
        for r in (first, middle, last, again, after)
    ]
    assert got == [
        ([FIRST, FIRST], [0, 0], [1, 1], [0, 0], [0, 0]),
        ([MID, MID], [1, 2], [1, 1], [1, 2], [1, 1]),
        ([LAST, LAST], [3, 5], [0, 1], [4, 7], [2, 2]),
        ([FIRST, FIRST], [0, 0], [1, 1], [0, 0], [0, 0]),
        ([MID, MID], [1, 2], [1, 1], [1, 2], [1, 1]),
    ]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_observations_carry_the_dtype_of_the_spec(dtype):
    rows = NextStepRows(EnvSpec({"a": ArraySpec((3,)), "b": ArraySpec((), np.uint8)}, Discrete(2)), 1)
    row = rows.first({"b": np.array([7]), "a": np.ones((1, 3), dtype)})
    assert row.observation["a"].dtype == np.float32 and row.observation["b"].dtype == np.uint8


def test_a_reset_in_the_middle_forgets_the_running_episode():
    rows = NextStepRows(EnvSpec(ArraySpec((1,)), Discrete(2)), 1)
    rows.first(np.zeros((1, 1)))
    rows.next(np.ones((1, 1)), np.array([5.0]), np.array([False]), np.array([False]))
    row = rows.first(np.zeros((1, 1)))
    assert (row.step_type, row.episode_return, row.episode_length) == (FIRST, 0, 0)
    row = rows.next(np.ones((1, 1)), np.array([2.0]), np.array([False]), np.array([False]))
    assert (row.step_type, row.episode_return, row.episode_length) == (MID, 2, 1)

"""Blocks that actors fill together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flaxrl.trainers.blocks import InputBlocks, aligned_empty
from flaxrl.types import AgentInput


def _row(batch: int = 2) -> AgentInput:
    return AgentInput(observation={"a": np.zeros((batch, 3), np.uint8)}, step_type=np.zeros(batch, np.int8))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (7, 1, 33), (0, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, bool, np.float32])
def test_memory_is_aligned(shape, dtype):
    for _ in range(8):
        x = aligned_empty(shape, dtype)
        assert x.shape == shape and x.dtype == dtype and x.flags.c_contiguous and x.flags.writeable
        assert x.ctypes.data % 64 == 0 or x.size == 0


def test_parts_are_columns_of_one_block():
    blocks = InputBlocks(5, 3)
    taken = [blocks.take(part, _row()) for part in (2, 0, 1)]
    block = taken[0][0]
    assert block.observation["a"].shape == (5, 6, 3) and block.step_type.shape == (5, 6)
    assert block.last_action is None and block.observation["a"].dtype == np.uint8
    for (other, own), part in zip(taken, (2, 0, 1), strict=True):
        assert other is block
        own.observation["a"][:] = part
        own.step_type[:] = part
    assert block.step_type.tolist() == [[0, 0, 1, 1, 2, 2]] * 5
    assert block.observation["a"][0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_part_may_run_ahead():
    blocks = InputBlocks(2, 2)
    first, second = blocks.take(0, _row())[0], blocks.take(0, _row())[0]
    assert blocks.take(1, _row())[0] is first and blocks.take(1, _row())[0] is second


def test_each_block_is_new_memory_and_none_is_kept():
    blocks = InputBlocks(2, 2)
    taken = [blocks.take(part, _row())[0].step_type for _ in range(4) for part in range(2)][::2]
    assert not any(np.shares_memory(x, y) for x, y in itertools.combinations(taken, 2))
    assert not blocks._open

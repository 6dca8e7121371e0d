"""Host memory of a batch's inputs, which several actors fill, each its own columns."""

from __future__ import annotations

import math
import threading
from typing import Any

import jax
import numpy as np

from flaxrl.types import AgentInput

_ALIGNMENT = 64  # bytes; XLA takes host memory aligned like this as a CPU array without copying it


class InputBlocks:
    """One block `[T+1, B, ...]` a batch: what actors write there needs no stacking and no joining afterwards.

    Each block is new memory, which nobody writes to once its actors are done: on a CPU the learner's arrays alias it.
    The n-th block that a part takes is the same memory as the n-th of every other part.

    Args:
        length: rows of a block, T + 1.
        parts: actors that share a block.
    """

    def __init__(self, length: int, parts: int):
        self._length, self._parts = length, parts
        self._lock = threading.Lock()
        self._taken = [0] * parts
        self._open: dict[int, tuple[AgentInput, int]] = {}  # number -> block, parts that are yet to take it

    def take(self, part: int, row: AgentInput) -> tuple[AgentInput, AgentInput]:
        """The next block of a part.

        Args:
            part: 0 to parts - 1.
            row: what one row of this part holds, numpy leaves `[b, ...]`; b is the same for all parts.

        Returns:
            The block, leaves `[T+1, parts * b, ...]`, and the part's own columns of it, `[T+1, b, ...]`.
        """
        with self._lock:
            number = self._taken[part]
            self._taken[part] += 1
            block, missing = self._open.pop(number, (None, self._parts))
            if block is None:
                block = jax.tree.map(
                    lambda x: aligned_empty((self._length, self._parts * x.shape[0], *x.shape[1:]), x.dtype), row
                )
            if missing > 1:
                self._open[number] = (block, missing - 1)
        width = row.step_type.shape[0]
        return block, jax.tree.map(lambda x: x[:, part * width : (part + 1) * width], block)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """`np.empty`, aligned so that a device on the host can take it as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)

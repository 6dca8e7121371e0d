"""Golden vectors: formulas computed in float64 from the papers, and their expansion by the episode rule."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest

from flaxrl.types import FIRST, LAST, MID


@functools.cache
def _file() -> list[dict[str, Any]]:
    return json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())["vectors"]


def vector(name: str) -> dict[str, Any]:
    """The vector of that id: `inputs`, `expected`, `rtol_f32`, `atol_f32`."""
    return next(v for v in _file() if v["id"] == name)


def vectors(kind: str) -> list[Any]:
    """All vectors of a kind, as parameters of a test named by their ids."""
    found = [pytest.param(v, id=v["id"]) for v in _file() if v["kind"] == kind]
    assert found, f"no golden vector of kind {kind!r}"
    return found


def close(actual: Any, expected: Any, vector: dict[str, Any]) -> None:
    """Asserts equality within the vector's float32 tolerances."""
    np.testing.assert_allclose(actual, expected, rtol=vector["rtol_f32"], atol=vector["atol_f32"])


class Expanded(NamedTuple):
    """A vector's transitions as rows of one env, with every final observation as a row of its own.

    Attributes:
        step_type: int8 `[T+1, 1]`.
        value: float32 `[T+1, 1]`; on a LAST row, of the final observation.
        discount: float32 `[T, 1]`, of the env (0 where terminated), without gamma; 0 on masked rows.
        source: int `[T]`, the transition that a row is, or -1 on inserted rows (the masked ones).
    """

    step_type: np.ndarray
    value: np.ndarray
    discount: np.ndarray
    source: np.ndarray

    def rows(self, x: Any, fill: float = 0.0) -> np.ndarray:
        """One number a transition -> float32 `[T, 1]`, with `fill` on masked rows."""
        padded = np.append(np.asarray(x, np.float32), np.float32(fill))
        return padded[self.source][:, None]

    def transitions(self, x: Any) -> np.ndarray:
        """Numbers `[T, 1]` -> those of the unmasked rows, in order."""
        return np.asarray(x)[self.source >= 0, 0]


def expand(inputs: dict[str, Any]) -> Expanded:
    """Rows of a vector that has `v`, `v_next`, `terminated` and `truncated`: see Expanded."""
    v, v_next = inputs["v"], inputs["v_next"]
    step_type, value, discount, source = [FIRST], [v[0]], [], []
    for t, terminated in enumerate(inputs["terminated"]):
        over = terminated or inputs["truncated"][t]
        more = t + 1 < len(v)
        assert over or not more or v_next[t] == v[t + 1], "a running episode's next value is the next row's"
        source.append(t)
        discount.append(0.0 if terminated else 1.0)
        step_type.append(LAST if over else MID)
        value.append(v_next[t])
        if over and more:
            source.append(-1)
            discount.append(0.0)
            step_type.append(FIRST)
            value.append(v[t + 1])
    return Expanded(
        np.asarray(step_type, np.int8)[:, None],
        np.asarray(value, np.float32)[:, None],
        np.asarray(discount, np.float32)[:, None],
        np.asarray(source),
    )

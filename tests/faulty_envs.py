"""Envs that go wrong on order, for the tests of the Trainer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flaxrl.envs.fake import HostScripted
from flaxrl.types import Timestep


@dataclass(kw_only=True)
class NaNFrom(HostScripted):
    """HostScripted whose rewards are NaN from the `nan_from`-th `step` call since `reset` on."""

    nan_from: int = 100

    def step(self, action: np.ndarray) -> Timestep:
        answer = super().step(action)
        if self._calls < self.nan_from:
            return answer
        return answer.replace(reward=np.full_like(answer.reward, np.nan))

"""Pictures of gymnasium envs, in any mode, here or in worker processes."""

import contextlib

import numpy as np
import pytest

from flaxrl.errors import ConfigError
from tests.envs.test_gymnasium import MODES, make


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_show_each_row_the_last_too(mode, workers):
    env = make("Drawn", autoreset=mode, workers=workers)
    with pytest.raises(RuntimeError, match=r"before Gymnasium.prepare_render and reset"):
        env.render()
    env.prepare_render()
    with contextlib.closing(env):
        timestep, times = env.reset(0), []
        for _ in range(6):
            picture = env.render()
            assert (picture.dtype, picture.shape) == (np.uint8, (4, 5, 3))
            times.append((int(picture[0, 0, 0]), int(timestep.observation[0, 0])))
            timestep = env.step(np.zeros(2, int))
    assert times == [(t, t) for t in (0, 1, 2, 3, 0, 1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Drawn", "kwargs": {"ends_at": 0}}, "cannot be drawn: ImportError: no brush is installed"),
        (MODES["own"], "Gymnasium.vectorized = True draws nothing"),
        ({"id": "FrozenLake-v1", "kwargs": {"is_slippery": 3, "no": 1}}, "cannot be drawn: TypeError"),
    ],
)
def test_what_draws_nothing_is_told_when_asked(fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields).prepare_render()


@pytest.mark.filterwarnings("ignore:.*render_mode:UserWarning")
def test_an_env_without_pixels_draws_nothing():
    with pytest.raises(ConfigError, match="draws nothing: its render_modes have no 'rgb_array'"):
        make("Clock").prepare_render()

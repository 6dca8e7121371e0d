import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl import build
from flaxrl.envs.base import AutoReset
from flaxrl.envs.fake import Counting, HostScripted, Memory, Scripted
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID


def _player(env, batch=64):
    """`play(policy, steps)` -> rows `[T+1, B]`; a policy maps observations `[B, ...]` to actions `[B]`. One compile."""
    auto = AutoReset(env)
    reset, step = jax.jit(auto.reset), jax.jit(auto.step)

    def play(policy, steps):
        state = reset(jax.random.split(jax.random.key(0), batch))
        rows = [state.timestep]
        for _ in range(steps):
            action = jnp.asarray(policy(np.asarray(state.timestep.observation)), jnp.int32)
            state = step(state, action, jax.random.split(jax.random.key(len(rows)), batch))
            rows.append(state.timestep)
        return jax.tree.map(lambda *x: np.stack(x), *rows)

    return play


def _shown(observation):
    return np.argmax(observation[:, 1:], -1)


def _zeros(observation):
    return np.zeros(len(observation))


def _returns(rows):
    return rows.episode_return[rows.step_type == LAST]


@pytest.mark.parametrize("time_limit", [False, True])
def test_scripted_pays_one_for_each_right_action(time_limit):
    play = _player(Scripted(episode_length=4, time_limit=time_limit))
    rows = play(_shown, 9)
    assert rows.step_type[:, 0].tolist() == [FIRST, MID, MID, MID, LAST, FIRST, MID, MID, MID, LAST]
    assert np.all(rows.discount[[4, 9]] == (1 if time_limit else 0))
    np.testing.assert_array_equal(_returns(rows), 4)
    np.testing.assert_array_equal(_returns(play(lambda o: (_shown(o) + 1) % 3, 9)), 0)
    np.testing.assert_array_equal(rows.observation[:, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])


def test_scripted_masks():
    play = _player(Scripted(mask="partial"))
    partial = play(_shown, 6)
    shown = np.argmax(partial.observation[..., 1:], -1)
    np.testing.assert_array_equal(partial.action_mask, np.arange(3) != (shown[..., None] + 1) % 3)
    np.testing.assert_array_equal(_returns(partial), 5)
    illegal = play(lambda o: (_shown(o) + 1) % 3, 5)
    np.testing.assert_array_equal(_returns(illegal), -5)
    on_last = _player(Scripted(mask="empty_on_last"))(_shown, 6)
    np.testing.assert_array_equal(on_last.action_mask.any(-1), on_last.step_type != LAST)
    assert not _player(Scripted(mask="empty"))(_shown, 1).action_mask.any()
    assert Scripted().reset(jax.random.key(0))[2] is None


def test_counting_pays_the_number_of_the_step():
    rows = _player(Counting())(_zeros, 20)
    np.testing.assert_array_equal(rows.reward[1:, 0], np.arange(20))
    np.testing.assert_array_equal(rows.observation[:, 0, 0], np.arange(21))
    rows = _player(Counting(episode_length=3))(_zeros, 7)
    assert rows.reward[:, 0].tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    np.testing.assert_array_equal(_returns(rows), 3)


def test_memory_shows_the_cue_once_and_pays_for_recalling_it():
    rows = _player(Memory(length=3), batch=400)(_zeros, 4)
    cue = np.argmax(rows.observation[0, :, :2], -1)
    assert rows.step_type[:, 0].tolist() == [FIRST, MID, MID, MID, LAST]
    assert np.all(rows.observation[0, :, :2].sum(-1) == 1) and not rows.observation[1:, :, :2].any()
    np.testing.assert_array_equal(rows.observation[:, 0, 2], [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(rows.reward[4], np.where(cue == 0, 1, -1))
    assert not rows.reward[:4].any()
    # whatever is answered without the cue has mean 0: 4 standard errors of 400 fair coins are 0.2
    assert abs(_returns(rows).mean()) < 0.2


@pytest.mark.parametrize("image", [False, True])
def test_host_scripted_plays_the_same_game(image):
    env = HostScripted(num_envs=4, episode_length=4, image=image)
    row, returns = env.reset(0), []
    for _ in range(14):
        if image:
            bands = row.observation[:, 0, 83, [14, 42, 70]]
            assert np.all(np.sort(bands, -1) == [0, 0, 255])
            action = bands.argmax(-1)
        else:
            action = row.observation[:, 1:].argmax(-1)
        row = env.step(action)
        returns += row.episode_return[row.step_type == LAST].tolist()
    assert returns == [4.0] * 12


def test_host_scripted_counts_executed_actions_over_episodes():
    env = HostScripted(num_envs=1, episode_length=3, reward="count")
    env.reset(0)
    rows = [env.step(np.zeros(1, int)) for _ in range(8)]
    assert [(int(r.step_type[0]), float(r.reward[0])) for r in rows] == [
        (MID, 0), (MID, 1), (LAST, 2), (FIRST, 0), (MID, 3), (MID, 4), (LAST, 5), (FIRST, 0),
    ]  # fmt: skip


def test_host_scripted_faults():
    env = HostScripted(num_envs=2, fail_at=3, nan_at=2)
    env.reset(0)
    assert np.isfinite(env.step(np.zeros(2, int)).reward).all()
    assert np.isnan(env.step(np.zeros(2, int)).reward).tolist() == [True, False]
    with pytest.raises(RuntimeError, match="fails at step 3"):
        env.step(np.zeros(2, int))
    env.close()
    with pytest.raises(RuntimeError, match=r"before HostScripted\.reset"):
        env.step(np.zeros(2, int))


def test_a_float64_simulator_is_fed_as_float32():
    env = HostScripted(num_envs=2, float64=True)
    assert env.spec.observation.dtype == np.float32
    assert env.reset(0).observation.dtype == np.float32
    assert env.step(np.zeros(2, int)).observation.dtype == np.float32
    assert env._observe().dtype == np.float64


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("scripted", {"mask": "partail"}, "mask = 'partail' is unknown; did you mean 'partial'"),
        ("scripted", {"episode_length": 0}, "episode_length = 0 must be >= 1"),
        ("counting", {"num_actions": 1}, "num_actions = 1 must be >= 2"),
        ("memory", {"length": 0}, "length = 0 must be >= 1"),
        ("host_scripted", {"reward": "sum"}, "reward = 'sum' is unknown"),
        ("host_scripted", {"image": True, "float64": True}, "drop one"),
    ],
)
def test_wrong_fields(name, fields, message):
    with pytest.raises(ConfigError, match=message):
        build.build(build.config_for(name, **fields), num_envs=2)

import gymnasium
import jax
import numpy as np
import pytest

from flaxrl import build
from flaxrl.envs.gymnasium import Gymnasium
from flaxrl.envs.spec import ArraySpec, Box, Discrete, MultiDiscrete, env_action
from flaxrl.errors import ConfigError
from flaxrl.types import FIRST, LAST, MID

MODULE = "tests.envs.gymnasium_envs"
MODES = {
    "next_step": {},
    "same_step": {"autoreset": "same_step"},
    "disabled": {"autoreset": "disabled"},
    "own": {"vectorized": True, "id": f"{MODULE}:TestSameStep-v0"},
}


def make(name: str = "Clock", num_envs: int = 2, **fields) -> Gymnasium:
    return Gymnasium(**{"num_envs": num_envs, "id": f"{MODULE}:Test{name}-v0"} | fields)


def play(env: Gymnasium, actions, seed: int = 0):
    """Rows from a reset on, stacked `[T+1, B, ...]`."""
    found = [env.reset(seed), *(env.step(env_action(env.spec.action, np.asarray(a))) for a in actions)]
    env.close()
    return jax.tree.map(lambda *x: np.stack(x), *found)


# -- the episode rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "workers"), [(m, w) for m in MODES for w in (0, 2) if not (m == "own" and w)])
def test_a_time_limit_in_every_autoreset_mode(mode, workers):
    """Time limit 3: rows 0 1 2 3 0 1 2 3 ..., the 3 is LAST with discount 1, and nothing is learned from (3 -> 0)."""
    found = play(make(num_envs=3, workers=workers, **MODES[mode]), np.zeros((11, 3), int))
    time, secret = found.observation[..., 0], found.observation[..., 1]
    expected = np.broadcast_to(np.arange(12)[:, None] % 4, (12, 3))
    np.testing.assert_array_equal(time, expected)
    np.testing.assert_array_equal(found.step_type, np.take([FIRST, MID, MID, LAST], expected))
    np.testing.assert_array_equal(found.reward, expected)
    np.testing.assert_array_equal(found.discount, 1)
    np.testing.assert_array_equal(found.episode_return, np.take([0, 1, 3, 6], expected))
    np.testing.assert_array_equal(found.episode_length, expected)
    for start in (0, 4, 8):  # an episode is one from its FIRST row to its LAST, no row belongs to a neighbour
        np.testing.assert_array_equal(secret[start : start + 4], np.broadcast_to(secret[start], (4, 3)))
    assert len(np.unique(secret[::4])) > 6


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize(("ends_at", "discount"), [(2, 0), (3, 0), (5, 1)])
def test_termination_comes_before_the_time_limit(mode, ends_at, discount):
    found = play(make(kwargs={"ends_at": ends_at}, autoreset=mode), np.zeros((4, 2), int))
    last = min(ends_at, 3)
    assert found.step_type[last].tolist() == [LAST, LAST] and found.observation[last, :, 0].tolist() == [last, last]
    assert found.discount[last].tolist() == [discount, discount]


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_envs_that_end_at_different_times(mode):
    """CartPole played at random: an episode is the same as where the env runs alone."""
    actions = np.random.default_rng(0).integers(2, size=(120, 3))
    found = play(Gymnasium(num_envs=3, autoreset=mode), actions, seed=5)
    alone = [gymnasium.make("CartPole-v1") for _ in range(3)]
    for i, env in enumerate(alone):
        observation, _ = env.reset(seed=5 + i)
        total = 0.0
        for t, action in enumerate(actions[:, i]):
            np.testing.assert_array_equal(found.observation[t, i], observation)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            if terminated or truncated:
                np.testing.assert_array_equal(found.observation[t + 1, i], observation)
                assert (found.episode_return[t + 1, i], found.discount[t + 1, i]) == (total, 0)
                break
    assert sum(np.count_nonzero(found.step_type[:, i] == LAST) for i in range(3)) >= 6
    later = found.observation[found.step_type == FIRST]
    assert len(np.unique(later[:, 0])) == len(later) and np.abs(later).max() <= 0.05, "FIRST is a start of CartPole"


def test_max_steps_changes_the_limit():
    found = play(make(max_steps=5), np.zeros((5, 2), int))
    assert [int(x) for x in found.step_type[:, 0]] == [FIRST, MID, MID, MID, MID, LAST]


@pytest.mark.parametrize("name", ["TestClock", "TestSameStep"])
def test_seeds_differ_and_follow_from_the_given_one(name):
    env = make(id=f"{MODULE}:{name}-v0", num_envs=4, vectorized=name == "TestSameStep")
    first, again, shifted = (env.reset(seed).observation[:, 1].tolist() for seed in (7, 7, 8))
    env.close()
    assert first == again and len(set(first)) == 4 and shifted[:3] == first[1:], "env i is seeded seed + i"


def test_a_reset_in_mid_episode_forgets_everything():
    env = make()
    begin = env.reset(3)
    for _ in range(3):
        env.step(np.zeros(2, int))
    again = env.reset(3)
    jax.tree.map(np.testing.assert_array_equal, again, begin)
    assert env.step(np.zeros(2, int)).step_type.tolist() == [MID, MID]
    env.close()


@pytest.mark.parametrize("name", ["final_obs", "final_info"])
def test_a_lost_final_observation_is_an_error_not_the_next_episodes(name):
    env = make("SameStep", vectorized=True, kwargs={"loses": name})
    env.reset(0)
    env.step(np.zeros(2, int))
    env.step(np.zeros(2, int))
    if name == "final_info":  # nothing is taken from it here
        assert env.step(np.zeros(2, int)).observation[:, 0].tolist() == [3, 3]
        return
    with pytest.raises(ConfigError, match=r"env 0's episode ended in autoreset mode 'same_step'.*no 'final_obs'"):
        env.step(np.zeros(2, int))
    env.close()


@pytest.mark.parametrize("declared", [None, "SameTime"])
def test_an_undeclared_autoreset_mode_is_an_error(declared):
    env = make("SameStep", vectorized=True, kwargs={"declared": declared})
    with (
        pytest.warns(UserWarning, match="AutoresetMode"),
        pytest.raises(ConfigError, match=rf"metadata\['autoreset_mode'\] is {declared!r}; it must be"),
    ):
        env.reset(0)
    env.close()


def test_a_vector_env_that_resets_more_than_it_should_is_an_error():
    class Uneven(Gymnasium):
        """Env 1's first episode has begun a step earlier."""

        def reset(self, seed):
            row = super().reset(seed)
            self._envs.unwrapped.envs[1].get_wrapper_attr("env")._elapsed_steps = 0
            self._envs.unwrapped.envs[0]._elapsed_steps = 1
            return row

    env = Uneven(num_envs=2, id=f"{MODULE}:TestSameStep-v0", vectorized=True, kwargs={"resets_all": True})
    env.reset(0)
    env.step(np.zeros(2, int))
    assert env.step(np.zeros(2, int)).step_type.tolist() == [LAST, MID]
    with pytest.raises(ConfigError, match=r"does not keep to options\['reset_mask'\]"):
        env.step(np.zeros(2, int))
    env.close()


# -- spaces ------------------------------------------------------------------------------------------------------------


def test_discrete_with_a_start():
    env = make("StartsAtTen", num_envs=3)
    assert env.spec.action == Discrete(3, start=10)
    assert play(env, [[0, 1, 2]]).observation[1, :, 1].tolist() == [10, 11, 12]


@pytest.mark.parametrize("workers", [0, 1])
def test_components(workers):
    env = make("Components", workers=workers)
    assert env.spec.action == MultiDiscrete((2, 3)) and env.spec.observation == ArraySpec((5,))
    shown = play(env, [[[0, 2], [1, 0]]]).observation
    assert shown[0].tolist() == [[1, 0, 1, 0, 0]] * 2
    assert shown[1].tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]


def test_switches():
    env = make("Switches")
    assert env.spec.action == MultiDiscrete((2, 2, 2, 2))
    assert env.spec.observation == ArraySpec((2, 2), np.dtype(np.int8))
    shown = play(env, [[[0, 1, 1, 0], [1, 1, 1, 0]]]).observation
    assert shown[1].tolist() == [[[0, 1], [1, 0]], [[1, 1], [1, 0]]]


@pytest.mark.parametrize(
    ("kwargs", "spec"),
    [
        ({}, Box((-np.inf, -np.inf), (np.inf, np.inf))),
        ({"low": -1.0}, Box((-1.0, -1.0), (np.inf, np.inf))),
        ({"low": -2.0, "high": 2.0, "shape": (1,)}, Box((-2.0,), (2.0,))),
        ({"low": 1.0, "high": 2.0, "shape": (2, 1)}, Box((1.0, 1.0), (2.0, 2.0))),
    ],
)
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_continuous(mode, kwargs, spec):
    env = make("Continuous", kwargs=kwargs, autoreset=mode)
    assert env.spec.action == spec
    action = np.full((2, *spec.shape), 1.25, np.float32)
    found = play(env, [action] * 9)
    np.testing.assert_array_equal(found.observation[1, :, 1], 1.25 * len(spec.low))
    np.testing.assert_array_equal(found.observation[:, 0, 0], np.arange(10) % 4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_trees_in_any_order(mode, workers):
    env = make("Nested", autoreset=mode, workers=workers)
    f, u = np.dtype(np.float32), np.dtype(np.uint8)
    assert env.spec.observation == {
        "img": ArraySpec((8, 8, 1), u),
        "inner": {"a": ArraySpec((3,), np.dtype(np.int8)), "b": ArraySpec((4,), np.float32)},
        "pair": (ArraySpec((), f), ArraySpec((1,), f)),
        "pos": ArraySpec((2,), f),
    }
    found = play(env, np.zeros((5, 2), int)).observation
    times = np.array([0, 1, 2, 3, 0, 1])
    assert found["img"].dtype == u and found["img"][:, 1, 0, 0, 0].tolist() == (250 + times).tolist()
    np.testing.assert_allclose(found["pos"][:, 0, 1], -times / 10)
    np.testing.assert_array_equal(found["inner"]["b"][:, 0], np.eye(4)[times])
    np.testing.assert_array_equal(found["inner"]["a"][:, 0, 2], times % 2)
    np.testing.assert_array_equal(found["pair"][0][:, 0], times)
    np.testing.assert_array_equal(found["pair"][1][:, 1, 0], times)


# -- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "CartPol-v1"}, "Gymnasium.id = 'CartPol-v1' is unknown; did you mean 'CartPole-v1'"),
        ({"id": "CartPole"}, "did you mean 'CartPole-v"),
        ({"id": "qqq-v0"}, r"is unknown; gymnasium.pprint_registry\(\) lists what is registered"),
        ({"id": "no_such_module:Foo-v0"}, "no module 'no_such_module' on the Python path"),
        ({"id": f"{MODULE}:TestClok-v0"}, "'tests.envs.gymnasium_envs:TestClok-v0' is unknown; did you mean 'TestCloc"),
        ({"kwargs": {"speed": 3}}, "CartPole-v1 with kwargs {'speed': 3} cannot be made: TypeError: .*'speed'"),
        ({"id": "Blackjack-v1", "vectorized": True}, "vectorized = True: 'Blackjack-v1' has no vector_entry_point"),
    ],
)
def test_wrong_ids_and_arguments(fields, message):
    env = Gymnasium(num_envs=2, **fields)
    with pytest.raises(ConfigError, match=message) as caught:
        _ = env.spec
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 0}, "max_steps = 0 must be >= 1"),
        ({"workers": -1}, "workers = -1 must be >= 0"),
        ({"autoreset": "same"}, "autoreset = 'same' is unknown; did you mean 'same_step'"),
        ({"workers": 2, "vectorized": True}, "workers = 2: with vectorized = True the env itself decides"),
        (
            {"autoreset": "disabled", "vectorized": True},
            "autoreset = 'disabled': with vectorized = True the env itself",
        ),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        build.build(build.config_for("gymnasium", **fields), num_envs=2)


def test_a_space_without_a_spec():
    space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Text(3)})
    with pytest.raises(ConfigError, match=r"observation space Text\(.*\) has no fixed shape; known: Box, Discrete"):
        build.resolve("flaxrl.envs.gymnasium_spaces:observation_spec")(space, "X-v0")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"action space .* is none of Discrete"):
        build.resolve("flaxrl.envs.gymnasium_spaces:action_spec")(space, "X-v0")  # type: ignore[operator]


def test_a_wrong_number_of_actions():
    env = make()
    with pytest.raises(RuntimeError, match=r"step before Gymnasium\.reset"):
        env.step(np.zeros(2, int))
    env.reset(0)
    with pytest.raises(ValueError, match=r"actions must be \[2\]; they are \[2, 1\]"):
        env.step(np.zeros((2, 1), int))
    env.close()
    env.close()

"""Running statistics of a run: of all rows once, the same for acting and learning, on any number of devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from learner_setups import (
    VECTOR,
    assert_close,
    compilations,
    host,
    key,
    learner,
    made_up_trajectory,
    make_agent,
    means,
    progress,
    same,
)
from surrogate import Surrogate

from flaxrl.build import build, config_for
from flaxrl.envs.fake import HostScripted, Scripted
from flaxrl.errors import ConfigError
from flaxrl.losses.ppo import PPO
from flaxrl.models.normalization import EPSILON, STATISTICS
from flaxrl.trainers.actors import ActorThreads
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.rollout import JaxRollout
from flaxrl.trainers.sharding import PER_ENV, bind_unroll
from flaxrl.trainers.source import Runtime
from flaxrl.trainers.statistics import RETURNS, RewardScaling
from flaxrl.types import FIRST, LAST, MID, AgentInput, Trajectory

ADAM = Optimizer("adam", learning_rate=1e-2)
SCALING = RewardScaling(discount=0.9, clip=10.0)


class Played(NamedTuple):
    """A few iterates: trajectories, what the learner's model said of them, metrics, states before each and after."""

    trajectories: list[Any]
    outputs: list[Any]
    metrics: list[dict[str, float]]
    states: list[Any]
    programs: list[int]


def play(kind: str, updates: int = 4, devices: int = 1, core: str = "feed_forward", **settings: Any) -> Played:
    """Acting and learning in turn, with observations normalised and rewards scaled; 'jax' or 'host' envs."""
    agent = make_agent(core=core, normalize_observations=True)
    state, update, mesh = learner(agent, VECTOR, ADAM, devices, reward_scaling=SCALING, **settings)
    sizes: dict[str, Any] = {"num_envs": 8, "unroll_length": 5}
    source: Any = JaxRollout(**sizes) if kind == "jax" else ActorThreads(**sizes, threads=0)
    games = {"jax": lambda n: Scripted(episode_length=3), "host": lambda n: HostScripted(num_envs=n, episode_length=3)}
    source.setup(Runtime(games[kind], agent, mesh, 0, progress))
    sample = jax.jit(source.sample) if kind == "jax" else source.sample
    unroll = jax.jit(lambda s, t: bind_unroll(agent, s.variables, mesh)(s.params, t))
    data, played = source.init(state, key(1000)), Played([], [], [], [], [])
    for i in range(updates):
        data, trajectory, _ = sample(data, state, key(i))
        played.trajectories.append(host(trajectory))
        played.outputs.append(host(unroll(state, trajectory)))
        played.states.append(host(state))
        state, out = update(state, trajectory, key(100 + i))
        played.metrics.append(means(out.metrics))
        jitted = (update, sample, unroll) if kind == "jax" else (update, source._act.step, unroll)
        played.programs.append(sum(compilations(f) for f in jitted))
    played.states.append(host(state))
    source.close()
    return played


def discounted(trajectories: list[Any], gamma: float) -> np.ndarray:
    """G of every executed action, by a loop over rows and envs in float64."""
    found, running = [], np.zeros(trajectories[0].reward.shape[1])
    for trajectory in trajectories:
        types = trajectory.inputs.step_type
        for t in range(len(trajectory.reward)):
            for b in range(len(running)):
                if types[t, b] == FIRST:
                    running[b] = 0.0
                if types[t, b] != LAST:
                    running[b] = gamma * running[b] + trajectory.reward[t, b]
                    found.append(running[b])
    return np.asarray(found)


@pytest.fixture(scope="module", params=["jax", "host"])
def played(request: pytest.FixtureRequest) -> Played:
    """On one device, both kinds of envs."""
    return play(request.param)


def test_all_rows_ever_inserted_count_once(played: Played) -> None:
    rows = np.concatenate([t.inputs.observation[:-1].reshape(-1, 4) for t in played.trajectories]).astype(np.float64)
    moments = played.states[-1].variables[STATISTICS]["normalizer"]["observation"]
    assert float(moments.count) == len(rows) == 4 * 5 * 8
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-6)
    # Whole episodes of 3 actions, four rows each: times 0 to 3 as often as each other, whatever the env.
    assert float(moments.mean[0]) == pytest.approx(1.5) and float(moments.variance[0]) == pytest.approx(1.25)


def test_returns_go_on_from_unroll_to_unroll(played: Played) -> None:
    for i in (1, 4):
        returns = discounted(played.trajectories[:i], SCALING.discount)
        moments = played.states[i].variables[RETURNS]["moments"]
        assert float(moments.count) == len(returns)
        np.testing.assert_allclose(moments.mean, returns.mean(), rtol=1e-6)
        np.testing.assert_allclose(moments.variance, returns.var(), rtol=1e-6)
        assert played.metrics[i - 1]["loss/return_deviation"] == pytest.approx(returns.std(), rel=1e-5)


def test_actors_and_learner_see_the_same(played: Played) -> None:
    """The learner's values are those that acting stored, and the ratio is 1, before an update and after some."""
    for trajectory, output, metrics in zip(played.trajectories, played.outputs, played.metrics, strict=True):
        valid = trajectory.mask
        np.testing.assert_allclose(output.value[:-1][valid], trajectory.value[valid], rtol=0, atol=1e-6)
        assert metrics["loss/rho_mean"] == pytest.approx(1.0, abs=1e-6)
        assert abs(metrics["loss/kl_behaviour"]) < 1e-6
    before, after = (s.variables[STATISTICS]["normalizer"]["observation"] for s in played.states[1:3])
    assert not np.array_equal(before.mean, after.mean), "the statistics did not move, so nothing was tested"


def test_nothing_compiles_after_the_second_update(played: Played) -> None:
    assert len(set(played.programs[1:])) == 1


@pytest.mark.slow
def test_a_recurrent_agent_too() -> None:
    played = play("jax", 2, core="lstm")
    for trajectory, output in zip(played.trajectories, played.outputs, strict=True):
        valid = trajectory.mask
        np.testing.assert_allclose(output.value[:-1][valid], trajectory.value[valid], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "target_kl"), [("jax", 1e-3), ("host", None)])
def test_the_first_ratio_of_ppo_is_1(kind: str, target_kl: float | None) -> None:
    """In every update, though the statistics move between them and the parameters within; one program does them all."""
    played = play(kind, 3, loss=PPO(target_kl=target_kl), epochs=2, minibatches=2)
    for metrics in played.metrics:
        assert metrics["loss/first_ratio_deviation"] <= 1e-5 and metrics["loss/kl_behaviour"] > 0
    means_seen = [s.variables[STATISTICS]["normalizer"]["observation"].mean[1] for s in played.states]
    assert len(set(map(float, means_seen))) == 4
    assert len(set(played.programs[1:])) == 1


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_four_devices_are_one(kind: str) -> None:
    one, four = play(kind, 3), play(kind, 3, devices=4)
    for a, b in zip(one.states, four.states, strict=True):
        assert_close(a.variables, b.variables, 1e-6)
    assert_close(one.metrics, four.metrics, 1e-5)


def test_all_minibatches_see_the_statistics_of_before() -> None:
    """Two epochs of two minibatches, parameters that stand still: the ratio stays 1 to the end, and then they move."""
    agent = make_agent(core="feed_forward", normalize_observations=True)
    still = Optimizer("sgd", learning_rate=1e-30)
    state, update, mesh = learner(agent, VECTOR, still, epochs=2, minibatches=2)
    trajectory = made_up_trajectory(agent, VECTOR, mesh)
    output = bind_unroll(agent, state.variables, mesh)(state.params, trajectory)
    trajectory = trajectory.replace(log_prob=output[:-1].policy.log_prob(trajectory.action))
    new, out = update(state, trajectory, key())
    assert means(out.metrics)["loss/kl_behaviour"] == pytest.approx(0.0, abs=1e-6)
    rows = np.asarray(trajectory.inputs.observation[:-1]).reshape(-1, 4)
    moments = new.variables[STATISTICS]["normalizer"]["observation"]
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-5, atol=1e-6)
    changed = bind_unroll(agent, new.variables, mesh)(new.params, trajectory)
    assert np.abs(np.asarray(changed.value) - np.asarray(output.value)).max() > 1e-3


def reward_trajectory(reward: Any, step_type: Any, discount: Any) -> Trajectory:
    """One env's column, sanitized."""
    rewards, discounts = (jnp.asarray(x, jnp.float32)[:, None] for x in (reward, discount))
    inputs = AgentInput(jnp.zeros((len(step_type), 1, 4)), jnp.asarray(step_type, jnp.int8)[:, None])
    return Trajectory(inputs, jnp.zeros((len(reward), 1), jnp.int32), rewards, discounts, None, None).sanitized()


def test_worked_returns() -> None:
    """gamma 1/2. First unroll: 1, 2 + 1/2 = 2.5, LAST, a new episode's 4.

    The second goes on: 1 + 4/2 = 3 and a lost life, 1, 2 + 1/2 = 2.5, LAST, a new episode's 0. Mean of all 14/7 = 2.
    """
    scale = jax.jit(RewardScaling(discount=0.5, clip=None))
    variables: Any = RewardScaling(0.5, None).start(1)
    # A termination: discount 0 on the action whose answer is LAST. NaN where no action was executed.
    first = reward_trajectory([1, 2, np.nan, 4], [FIRST, MID, LAST, FIRST, MID], [1, 0, np.nan, 1])
    variables, scaled, deviation = scale(variables, first)
    values = [1, 2.5, 4.0]
    assert float(deviation) == pytest.approx(np.std(values), rel=1e-6)
    np.testing.assert_allclose(scaled.reward[:, 0], np.array([1, 2, 0, 4]) / np.std(values), rtol=1e-6)
    assert variables[PER_ENV]["return"].tolist() == [4.0]
    # A lost life (discount 0 on a MID row) ends a return; a truncation (discount 1 before LAST) ends it too.
    second = reward_trajectory([1, 1, 2, 9, 0], [MID, MID, MID, LAST, FIRST, MID], [0, 1, 1, np.nan, 1])
    variables, scaled, deviation = scale(variables, second)
    values += [3, 1, 2.5, 0.0]
    moments = variables[RETURNS]["moments"]
    assert float(moments.count) == 7 and float(moments.mean) == pytest.approx(2.0)
    assert float(deviation) == pytest.approx(np.std(values), rel=1e-6)
    np.testing.assert_allclose(scaled.reward[:, 0], np.array([1, 1, 2, 0, 0]) / np.std(values), rtol=1e-6)


@pytest.mark.parametrize("reward", [1.0, 0.0, -3e-3])
def test_equal_returns_leave_rewards_as_they_are(reward: float) -> None:
    """Unrolls of one row: G is r for each first action; later ones make a difference, and are divided by it."""
    scaling = RewardScaling(discount=0.5, clip=None)
    first = reward_trajectory([reward], [FIRST, MID], [1])
    variables, scaled, deviation = scaling(scaling.start(1), first)
    assert float(deviation) == 1.0 and float(scaled.reward[0, 0]) == np.float32(reward)
    # The second action's G is 1.5 r, so the deviation of both is |r| / 4.
    _, scaled, deviation = scaling(variables, reward_trajectory([reward], [MID, MID], [1]))
    assert float(deviation) == pytest.approx(np.sqrt(reward**2 / 16 + EPSILON) if reward else 1.0, rel=1e-5)
    assert float(scaled.reward[0, 0]) == pytest.approx(reward / float(deviation), rel=1e-6)


def test_a_resumed_host_run_starts_returns_anew() -> None:
    """Its envs begin with FIRST rows; what an env had earned before belongs to no episode."""
    variables: Any = SCALING.start(1) | {PER_ENV: {"return": jnp.full(1, 50.0)}}
    variables, _, _ = SCALING(variables, reward_trajectory([1, 1], [FIRST, MID, MID], [1, 1]))
    assert float(variables[RETURNS]["moments"].mean) == pytest.approx((1 + 1.9) / 2)


def test_scaled_rewards_are_clipped_and_faults_do_not_stay() -> None:
    scaling = RewardScaling(discount=0.0, clip=1.5)
    rewards = [0.0, 0, 0, np.inf, 4, np.nan, 0, 0, 0]
    trajectory = reward_trajectory(rewards, [FIRST] + [MID] * 9, [1.0] * 9)
    variables, scaled, deviation = scaling(scaling.start(1), trajectory)
    # Of 0, 0, 0, 4, 0, 0, 0 (both faults left out): mean 4/7, mean of squares 16/7, so variance 96/49.
    assert float(deviation) == pytest.approx(np.sqrt(96) / 7, rel=1e-6)
    assert float(scaled.reward[4, 0]) == 1.5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(variables))
    assert np.isnan(scaled.reward[5, 0]), "the loss must see the fault, so that its step is skipped"


def test_a_fault_is_skipped_and_leaves_the_statistics_whole() -> None:
    agent = make_agent(core="feed_forward", normalize_observations=True)
    state, update, mesh = learner(agent, VECTOR, ADAM, reward_scaling=SCALING)
    trajectory = made_up_trajectory(agent, VECTOR, mesh)
    observation = trajectory.inputs.observation.at[1, 0, 0].set(jnp.nan)
    bad = trajectory.replace(inputs=trajectory.inputs.replace(observation=observation))
    before = host(state.params)
    state, out = update(state, bad, key())
    assert means(out.metrics)["loss/skipped"] == 1.0 and same(state.params, before)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.variables))
    assert float(state.variables[STATISTICS]["normalizer"]["observation"].count) == 47  # 6 x 8 - 1
    state, out = update(state, trajectory, key(1))
    assert means(out.metrics)["loss/skipped"] == 0.0 and not same(state.params, before)


def test_off_by_default() -> None:
    agent = make_agent(core="feed_forward")
    state, update, mesh = learner(agent, VECTOR, ADAM)
    assert state.variables == {}
    state, out = update(state, made_up_trajectory(agent, VECTOR, mesh), key())
    assert state.variables == {} and "loss/return_deviation" not in out.metrics


@pytest.mark.parametrize(
    "layout", [pytest.param({"data": 4}, marks=pytest.mark.slow), {"data": 2, "fsdp": 2}], ids=["data", "both"]
)
def test_devices_exchange_sums_only(layout: dict[str, int]) -> None:
    """A batch of 4,096 envs: nothing of that size moves, and what moves does so once an update, not a minibatch."""
    found = {}
    for on in (False, True):
        agent = make_agent(core="feed_forward", normalize_observations=on)
        settings: dict[str, Any] = layout | {"loss": Surrogate(), "epochs": 2, "minibatches": 2, "batch": 4096}
        state, update, mesh = learner(agent, VECTOR, ADAM, reward_scaling=SCALING if on else None, **settings)
        trajectory = made_up_trajectory(agent, VECTOR, mesh, 3, 4096)
        text = update.lower(state, trajectory, key()).compile().as_text()
        found[on] = collectives(text)
    assert max(max(c.sizes) for c in found[True]) < 256
    inside = {on: [c for c in found[on] if c.depth] for on in found}
    assert len(inside[True]) == len(inside[False])
    moved = {on: sum(sum(c.sizes) for c in found[on] if not c.depth) for on in found}
    # Two sums of four elements and a count; two of the return and a count; no more than twice that.
    assert 0 < moved[True] - moved[False] <= 32, found[True]
    kinds = {on: {c.kind for c in found[on] if not c.depth} for on in found}
    assert kinds[True] <= kinds[False] | {"all-reduce"}


def test_the_running_return_lies_like_the_batch() -> None:
    state, _, _ = learner(make_agent(), VECTOR, ADAM, data=4, reward_scaling=SCALING)
    running = state.variables[PER_ENV]["return"]
    assert running.shape == (8,) and running.addressable_shards[0].data.shape == (2,)
    assert state.variables[RETURNS]["moments"].count.sharding.is_fully_replicated


@pytest.mark.parametrize(("field", "value"), [("reward_scaling", 1.5), ("reward_scaling", -0.1), ("reward_clip", 0.0)])
def test_settings_are_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"LearnerSettings.{field} = {value} must be"):
        build(config_for("learner", **{field: value}))

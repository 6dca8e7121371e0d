"""The agent: acting is unrolling row by row, what it is fed, where its randomness comes from."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from flaxrl.envs.spec import Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.models.agent import Agent, agent_input, encode_action
from flaxrl.models.cores import GRU, LSTM, FeedForward
from flaxrl.models.heads import PolicyValue
from flaxrl.models.policies import Sampled
from flaxrl.models.torsos import MLP
from flaxrl.types import FIRST, LAST, MID, ActContext, AgentInput, Timestep

T, B, A = 6, 3, 4
SPEC = Discrete(A)


class Wrapped(nn.Module):
    """A core around another, which is a field."""

    inner: nn.Module

    def __call__(self, x: Any, first: Any, carry: Any) -> Any:
        return self.inner(x, first, carry)  # type: ignore[operator]

    def initial_carry(self, batch_size: int) -> Any:
        return self.inner.initial_carry(batch_size)  # type: ignore[attr-defined]


CORES: dict[str, Any] = {"feed_forward": FeedForward(), "lstm": LSTM(5), "gru": GRU(5, initial_state="learned")}
WRAPPED: dict[str, Any] = CORES | {"wrapped": Wrapped(LSTM(5))}


def agent_of(core: str, **fields: Any) -> Any:
    return Agent(MLP((6,)), WRAPPED[core], PolicyValue(SPEC), Sampled(), SPEC, **fields)


def unroll_inputs(extras: bool = False) -> Any:
    """Random rows; env 0 ends at row 2, env 1 starts at row 0, env 2 runs through."""
    rng = np.random.default_rng(0)
    step_type = np.full((T, B), MID, np.int8)
    step_type[2, 0], step_type[3, 0], step_type[0, 1] = LAST, FIRST, FIRST
    mask = rng.random((T, B, A)) > 0.3
    mask[2, 0] = False
    return AgentInput(
        observation=rng.normal(size=(T, B, 3)).astype(np.float32),
        step_type=step_type,
        action_mask=mask,
        last_action=rng.integers(0, A, (T, B)).astype(np.int32) if extras else None,
        last_reward=rng.normal(size=(T, B)).astype(np.float32) * 3 if extras else None,
    )


def context(batch: int = B) -> ActContext:
    return ActContext(env_ids=jnp.arange(batch, dtype=jnp.int32), progress=jnp.float32(0))


@functools.cache
def setup(agent: Any) -> tuple[Any, Any]:
    """Random variables and a carry that is not the initial one."""
    rng = np.random.default_rng(1)
    inputs = unroll_inputs(agent.use_last_action)

    def random(shapes: Any) -> Any:
        return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)

    variables = random(jax.eval_shape(agent.init, jax.random.key(0), inputs, None))
    shapes = jax.eval_shape(lambda v: agent.apply(v, B, method="initial_carry"), variables)
    return variables, random(shapes)


@functools.cache
def acting(agent: Any, sample: bool) -> Any:
    def act(variables: Any, inputs: Any, carry: Any, context: Any, key: Any) -> Any:
        return agent.apply(variables, inputs, carry, context, rngs={"sample": key} if sample else None, method="act")

    return jax.jit(act)


def row(inputs: Any, t: int) -> Any:
    return jax.tree.map(lambda x: x[t], inputs)


@pytest.mark.parametrize("extras", [False, True], ids=["observation", "extras"])
@pytest.mark.parametrize("core", CORES)
def test_acting_row_by_row_is_unrolling_from_the_stored_carry(core, extras):
    agent = agent_of(core, use_last_action=extras, use_last_reward=extras)
    variables, carry = setup(agent)
    inputs, stored = unroll_inputs(extras), carry
    acted = []
    for t in range(T):
        *answer, carry = acting(agent, True)(variables, row(inputs, t), carry, context(), jax.random.key(t))
        acted.append(answer)
    action, log_prob, output = jax.tree.map(lambda *x: jnp.stack(x), *acted)
    learned, end = jax.jit(agent.apply)(variables, inputs, stored)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), (output, carry), (learned, end))
    np.testing.assert_allclose(learned.policy.log_prob(action), log_prob, rtol=1e-5, atol=1e-5)
    legal = np.take_along_axis(np.asarray(inputs.action_mask), np.asarray(action)[..., None], -1)[..., 0]
    assert legal[np.asarray(inputs.action_mask).any(-1)].all()


def test_greedy_without_a_key_and_sampled_with_one():
    agent = agent_of("feed_forward")
    variables, carry = setup(agent)
    first = row(unroll_inputs(), 0).replace(action_mask=None)
    wide = jax.tree.map(lambda x: np.repeat(x[:1], 64, axis=0), first)
    greedy, log_prob, output, _ = acting(agent, False)(variables, wide, carry, context(64), jax.random.key(0))
    np.testing.assert_array_equal(greedy, output.policy_params.argmax(-1))
    np.testing.assert_allclose(log_prob, output.policy.log_prob(greedy), rtol=1e-6)
    one, *_ = acting(agent, True)(variables, wide, carry, context(64), jax.random.key(0))
    same, *_ = acting(agent, True)(variables, wide, carry, context(64), jax.random.key(0))
    other, *_ = acting(agent, True)(variables, wide, carry, context(64), jax.random.key(1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any() and len(set(one.tolist())) > 1


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_no_carry_starts_an_episode(core):
    agent = agent_of(core)
    variables, _ = setup(agent)
    inputs = unroll_inputs()
    inputs = inputs.replace(step_type=np.where(np.arange(T)[:, None] == 0, MID, inputs.step_type).astype(np.int8))
    start = agent.apply(variables, B, method="initial_carry")
    assert all(x.shape == (B, 5) for x in jax.tree.leaves(start))
    assert all(x.any() == (core == "gru") for x in jax.tree.leaves(start))  # here the GRU's is learned
    apply = jax.jit(agent.apply)
    jax.tree.map(np.testing.assert_array_equal, apply(variables, inputs, None), apply(variables, inputs, start))


def test_torso_chunks_change_nothing():
    whole, chunked = agent_of("gru", torso_chunk=0), agent_of("gru", torso_chunk=4)  # 18 rows: a last piece to fill
    variables, carry = setup(whole)
    inputs = unroll_inputs()

    def f(agent: Any) -> Any:
        def loss(variables: Any) -> Any:
            output, end = agent.apply(variables, inputs, carry)
            return jnp.sum(output.value) + jnp.sum(jnp.sin(output.policy.entropy())), (output, end)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), f(whole), f(chunked))


class Chunky(MLP):
    cpu_chunk: ClassVar[int] = 4


@pytest.mark.parametrize(("backend", "pieces"), [("cpu", 5), ("gpu", 0), ("tpu", 0)])
def test_a_torso_runs_in_chunks_of_its_own_size_on_a_cpu_alone(monkeypatch, backend, pieces):
    """18 rows, 4 at a time; what a scan would be in the program, of a feed-forward agent, is the loop over them."""
    agent: Any = Agent(Chunky((6,)), CORES["feed_forward"], PolicyValue(SPEC), Sampled(), SPEC)
    variables, carry = setup(agent)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "default_backend", lambda: backend)
        text = str(jax.make_jaxpr(agent.apply)(variables, unroll_inputs(), carry))
    assert ("scan" in text) == (pieces > 0) and (f"length={pieces}" in text) == (pieces > 0)


def test_last_action_and_reward_reach_the_model():
    agent = agent_of("feed_forward", use_last_action=True, use_last_reward=True)
    variables, carry = setup(agent)
    kernel = variables["params"]["head"]["value"]["kernel"]
    assert kernel.shape == (6 + A + 1, 1)  # torso, one-hot action, reward
    inputs = unroll_inputs(extras=True)
    apply = jax.jit(lambda x: agent.apply(variables, x, carry)[0].value)
    zero = apply(inputs.replace(last_action=np.zeros((T, B), np.int32), last_reward=np.zeros((T, B), np.float32)))
    one_hot = kernel[6 + inputs.last_action, 0] - kernel[6, 0]
    reward = np.clip(inputs.last_reward, -1, 1) * kernel[-1, 0]
    assert np.abs(inputs.last_reward).max() > 1
    np.testing.assert_allclose(apply(inputs) - zero, one_hot + reward, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("core", ["feed_forward", "wrapped", "gru"])
def test_a_value_torso_is_a_network_of_its_own(core):
    """Acting row by row is unrolling; the policy sees nothing of the value's parameters, nor the reverse."""
    agent = agent_of(core, value_torso=MLP((7,)), use_last_reward=True)
    rng = np.random.default_rng(3)
    inputs = unroll_inputs(extras=True)
    shapes = jax.eval_shape(agent.init, jax.random.key(0), inputs, None)
    variables = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    parameters = variables["params"]
    assert parameters["torso"]["Dense_0"]["kernel"].shape == (3, 6)
    assert parameters["value_torso"]["Dense_0"]["kernel"].shape == (3, 7)
    assert ("value_core" in parameters) == ("core" in parameters) == (core != "feed_forward")
    if core == "wrapped":
        assert parameters["value_core"]["inner"].keys() == parameters["core"]["inner"].keys()
    carry = agent.apply(variables, B, method="initial_carry")
    assert len(carry) == 2 and jax.tree.structure(carry[0]) == jax.tree.structure(carry[1])
    learned, end = jax.jit(agent.apply)(variables, inputs, carry)
    values, log_prob, action = [], [], []
    for t in range(T):
        a, p, output, carry = acting(agent, True)(variables, row(inputs, t), carry, context(), jax.random.key(t))
        values.append(output.value)
        log_prob.append(p)
        action.append(a)
    np.testing.assert_allclose(jnp.stack(values), learned.value, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.stack(log_prob), learned.policy.log_prob(jnp.stack(action)), rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), carry, end)

    def reached(f: Any) -> set[str]:
        grads = jax.jit(jax.grad(lambda v: jnp.sum(f(agent.apply(v, inputs, None)[0]))))(variables)["params"]
        return {k for k, g in grads.items() if k != "head" and any(np.any(x) for x in jax.tree.leaves(g))}

    own = {k for k in ("torso", "core") if k in parameters}
    assert reached(lambda output: output.value) == {f"value_{k}" for k in own}
    assert reached(lambda output: output.policy.entropy()) == own


class TwoArguments(nn.Module):
    def __call__(self, x: Any, action_mask: Any) -> Any:
        raise NotImplementedError


def test_a_value_torso_needs_a_head_that_takes_it():
    with pytest.raises(ConfigError, match=r"Agent.value_torso needs a head .* such as policy_value: TwoArguments does"):
        Agent(MLP(), FeedForward(), TwoArguments(), Sampled(), SPEC, value_torso=MLP())


@pytest.mark.parametrize("xp", [np, jnp])
def test_agent_input(xp):
    """On FIRST rows the last action is 0, as the reward is; without the fields the model sees neither."""
    timestep = Timestep(
        observation=xp.ones((3, 2)),
        reward=xp.asarray([0.0, 2.0, -1.0]),
        discount=xp.ones(3),
        step_type=xp.asarray([FIRST, MID, LAST], dtype=np.int8),
        action_mask=None,
        episode_return=xp.zeros(3),
        episode_length=xp.zeros(3, np.int32),
    )
    action = xp.asarray([3, 3, 3])
    seen: Any = agent_input(agent_of("lstm", use_last_action=True, use_last_reward=True), timestep, action, xp)
    assert seen.last_action.tolist() == [0, 3, 3] and seen.last_reward.tolist() == [0, 2, -1]
    assert seen.last_action.dtype == action.dtype
    joint: Any = agent_input(agent_of("lstm", use_last_action=True), timestep, xp.ones((3, 2), np.int32), xp)
    assert joint.last_action.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert joint.last_reward is None
    seen = agent_input(agent_of("lstm"), timestep, action, xp)
    assert seen.last_action is None and seen.last_reward is None
    assert seen.observation is timestep.observation and seen.first.tolist() == [True, False, False]


def test_encode_action():
    assert encode_action(jnp.array([[2, 0]]), Discrete(3)).tolist() == [[[0, 0, 1], [1, 0, 0]]]
    assert encode_action(jnp.array([[[1, 2]]]), MultiDiscrete((2, 3))).tolist() == [[[0, 1, 0, 0, 1]]]
    boxed = encode_action(jnp.array([[[0.5, -2.0]]]), Box((-3.0, -3.0), (3.0, 3.0)))
    assert boxed.tolist() == [[[0.5, -2.0]]] and boxed.dtype == jnp.float32
    unbounded = encode_action(jnp.array([[[50.0, -2.0]]]), Box((-np.inf, -1.0), (np.inf, np.inf)))
    assert unbounded.tolist() == [[[50.0, -2.0]]]


def test_wrong_ranks_and_fields_are_refused():
    agent = agent_of("feed_forward")
    variables, carry = setup(agent)
    with pytest.raises(AssertionError):
        agent.apply(variables, row(unroll_inputs(), 0), carry)
    with pytest.raises(AssertionError):
        agent.apply(variables, unroll_inputs(), carry, context(), method="act")
    with pytest.raises(ConfigError, match=r"Agent.torso_chunk = -1 must be >= 0"):
        agent_of("lstm", torso_chunk=-1)

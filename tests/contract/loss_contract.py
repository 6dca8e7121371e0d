"""What every loss must do.

Put your own through it: `check_loss(MyLoss())`. The loss scores what a small agent did while other parameters acted,
with terminated and truncated episodes inside the unroll; pass `head` where the loss needs another than policy_value.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxrl.envs.spec import Discrete
from flaxrl.losses.base import Loss
from flaxrl.models.agent import Agent
from flaxrl.models.cores import FeedForward
from flaxrl.models.heads import PolicyValue
from flaxrl.models.policies import Sampled
from flaxrl.models.torsos import MLP
from flaxrl.types import FIRST, LAST, MID, AgentInput, LossOutput, TrainState, Trajectory

ACTIONS = 3
SPEC = Discrete(ACTIONS)


class Scored(NamedTuple):
    """A loss, its gradients, and what it told.

    Attributes:
        loss: scalar.
        gradient: with respect to the parameters.
        influence: with respect to the model's output, row by row: an Output.
        out: the LossOutput.
    """

    loss: Any
    gradient: Any
    influence: Any
    out: LossOutput


class Bench:
    """An agent, its parameters, and a loss that scores trajectories with them.

    Args:
        loss: to check.
        head: features -> Output, for Discrete(3).
        agent: in place of the small feed-forward one; observations are `[T, B, 4]`.
    """

    def __init__(self, loss: Loss, head: nn.Module | None = None, agent: Agent | None = None):
        head = PolicyValue(SPEC, policy_scale=1.0) if head is None else head
        self.loss = loss
        self.agent = Agent(MLP((8,)), FeedForward(), head, Sampled(), SPEC) if agent is None else agent
        shapes = jax.eval_shape(self.agent.init, jax.random.key(0), _inputs(np.full((2, 1), MID, np.int8), 0), None)
        rng = np.random.default_rng(0)
        self.params, self._acting, self._target = (
            jax.tree.map(lambda x: 0.5 * rng.normal(size=x.shape).astype(np.float32), shapes["params"])
            for _ in range(3)
        )
        self.score = jax.jit(self.score_eagerly)

    def score_eagerly(self, params: Any, trajectory: Trajectory) -> Scored:
        """Sanitizes, prepares and scores, as the update does."""
        state = TrainState.init(self.agent.apply, {"params": params}, optax.sgd(0.1), target=False)
        state = state.replace(target_params=self._target if self.loss.uses_target else None)
        batch = jax.lax.stop_gradient(self.loss.prepare(self._unroll, state, trajectory.sanitized()))
        shapes = jax.eval_shape(self._unroll, params, batch)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def f(learning: Any, nudge: Any) -> Any:
            def nudged(params: Any, batch: Any, rngs: Any = None) -> Any:
                output = self._unroll(params, batch, rngs)
                return jax.tree.map(jnp.add, output, nudge) if params is learning else output

            return self.loss(nudged, learning, state.target_params, batch, {"dropout": jax.random.key(0)})

        (value, out), (gradient, influence) = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(params, nothing)
        return Scored(value, gradient, influence, out)

    def _unroll(self, params: Any, batch: Any, rngs: Any = None) -> Any:
        carry = jax.tree.map(lambda x: x[0], batch.carry)
        return self.agent.apply({"params": params}, batch.inputs, carry, rngs=rngs)[0]

    @functools.cached_property
    def _act(self) -> Any:
        def act(inputs: AgentInput) -> Any:
            batch = inputs.step_type.shape[1]
            carry = self.agent.apply({"params": self._acting}, batch, method="initial_carry")
            output: Any = self.agent.apply({"params": self._acting}, inputs, carry)[0]
            if output.make_policy is None:
                return output, carry, jnp.zeros(inputs.step_type.shape, jnp.int32), None
            action = output.policy.sample(seed=jax.random.key(5))
            return output, carry, action, output.policy.log_prob(action)[:-1]

        return jax.jit(act)

    def trajectory(self, step_type: np.ndarray, masks: bool = True) -> Trajectory:
        """Random observations and rewards for those rows int8 `[T+1, B]`; other parameters act.

        Args:
            step_type: at a LAST row of an even row number the episode was terminated, else truncated.
            masks: with action masks; on LAST rows no action is legal, or action 1 alone.
        """
        inputs = _inputs(step_type, 1, masks)
        rng = np.random.default_rng(2)
        output, carry, action, log_prob = self._act(inputs)
        if log_prob is None and inputs.action_mask is not None:
            action = np.asarray(inputs.action_mask.argmax(-1), np.int32)
        terminated = (step_type[1:] == LAST) & (np.arange(1, len(step_type))[:, None] % 2 == 0)
        return Trajectory(
            inputs=inputs,
            action=np.asarray(action)[:-1],
            reward=rng.normal(size=step_type[1:].shape).astype(np.float32),
            discount=np.where(terminated, 0, 1).astype(np.float32),
            log_prob=log_prob,
            value=None if output.value is None else output.value[:-1],
            carry=jax.tree.map(lambda x: x[None], carry),
        )


def _inputs(step_type: np.ndarray, seed: int, masks: bool = False) -> AgentInput:
    rng = np.random.default_rng(seed)
    mask = rng.random((*step_type.shape, ACTIONS)) > 0.4
    mask[..., 1] = True
    # LAST rows: no legal action in even envs; in odd ones the filler, action 0, is illegal.
    last, odd = (step_type == LAST)[..., None], np.arange(step_type.shape[1])[:, None] % 2 == 1
    mask = np.where(last, odd & (np.arange(ACTIONS) == 1), mask)
    observation = rng.normal(size=(*step_type.shape, 4)).astype(np.float32)
    return AgentInput(observation=observation, step_type=step_type, action_mask=mask if masks else None)


def rows(*envs: str) -> np.ndarray:
    """Step types `[T+1, B]` from one word an env: F, M, L for FIRST, MID, LAST."""
    return np.array([["FML".index(letter) for letter in env] for env in envs], np.int8).T


assert (FIRST, MID, LAST) == (0, 1, 2)
EPISODES = rows("FMMLFMM", "MLFMLFM", "MMMMMMM", "MMMMMML")


def check_loss(
    loss: Loss, *, head: nn.Module | None = None, agent: Agent | None = None, isolated: bool = True
) -> Scored:
    """Checks a loss's whole contract.

    Args:
        loss: to check.
        head: of the small feed-forward agent, for Discrete(3) actions; None takes policy_value.
        agent: in place of that agent; observations are `[T, B, 4]`.
        isolated: rewards of one episode must not move the outputs of another. False for losses that normalise over
            the batch on purpose.

    Returns:
        What it scored on the contract's trajectory, for checks of your own.
    """
    bench = Bench(loss, head, agent)
    trajectory = bench.trajectory(EPISODES)
    scored = bench.score(bench.params, trajectory)
    _check_answer(scored, bench, EPISODES.shape[1])
    _check_masked_rows(bench, trajectory, scored)
    _check_order(bench, trajectory, scored)
    if isolated:
        _check_isolation(bench, trajectory, scored)
    for step_type in (rows("FM", "FL", "MM"), rows("FM", "ML", "LF"), rows("LF", "LF", "LF")):
        short = bench.score(bench.params, bench.trajectory(step_type, masks=False))
        assert _finite(short), f"T = 1, step types {step_type.T.tolist()}: not finite"
        still = not any(np.any(x) for x in jax.tree.leaves(short.gradient))
        assert still == bool((step_type[0] == LAST).all()), "only a batch with a valid row moves parameters"
    _same(bench.score_eagerly(bench.params, trajectory), scored, "jit and eager differ")
    return scored


def _same(actual: Any, expected: Any, rule: str, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=atol, err_msg=rule), actual, expected)


def _finite(tree: Any) -> bool:
    return all(bool(np.isfinite(x).all()) for x in jax.tree.leaves(tree))


def _check_answer(scored: Scored, bench: Bench, batch: int) -> None:
    assert isinstance(scored.out, LossOutput), "a loss returns (loss, flaxrl.LossOutput)"
    assert scored.loss.shape == () and scored.loss.dtype == jnp.float32, "the loss is a float32 scalar"
    assert _finite(scored.loss), "the loss is not finite"
    assert _finite(scored.gradient), "the gradient is not finite"
    assert any(np.any(g) for g in jax.tree.leaves(scored.gradient)), "no gradient flows"
    assert jax.tree.structure(scored.gradient) == jax.tree.structure(bench.params)
    for name, metric in scored.out.metrics.items():
        assert "/" not in name, f"metric {name!r}: the update puts 'loss/' before the name"
        pair = metric if isinstance(metric, tuple) else (metric, 1.0)
        assert len(pair) == 2 and all(jnp.shape(x) == () for x in pair), f"metric {name!r}: a scalar or (total, count)"
        assert _finite(pair), f"metric {name!r} is not finite"
    priorities = scored.out.priorities
    if priorities is not None:
        assert priorities.shape == (batch,), f"priorities have shape {priorities.shape}, not [B]"
        assert (np.asarray(priorities) >= 0).all() and _finite(priorities), "priorities are finite and >= 0"


def _check_masked_rows(bench: Bench, trajectory: Trajectory, scored: Scored) -> None:
    """What answers a LAST row was never executed: it neither counts nor matters, be it NaN."""
    mask = np.asarray(trajectory.mask)

    def spoil(x: Any) -> Any:
        x = np.array(x)
        x[~mask] = np.nan if x.dtype.kind == "f" else 77
        return x

    answering = ("action", "reward", "discount", "log_prob", "value")
    fields = {k: jax.tree.map(spoil, getattr(trajectory, k)) for k in answering}
    _same(bench.score(bench.params, trajectory.replace(**fields)), scored, "fields of masked rows matter", 0.0)

    unused = np.concatenate([~mask, np.ones_like(mask[:1])])
    for path, x in jax.tree_util.tree_leaves_with_path(scored.influence):
        name = jax.tree_util.keystr(path)
        # A loss may unroll the rows alone that it learns from, without the bootstrap row.
        rows_of = unused[: len(x)]
        rule = f"gradient of {name} on a LAST or bootstrap row: targets are constants"
        assert not np.any(np.asarray(x)[rows_of]), rule

    # Envs whose rows are all masked are padding: every mean is over valid rows, so they change nothing.
    padded = bench.trajectory(np.concatenate([EPISODES, np.full_like(EPISODES, LAST)], axis=1))
    own = jax.tree.map(lambda x, y: np.concatenate([x, y[:, x.shape[1] :]], axis=1), trajectory, padded)
    both = bench.score(bench.params, own)
    _same((both.loss, both.gradient), (scored.loss, scored.gradient), "masked rows count in a mean")


def _check_order(bench: Bench, trajectory: Trajectory, scored: Scored) -> None:
    order = np.array([2, 0, 3, 1])
    shuffled = bench.score(bench.params, jax.tree.map(lambda x: x[:, order], trajectory))
    rule = "the order of the envs matters"
    _same((shuffled.loss, shuffled.gradient), (scored.loss, scored.gradient), rule)
    _same(shuffled.out.metrics, scored.out.metrics, rule)
    _same(shuffled.influence, jax.tree.map(lambda x: x[:, order], scored.influence), rule)
    if scored.out.priorities is not None:
        _same(shuffled.out.priorities, scored.out.priorities[order], "priorities are in the batch's order")


def _check_isolation(bench: Bench, trajectory: Trajectory, scored: Scored) -> None:
    """Rewards of env 0's second episode (rows 4 on) do not move its first (rows 0 to 2), nor the other way round."""
    reward = np.asarray(trajectory.reward)
    for changed, kept in ((slice(4, None), slice(0, 3)), (slice(0, 3), slice(4, None))):
        other = reward.copy()
        other[changed, 0] += 5.0
        after = bench.score(bench.params, trajectory.replace(reward=other)).influence
        _same(after[kept, 0], scored.influence[kept, 0], "an episode's rewards reach another episode")

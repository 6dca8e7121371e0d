"""What flows between envs, agents, sources and losses.

Every leaf of every batch is `[T, B, ...]`, time first. Letters: T time, B batch, A actions, D devices.

The episode rule, once for all envs and losses: the final observation of an episode is a real row marked LAST; the step
after it ignores its action and answers FIRST with reward 0. So termination and truncation differ only in `discount`
(0 where terminated, else 1), and every target is right by two factors: `discount * gamma` and `lambda * continues`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state

FIRST, MID, LAST = 0, 1, 2
"""Values of `step_type` (int8): first row of an episode, any row between, row of the final observation."""

Array = Any  # a jax.Array, a tracer or a numpy array
PyTree = Any
Params = Any
Carry = Any
Metrics = dict[str, Any]  # name -> a scalar, or a (total, count) pair


class Timestep(struct.PyTreeNode):
    """What a batch of envs answers; every leaf is `[B, ...]`.

    Attributes:
        observation: tree of arrays.
        reward: float32, raw; 0 on FIRST rows.
        discount: float32; 0 where the episode terminated, else 1 (truncated too). Gamma belongs to the loss.
        step_type: int8; FIRST, MID or LAST.
        action_mask: bool `[B, A]`, True where legal; None where the env has no masks.
        episode_return: float32; raw total reward of the running episode, final where LAST.
        episode_length: int32; actions taken in the running episode, final where LAST.
    """

    observation: PyTree
    reward: Array
    discount: Array
    step_type: Array
    action_mask: Array | None
    episode_return: Array
    episode_length: Array


class AgentInput(struct.PyTreeNode):
    """What a model sees: `[T, B, ...]` when unrolled, `[B, ...]` in `act`.

    Attributes:
        observation: tree of arrays.
        step_type: int8.
        action_mask: bool `[..., A]` or None.
        last_action: the action that led here; 0 on FIRST rows, like action 0 (`first` tells them apart); None unless
            the model asks for it.
        last_reward: float32, the raw reward that came with it; 0 on FIRST rows; None unless the model asks for it.
    """

    observation: PyTree
    step_type: Array
    action_mask: Array | None = None
    last_action: Array | None = None
    last_reward: Array | None = None

    @property
    def first(self) -> Array:
        """Bool: True on the first row of an episode (a recurrent state is reset before it)."""
        return self.step_type == FIRST


class Trajectory(struct.PyTreeNode):
    """A batch of unrolls with one more input than actions.

    Attributes:
        inputs: AgentInput `[T+1, B, ...]`; the last row bootstraps and is the first row of the next unroll.
        action: `[T, B, ...]`, answering `inputs[t]`.
        reward: float32 `[T, B]`, raw reward of that action.
        discount: float32 `[T, B]`, 0 where that action terminated the episode.
        log_prob: float32 `[T, B]` of the acting policy, None for policies without one.
        value: float32 `[T, B]` of the acting policy, None where no head gives one.
        carry: recurrent state BEFORE `inputs[0]`, leaves `[1, B, ...]`.
        weight: float32 `[1, B]` importance weight (replay), else None.
    """

    inputs: AgentInput
    action: Array
    reward: Array
    discount: Array
    log_prob: Array | None
    value: Array | None
    carry: Carry = ()
    weight: Array | None = None

    @property
    def mask(self) -> Array:
        """Bool `[T, B]`: False where `inputs[t]` is LAST, since that action was never executed."""
        return self.inputs.step_type[:-1] != LAST

    @property
    def continues(self) -> Array:
        """Float32 `[T, B]`: 0 where `inputs[t+1]` is LAST; lambda returns and n-step windows are cut there."""
        return (self.inputs.step_type[1:] != LAST).astype(jnp.float32)

    def sanitized(self) -> Trajectory:
        """Replaces the action-answering fields of masked rows, which may hold anything, by zeros."""
        mask = self.mask

        def clean(x: Array) -> Array:
            m = mask.reshape(mask.shape + (1,) * (x.ndim - 2))
            return jnp.where(m, x, jnp.zeros_like(x))

        answering = (self.action, self.reward, self.discount, self.log_prob, self.value)
        action, reward, discount, log_prob, value = jax.tree.map(clean, answering)
        return self.replace(action=action, reward=reward, discount=discount, log_prob=log_prob, value=value)


class Output(struct.PyTreeNode):
    """What a model says, `[T, B, ...]`; what a head does not produce stays None.

    Slicing, flattening and minibatching act on the arrays; `policy` is the distribution made of `policy_params`.

    Attributes:
        policy_params: tree of float32 arrays that describe the policy (logits `[T, B, A]` of a categorical one).
        value: float32 `[T, B]`.
        q: float32 `[T, B, A]`, action values.
        make_policy: the head's static builder: `policy_params` -> distribution; hashable, and equal each time it is
            made (a module-level function, or a frozen dataclass), else every call compiles anew.
    """

    policy_params: PyTree = None
    value: Array | None = None
    q: Array | None = None
    make_policy: Callable[[PyTree], Any] | None = struct.field(pytree_node=False, default=None)

    @property
    def policy(self) -> Any:
        """The action distribution: `log_prob`, `sample`, `mode`, `entropy`, `kl_divergence`."""
        if self.make_policy is None:
            raise ValueError("this model's head gives no policy (make_policy is None): it cannot feed a policy loss")
        return self.make_policy(self.policy_params)

    def __getitem__(self, index: Any) -> Output:
        """Slices every leaf: `output[:-1]` drops the bootstrap row."""
        return jax.tree.map(lambda x: x[index], self)


class LossOutput(struct.PyTreeNode):
    """What a loss tells besides its value.

    Attributes:
        metrics: name -> scalar or (total, count) pair; reduced on the device between logs.
        priorities: float32 `[B]` for a replay, or None.
    """

    metrics: Metrics
    priorities: Array | None = None


class ActContext(struct.PyTreeNode):
    """What an exploration policy may know besides the model's output.

    Attributes:
        env_ids: int32 `[B]`, global over all envs of all threads and processes.
        progress: float32 scalar, fraction of `total_steps` done.
    """

    env_ids: Array
    progress: Array


class TrainState(train_state.TrainState):
    """Flax's TrainState (step = optimizer steps, params, tx, opt_state, apply_fn) and:

    Attributes:
        updates: int32, iterates done, +1 each, whatever was skipped; every key folds it in.
        skipped_in_row: int32, minibatch steps skipped one after another for being non-finite, 0 after a good one.
        target_params: parameters of the target network, or None.
        variables: Linen collections other than params (running statistics), the same in acting and in all of an update.
    """

    updates: Array
    skipped_in_row: Array
    target_params: Params | None
    variables: PyTree

    @classmethod
    def init(cls, apply_fn: Callable, variables: PyTree, tx: optax.GradientTransformation, target: bool) -> TrainState:
        """A fresh state from Linen's `variables`; `target` keeps a copy of the parameters for a target network."""
        rest = {k: v for k, v in variables.items() if k != "params"}
        params = variables["params"]
        return cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=tx.init(params),
            updates=jnp.zeros((), jnp.int32),
            skipped_in_row=jnp.zeros((), jnp.int32),
            target_params=jax.tree.map(jnp.copy, params) if target else None,
            variables=rest,
        )


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean of `x` where `mask`, over the whole (global) batch; 0 where nothing is valid.

    Invalid entries may hold NaN: they are replaced before the sum, so neither value nor gradient sees them.

    Args:
        x: float `[...]`.
        mask: bool, same shape.
    """
    chex.assert_equal_shape([x, mask])
    x = jnp.where(mask, x, jnp.zeros_like(x)).astype(jnp.float32)
    return jnp.sum(x) / jnp.maximum(jnp.sum(mask), 1)

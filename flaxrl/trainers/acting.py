"""How an agent acts where nothing is learned: in an evaluation, and in the film of one."""

from __future__ import annotations

from typing import Any

from flaxrl.trainers.setup import act_context
from flaxrl.types import AgentInput, Array, PyTree

MAX_STEPS = 108_000
"""An episode that has not ended after as many steps is cut there, and counted as unfinished."""


class EvaluationStopped(Exception):
    """An evaluation ended before its episodes did, because it was told to."""


def choose(
    agent: Any, greedy: bool, model: PyTree, inputs: AgentInput, carry: Any, key: Array, env_ids: Array
) -> tuple[Array, Any]:
    """Actions `[N, ...]` and the new carry.

    Args:
        agent: the Linen module.
        greedy: the policy's mode: no key for the stream 'sample'.
        model: the agent's variables.
        inputs: rows `[N, ...]`.
        carry: `[N, ...]`.
        key: for sampling; env i draws the same whatever N is.
        env_ids: which envs they are, `[N]`.
    """
    rngs = {} if greedy else {"sample": key}
    action, _, _, carry = agent.apply(model, inputs, carry, act_context(env_ids, 1.0), rngs=rngs, method="act")
    return action, carry

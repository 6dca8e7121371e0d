"""Every registered loss passes the loss contract, and a broken loss does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from loss_contract import EPISODES, SPEC, Bench, check_loss

from flaxrl.build import REGISTRY, build, config_for
from flaxrl.losses import Loss, discounted_returns
from flaxrl.losses.vtrace import VTrace
from flaxrl.models.agent import Agent
from flaxrl.models.cores import LSTM
from flaxrl.models.heads import PolicyValue
from flaxrl.models.policies import Sampled
from flaxrl.models.torsos import MLP
from flaxrl.types import LossOutput, masked_mean

LOSSES = [name for name, path in REGISTRY.items() if path.startswith("flaxrl.losses.")]
HEADS: dict[str, str] = {}
"""Registered head of the losses that policy_value does not serve."""


OVER_THE_BATCH: dict[str, dict[str, Any]] = {"ppo": {"normalize_advantage": False}}
"""Losses that normalise over the batch on purpose, and the fields with which they do not."""


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name):
    head = build(config_for(HEADS[name]), action_spec=SPEC) if name in HEADS else None
    check_loss(build(config_for(name)), head=head, isolated=name not in OVER_THE_BATCH)


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_loss_of_rows_alone(name):
    check_loss(build(config_for(name, **OVER_THE_BATCH[name])))


@dataclasses.dataclass(frozen=True)
class Reinforce(Loss):
    """REINFORCE as a user writes it, or with one rule broken, by name."""

    rule: str = ""

    def __call__(self, unroll: Any, params: Any, target_params: Any, batch: Any, rngs: Any) -> Any:
        output = unroll(params, batch, rngs)
        policy = output[:-1].policy
        returns = discounted_returns(batch, 0.9)
        log_prob, mask = policy.log_prob(batch.action), batch.mask
        if self.rule not in ("", "subtracts masked rows"):
            log_prob = jnp.where(mask, log_prob, 0.0)  # so that the rule is the only fault
        if self.rule == "leaks":
            back = jax.lax.associative_scan(jnp.add, batch.reward, reverse=True)
            returns = jnp.where(mask, back, 0.0)
        if self.rule == "gradient through targets":
            returns = returns + output.value[1:]
        terms = log_prob * returns
        loss = -masked_mean(terms, mask)
        if self.rule == "padded mean":
            loss = -jnp.mean(jnp.where(mask, terms, 0.0))
        if self.rule == "weighs masked rows":
            loss = loss - jnp.mean(output.value[:-1])
        if self.rule == "subtracts masked rows":
            loss = -(jnp.sum(terms) - jnp.sum(jnp.where(mask, 0.0, terms))) / jnp.maximum(jnp.sum(mask), 1)
        if self.rule == "first env counts twice":
            loss = loss - masked_mean(terms[:, 0], mask[:, 0])
        if self.rule == "keeps an axis":
            loss = loss[None]
        if self.rule == "standard deviation":
            loss = loss / jnp.std(terms, where=mask, ddof=1)
        metric = log_prob if self.rule == "metric of rows" else loss
        name = "loss/pg" if self.rule == "name with a slash" else "pg"
        priorities = jnp.zeros(3) if self.rule == "short priorities" else None
        return loss, LossOutput({name: jax.lax.stop_gradient(metric)}, priorities)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("leaks", "reach another episode"),
        ("gradient through targets", "LAST or bootstrap row"),
        ("padded mean", "count in a mean"),
        ("weighs masked rows", "LAST or bootstrap row"),
        ("subtracts masked rows", "not finite"),
        ("first env counts twice", "order of the envs"),
        ("standard deviation", "T = 1"),
        ("metric of rows", "scalar or"),
        ("name with a slash", "puts 'loss/'"),
        ("short priorities", r"not \[B\]"),
    ],
)
def test_broken_losses_are_caught(rule, message):
    with pytest.raises(AssertionError, match=message):
        check_loss(Reinforce(rule), isolated=rule != "standard deviation")


def test_a_scalar_is_needed():
    with pytest.raises(TypeError, match="scalar"):
        check_loss(Reinforce("keeps an axis"))


def test_the_users_loss_is_fine():
    check_loss(Reinforce())


def test_with_a_recurrent_agent():
    check_loss(Reinforce(), agent=Agent(MLP((4,)), LSTM(4), PolicyValue(SPEC, 1.0), Sampled(), SPEC))


def test_the_contracts_trajectory_has_what_it_is_for():
    """Ends of both kinds, off-policy actions, LAST rows without a legal action and with the filler action illegal."""
    bench = Bench(VTrace())
    trajectory = bench.trajectory(EPISODES)
    ends = trajectory.discount[EPISODES[1:] == 2]
    assert 0 in ends and 1 in ends
    assert bench.score(bench.params, trajectory).out.metrics["kl_behaviour"] > 0.01
    assert trajectory.inputs.action_mask is not None
    on_last = trajectory.inputs.action_mask[EPISODES == 2]
    assert not on_last[:, 0].any() and not on_last.any(-1).all() and on_last.any()

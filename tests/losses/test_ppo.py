"""The PPO loss: golden vectors for GAE and for the loss, masks, schedules, the early stop's question, fields."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import close, expand, vector, vectors

from flaxrl.errors import ConfigError
from flaxrl.losses.ppo import PPO, PPOBatch, normalized
from flaxrl.losses.returns import generalized_advantages
from flaxrl.models.heads import categorical, mask_logits
from flaxrl.types import FIRST, LAST, MID, AgentInput, Output, Trajectory


def fake_unroll(params: Any, batch: Any, rngs: Any = None) -> Output:
    """A model whose parameters are its output."""
    del rngs
    logits = mask_logits(params["logits"], batch.inputs.action_mask)
    return Output(policy_params=logits, value=params["value"], make_policy=categorical)


def golden_batch(v: dict[str, Any]) -> tuple[dict[str, Any], PPOBatch]:
    """A vector's samples as one row `[1, N]`; where its weight is 0 a masked row, full of what a loss must not see."""
    inputs = v["inputs"]

    def row(name: str) -> Any:
        return jnp.asarray(inputs[name], jnp.float32)[None]

    mask = jnp.asarray(inputs.get("weight", [1] * len(inputs["a"])), bool)[None]
    batch = PPOBatch(
        inputs=AgentInput(
            observation=jnp.zeros((*mask.shape, 1)),
            step_type=jnp.where(mask, MID, LAST).astype(jnp.int8),
            action_mask=jnp.asarray(inputs["mask"], bool)[None],
        ),
        action=jnp.asarray(inputs["a"], jnp.int32)[None],
        log_prob=jnp.where(mask, row("logp_old"), -77.0),
        value=row("v_old"),
        advantage=jnp.where(mask, row("adv"), 1e6),
        mask=mask,
    )
    return {"logits": row("logits"), "value": row("v")}, batch


def golden_loss(v: dict[str, Any], **fields: Any) -> PPO:
    inputs = v["inputs"]
    return PPO(
        clip=inputs["clip"],
        value_clip=inputs["vclip"],
        value_cost=inputs["cv"],
        entropy_cost=inputs["ce"],
        normalize_advantage=inputs["normalise"],
        **fields,
    )


def scored(loss: PPO, params: Any, batch: PPOBatch) -> Any:
    def f(params: Any) -> Any:
        return loss(fake_unroll, params, None, batch, {})

    return jax.jit(jax.value_and_grad(f, has_aux=True))(params)


@pytest.mark.parametrize("v", vectors("ppo"))
def test_golden_policy_terms(v):
    """Everything but the value loss, whose targets are of no advantage here."""
    params, batch = golden_batch(v)
    (_, out), grads = scored(golden_loss(v), params, batch)
    expected = v["expected"]
    close(out.metrics["policy"], expected["pg_loss"], v)
    close(out.metrics["entropy"], expected["entropy"], v)
    close(out.metrics["clip_fraction"], expected["clip_fraction"], v)
    close(out.metrics["kl_behaviour"], expected["approx_kl_k3"], v)
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("v", vectors("ppo"))
def test_golden_value_loss(v):
    """With advantages of ret - v_old, so that V + A is the vector's return."""
    params, batch = golden_batch(v)
    advantage = jnp.asarray(v["inputs"]["ret"], jnp.float32)[None] - batch.value
    value = scored(golden_loss(v), params, batch.replace(advantage=advantage))[0][1].metrics["value"]
    close(value / v["inputs"]["cv"], v["expected"]["v_loss"], v)


@pytest.mark.parametrize("v", vectors("ppo"))
def test_golden_total(v):
    params, batch = golden_batch(v)
    loss, expected = golden_loss(v), v["expected"]
    total, out = scored(loss, params, batch)[0]
    value = out.metrics["value"]
    close(total - value + v["inputs"]["cv"] * expected["v_loss"], expected["total"], v)


def test_the_value_loss_is_the_larger_of_the_two():
    """R 10, V 5, v 1, clip 0.2: 0.5 * max(81, (4.8 - 10)^2 = 27.04) = 40.5."""
    batch = golden_batch(vector("ppo_single"))[1].replace(value=jnp.full((1, 1), 5.0), advantage=jnp.full((1, 1), 5.0))
    params = {"logits": jnp.zeros((1, 1, 3)), "value": jnp.ones((1, 1))}
    for clip, expected in ((0.2, 40.5), (None, 40.5)):
        found = scored(PPO(value_cost=1.0, value_clip=clip), params, batch)[0][1].metrics["value"]
        np.testing.assert_allclose(found, expected)
    # The other way round: v 9.9 is almost right, and 5.2 is what it is charged for: 0.5 * 4.8^2 = 11.52.
    params["value"] = jnp.full((1, 1), 9.9)
    found = scored(PPO(value_cost=1.0), params, batch)[0][1].metrics["value"]
    np.testing.assert_allclose(found, 11.52, rtol=1e-6)


GAE = [p for p in vectors("gae") if "valid" not in p.values[0]["inputs"]]
"""Those whose final observations are no rows yet."""


def test_golden_advantages_of_rows_by_the_episode_rule():
    """This vector has its final observation as a row (index 2), as every env here answers."""
    v = vector("gae_next_step_autoreset")
    inputs = v["inputs"]
    value = np.append(inputs["v"], inputs["v_next"][-1]).astype(np.float32)[:, None]
    found = generalized_advantages(
        np.asarray(inputs["r"], np.float32)[:, None],
        np.full((4, 1), inputs["gamma"], np.float32),
        np.asarray([1, 0, 1, 1], np.float32)[:, None],
        value,
        inputs["lam"],
    )
    valid = np.asarray(inputs["valid"])
    close(np.asarray(found)[valid, 0], np.asarray(v["expected"]["advantages"])[valid], v)


@pytest.mark.parametrize("v", GAE)
def test_golden_advantages(v):
    inputs, rows = v["inputs"], expand(v["inputs"])
    found = jax.jit(generalized_advantages, static_argnums=4)(
        rows.rows(inputs["r"]),
        inputs["gamma"] * rows.discount,
        (rows.step_type[1:] != LAST).astype(np.float32),
        rows.value,
        inputs["lam"],
    )
    close(rows.transitions(found), v["expected"]["advantages"], v)


@pytest.mark.parametrize("v", GAE)
@pytest.mark.parametrize("stored", [True, False])
def test_prepare_on_the_golden_rows(v, stored):
    """NaN on masked rows; values of LAST rows and of the bootstrap row come from the model, stored ones from acting."""
    inputs, rows = v["inputs"], expand(v["inputs"])
    masked = rows.source[:, None] < 0
    trajectory = Trajectory(
        inputs=AgentInput(jnp.zeros((*rows.value.shape, 1)), jnp.asarray(rows.step_type)),
        action=jnp.zeros(rows.discount.shape, jnp.int32),
        reward=jnp.asarray(rows.rows(inputs["r"], np.nan)),
        discount=jnp.where(masked, np.nan, rows.discount),
        log_prob=jnp.where(masked, np.nan, 0.0),
        value=jnp.where(masked, np.nan, rows.value[:-1]) if stored else None,
    ).sanitized()
    answered = jnp.concatenate([masked, jnp.ones((1, 1), bool)]) if stored else True
    params = {"value": jnp.where(answered, rows.value, 123.0), "logits": jnp.zeros((*rows.value.shape, 2))}
    loss = PPO(discount=inputs["gamma"], lambda_=inputs["lam"])
    state: Any = type("State", (), {"params": params})
    batch = jax.jit(lambda t: loss.prepare(fake_unroll, state, t))(trajectory)
    close(rows.transitions(batch.advantage), v["expected"]["advantages"], v)
    close(rows.transitions(batch.value + batch.advantage), v["expected"]["returns"], v)
    assert batch.mask.tolist() == (~masked).tolist()
    assert {x.shape[0] for x in jax.tree.leaves(batch)} == {len(masked)}, "the bootstrap row is left out"


def test_rewards_are_clipped_where_asked():
    trajectory = Trajectory(
        inputs=AgentInput(jnp.zeros((2, 1, 1)), jnp.asarray([[FIRST], [MID]], jnp.int8)),
        action=jnp.zeros((1, 1), jnp.int32),
        reward=jnp.full((1, 1), 7.0),
        discount=jnp.zeros((1, 1)),
        log_prob=jnp.zeros((1, 1)),
        value=jnp.zeros((1, 1)),
    )
    state: Any = type("State", (), {"params": {"value": jnp.zeros((2, 1)), "logits": jnp.zeros((2, 1, 2))}})
    for bound, expected in ((None, 7.0), (1.0, 1.0)):
        assert PPO(max_abs_reward=bound).prepare(fake_unroll, state, trajectory).advantage == expected


@pytest.mark.parametrize("advantage", [[3.0, 3.0, 3.0, 9.0], [-0.1, -0.1, -0.1, 9.0], [0.0, 0.0, 0.0, 9.0]])
def test_equal_advantages_are_left_as_they_are(advantage):
    x = jnp.asarray([advantage])
    mask = jnp.asarray([[True, True, True, False]])
    np.testing.assert_array_equal(normalized(x, mask), x)


def test_normalisation_is_by_the_valid_rows():
    """1, 2, 3 with a row of 100 masked: mean 2, variance 2/3."""
    found = normalized(jnp.asarray([[1.0, 100.0, 2.0, 3.0]]), jnp.asarray([[True, False, True, True]]))
    np.testing.assert_allclose(found[0, [0, 2, 3]], [-(1.5**0.5), 0.0, 1.5**0.5], atol=1e-6)


def test_small_differences_are_normalised_too():
    found = normalized(jnp.asarray([[1e-3, 2e-3]]) + 1.0, jnp.ones((1, 2), bool))
    np.testing.assert_allclose(found, [[-1.0, 1.0]], rtol=1e-3)


def test_the_clip_and_the_entropy_bonus_move_linearly():
    loss = PPO(clip=0.2, clip_final=0.1, entropy_cost=0.02, entropy_cost_final=0.0)
    for progress, clip, entropy_cost in ((0.0, 0.2, 0.02), (0.5, 0.15, 0.01), (1.0, 0.1, 0.0), (1.5, 0.1, 0.0)):
        now = loss.at(jnp.float32(progress))
        np.testing.assert_allclose([now.clip, now.entropy_cost], [clip, entropy_cost], atol=1e-7)
    constant = PPO().at(jnp.float32(0.5))
    assert (constant.clip, constant.entropy_cost) == (0.2, 0.01)


def test_the_clip_in_force_is_the_one_of_now():
    """Ratio 1.4706, advantage 1, mid-way between clips of 0.2 and 0.4: -1.3."""
    params, batch = golden_batch(vector("ppo_single"))
    found = scored(PPO(clip_final=0.4).at(jnp.float32(0.5)), params, batch)[0][1].metrics
    np.testing.assert_allclose(found["policy"], -1.3, rtol=1e-6)
    np.testing.assert_allclose(found["clip_range"], 0.3, rtol=1e-6)


def test_the_kl_penalty_is_added():
    v = vector("ppo_plain")
    params, batch = golden_batch(v)
    plain, penal = (scored(golden_loss(v, kl_cost=c), params, batch)[0][0] for c in (0.0, 3.0))
    close(penal - plain, 3 * v["expected"]["approx_kl_k3"], v)


def test_stop_is_asked_only_with_a_target():
    assert PPO().stop({"kl_behaviour": jnp.float32(9.0)}) is None
    loss = PPO(target_kl=0.1)
    assert [bool(loss.stop({"kl_behaviour": jnp.float32(x)})) for x in (0.05, 0.2)] == [False, True]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": float("nan")}, "clip"),
        ({"clip_final": -1.0}, "clip_final"),
        ({"value_clip": 0.0}, "value_clip"),
        ({"discount": 1.5}, "discount"),
        ({"lambda_": -0.1}, "lambda_"),
        ({"entropy_cost": -1.0}, "entropy_cost"),
        ({"target_kl": 0.0}, "target_kl"),
        ({"minibatch": "rows"}, "sequences, steps"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ConfigError, match=message):
        PPO(**fields)


def test_a_head_without_a_value_is_refused():
    trajectory = Trajectory(
        inputs=AgentInput(jnp.zeros((2, 1, 1)), jnp.asarray([[FIRST], [MID]], jnp.int8)),
        action=jnp.zeros((1, 1), jnp.int32),
        reward=jnp.zeros((1, 1)),
        discount=jnp.ones((1, 1)),
        log_prob=None,
        value=None,
    )
    state: Any = type("State", (), {"params": None})
    with pytest.raises(ConfigError, match="policy_value"):
        PPO().prepare(lambda params, batch, rngs=None: Output(), state, trajectory)

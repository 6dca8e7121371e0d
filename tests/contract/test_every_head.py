"""Every registered head passes the head contract, and a broken head does not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from head_contract import check_head

from flaxrl.build import REGISTRY, build, config_for
from flaxrl.envs.spec import Box, Discrete, MultiDiscrete
from flaxrl.errors import ConfigError
from flaxrl.models.distributions import Gaussian, categorical, mask_logits
from flaxrl.types import Output

SPECS = (
    Discrete(4),
    Discrete(3, start=1),
    MultiDiscrete((3, 4)),
    Box((-1.0, -2.0), (1.0, 2.0)),
    Box((-np.inf, -1.0), (np.inf, np.inf)),
)
HEADS = [name for name, path in REGISTRY.items() if path.startswith("flaxrl.models.heads:")]


@pytest.mark.parametrize("name", HEADS)
def test_head(name):
    """With each kind of action that it takes."""
    checked = 0
    for spec in SPECS:
        try:
            head = build(config_for(name), action_spec=spec)
        except ConfigError:
            continue
        check_head(head, spec)
        checked += 1
    assert checked, f"{name} takes none of {SPECS}"


@pytest.mark.parametrize("fields", [{}, {"distribution": "tanh_gaussian"}], ids=["gaussian", "tanh_gaussian"])
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_policy_value_on_boxes(fields, state_dependent_std):
    for spec in SPECS:
        if isinstance(spec, Box):
            block = config_for("policy_value", state_dependent_std=state_dependent_std, **fields)
            check_head(build(block, action_spec=spec), spec)


class Broken(nn.Module):
    """A head that breaks one rule, by name."""

    rule: str

    @nn.compact
    def __call__(self, x: Any, action_mask: Any) -> Any:
        logits, value = nn.Dense(4)(x), nn.Dense(1)(x)[..., 0]
        if self.rule == "returns a tuple":
            return logits, value
        if self.rule == "value keeps its axis":
            value = value[..., None]
        if self.rule == "half precision":
            value = value.astype(jnp.bfloat16)
        if self.rule == "looks at other rows":
            logits = logits - logits.mean(axis=-2, keepdims=True)
        if self.rule == "large negative number":
            logits = logits if action_mask is None else jnp.where(action_mask, logits, -1e9)
        elif self.rule == "nothing legal is minus infinity":
            logits = logits if action_mask is None else jnp.where(action_mask, logits, -jnp.inf)
        elif self.rule != "ignores the mask":
            logits = mask_logits(logits, action_mask)
        make = (lambda p: categorical(p)) if self.rule == "a new builder each time" else categorical
        return Output(policy_params=logits, value=value, make_policy=make)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("returns a tuple", "returns flaxrl.Output"),
        ("value keeps its axis", r"value has shape \(4, 3, 1\)"),
        ("half precision", "bfloat16"),
        ("looks at other rows", "rows beside it|scanned over time"),
        ("a new builder each time", "make_policy made anew"),
        ("ignores the mask", "illegal"),
        ("large negative number", "counts as all-legal|has a probability"),
        ("nothing legal is minus infinity", "counts as all-legal"),
    ],
)
def test_broken_heads_are_caught(rule, message):
    with pytest.raises(AssertionError, match=message):
        check_head(Broken(rule), Discrete(4))


class HalfEntropy(Gaussian):
    def entropy(self) -> Any:
        return super().entropy() / 2


class HalfKL(Gaussian):
    def kl_divergence(self, other: Any) -> Any:
        return super().kl_divergence(other) / 2


class BrokenGaussian(nn.Module):
    """A head with a distribution of the test's."""

    make: Any

    @nn.compact
    def __call__(self, x: Any, action_mask: Any) -> Any:
        params = {"mean": nn.Dense(2, name="a")(x), "log_std": nn.Dense(2, name="b")(x)}
        return Output(policy_params=params, make_policy=self.make)


@pytest.mark.parametrize(
    ("make", "message"), [(HalfEntropy, "entropy is not"), (HalfKL, "KL is not"), (Gaussian, None)]
)
def test_sums_over_components_are_checked(make, message):
    spec = Box((-1.0, -2.0), (1.0, 2.0))
    if message is None:
        check_head(BrokenGaussian(make), spec)
        return
    with pytest.raises(AssertionError, match=message):
        check_head(BrokenGaussian(make), spec)


def test_the_broken_head_is_fine_otherwise():
    check_head(Broken("none"), Discrete(4))

"""PPO on gymnax's MinAtar games.

    python main.py --config=configs/ppo_minatar.py                          # Breakout-MinAtar
    python main.py --config=configs/ppo_minatar.py:Freeway-MinAtar
    python main.py --config=configs/ppo_minatar.py:SpaceInvaders-MinAtar
    python main.py --config=configs/ppo_minatar.py:Asterix-MinAtar

What each game reaches on two CPU cores: docs/results.md.
"""

import re

import flaxrl
from flaxrl import config_for

STEPS = {"freeway": 319_488, "asterix": 3_194_880}
"""Budgets of the published curves, in whole updates, by how the game's name begins; the others have OTHERS."""

OTHERS = 1_277_952


def get_config(game: str = "Breakout-MinAtar"):
    name = re.sub(r"[^a-z0-9]", "", game.lower())  # as it is looked up: any spelling
    return flaxrl.run_config(
        seed=0,
        total_steps=next((steps for first, steps in STEPS.items() if name.startswith(first)), OTHERS),
        env=config_for("gymnax", game=game),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64), activation="relu"),
            value_torso=config_for("mlp", hidden=(64, 64), activation="relu"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("ppo", discount=0.99, lambda_=0.95, clip=0.2, value_clip=0.2, entropy_cost=0.01),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=5e-3,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("jax_rollout", num_envs=64, unroll_length=128, updates_per_call=1),
        learner=config_for("learner", epochs=4, minibatches=8),
        log=config_for("log", every=20_000),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )

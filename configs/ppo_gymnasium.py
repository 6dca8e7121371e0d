"""PPO on any env of gymnasium's registry, on the host.

    python main.py --config=configs/ppo_gymnasium.py                    # CartPole-v1
    python main.py --config=configs/ppo_gymnasium.py:Acrobot-v1
    python main.py --config=configs/ppo_gymnasium.py:Pendulum-v1        # continuous actions

The settings are for small control tasks; larger ones want more envs, steps, and `env.workers`. Rewards are scaled, so
that values have about the same size whatever an env pays.
"""

import flaxrl
from flaxrl import config_for

DISCOUNTS = {"Pendulum-v1": 0.9}
"""Envs in which an action shows its worth within a few steps; the others have 0.99."""


def get_config(env_id: str = "CartPole-v1"):
    discount = DISCOUNTS.get(env_id, 0.99)
    return flaxrl.run_config(
        seed=0,
        total_steps=499_712,
        env=config_for("gymnasium", id=env_id),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            value_torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("ppo", discount=discount, lambda_=0.95, value_clip=None, entropy_cost=0.0),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=5e-4,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("actor_threads", num_envs=8, unroll_length=128, threads=0),
        learner=config_for("learner", epochs=10, minibatches=8, reward_scaling=discount),
        log=config_for("log", every=10_000),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=200_000),
    )

"""PPO with a Gaussian policy on gymnax's Pendulum-v1.

    python main.py --config=configs/ppo_pendulum.py
    python main.py --config=configs/ppo_pendulum.py --config.model.head.distribution=tanh_gaussian

On two CPU cores less than a minute; greedy return at the end -176 (five seeds).
"""

import flaxrl
from flaxrl import config_for


def get_config():
    return flaxrl.run_config(
        seed=0,
        total_steps=999_424,
        env=config_for("gymnax", game="Pendulum-v1"),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            value_torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        # Rewards reach -16 a step: a value clipped to 0.2 a step would never get there.
        loss=config_for("ppo", discount=0.9, lambda_=0.95, value_clip=None, entropy_cost=0.0),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=1e-3,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("jax_rollout", num_envs=16, unroll_length=128, updates_per_call=8),
        learner=config_for("learner", epochs=10, minibatches=8),
        log=config_for("log", every=20_000),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )

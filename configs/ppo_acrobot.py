"""PPO on gymnax's Acrobot-v1.

    python main.py --config=configs/ppo_acrobot.py

On two CPU cores about ten seconds; greedy return at the end -88 (five seeds), sampled -97.
"""

import flaxrl
from flaxrl import config_for


def get_config():
    return flaxrl.run_config(
        seed=0,
        total_steps=159_744,
        env=config_for("gymnax", game="Acrobot-v1"),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            value_torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("ppo", discount=0.99, lambda_=0.95, entropy_cost=0.01),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=1e-3,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("jax_rollout", num_envs=16, unroll_length=128, updates_per_call=1),
        learner=config_for("learner", epochs=4, minibatches=8),
        log=config_for("log", every=10_000),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )

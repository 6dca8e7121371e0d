"""PPO on gymnax's CartPole-v1, acting and learning in one program.

    python main.py --config=configs/ppo_cartpole.py
    python main.py --config=configs/ppo_cartpole.py --config.num_seeds=8    # eight seeds in one program

On two CPU cores about ten seconds; return 500 at the end, greedy and sampled, five of five seeds.
"""

import flaxrl
from flaxrl import config_for


def get_config():
    return flaxrl.run_config(
        seed=0,
        total_steps=499_712,
        env=config_for("gymnax", game="CartPole-v1"),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            value_torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("ppo", discount=0.99, lambda_=0.95, clip=0.2, value_clip=0.2, entropy_cost=0.01),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=2.5e-4,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("jax_rollout", num_envs=4, unroll_length=128, updates_per_call=16),
        learner=config_for("learner", epochs=4, minibatches=4),
        log=config_for("log", every=10_000),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )

"""PPO on Atari.

    python main.py --config=configs/ppo_atari.py             # Pong
    python main.py --config=configs/ppo_atari.py:breakout    # any other game

The settings are those that are usual for PPO on Atari (8 envs x 128, 4 epochs, clip 0.1); no run has been measured yet.
"""

import flaxrl
from flaxrl import config_for


def get_config(game: str = "pong"):
    return flaxrl.run_config(
        seed=1,
        total_steps=3_000_000,
        env=config_for("atari", game=game),
        model=config_for(
            "agent",
            torso=config_for("nature_cnn", channels_first=True),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("ppo", discount=0.99, lambda_=0.95, clip=0.1, value_clip=0.1, max_abs_reward=1.0),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=2.5e-4,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("actor_threads", num_envs=8, unroll_length=128, threads=1, prefetch=0),
        learner=config_for("learner", epochs=4, minibatches=4),
        log=config_for("log", every=10_000),
        eval=config_for("eval", every=250_000, episodes=10),
        checkpoint=config_for("checkpoint", every=50_000),
    )

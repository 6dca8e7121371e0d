"""IMPALA (V-trace) on Atari.

    python main.py --config=configs/impala_atari.py             # Pong
    python main.py --config=configs/impala_atari.py:breakout    # any other game

On two CPU cores about 1,000 steps (4,000 frames) a second: the 3M steps of Pong take 53 minutes and end at a score of
20.2 (greedy; sampled 18.4; 100 episodes each). A batch is 24 envs x 32 steps, learned from once in 8 minibatches of 3
envs; with more devices raise `--config.source.num_envs` to a multiple of 8 a device.
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
        loss=config_for(
            "vtrace", discount=0.99, baseline_cost=0.5, entropy_cost=0.001, lambda_=0.95, max_abs_reward=1.0
        ),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=7e-4,
            schedule="linear",
            final_fraction=0.35,
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("actor_threads", num_envs=24, unroll_length=32, threads=1, prefetch=0),
        learner=config_for("learner", minibatches=8),
        log=config_for("log", every=10_000),
        eval=config_for("eval", every=250_000, episodes=10),
        checkpoint=config_for("checkpoint", every=50_000),
    )

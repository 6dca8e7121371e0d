"""Recurrent PPO on CartPole-v1 without velocities: the agent sees positions alone and must remember them.

    python main.py --config=configs/ppo_recurrent.py
    python main.py --config=configs/ppo_recurrent.py:feed_forward       # the same without a memory

On two CPU cores; greedy return at the end 483 (mean of four seeds), without a memory 43 (of two).
"""

import flaxrl
from flaxrl import ConfigError, config_for

CORES = ("gru", "lstm", "feed_forward")


def get_config(core: str = "gru"):
    if core not in CORES:
        raise ConfigError(f"ppo_recurrent takes one of {', '.join(CORES)}; {core!r} is none of them")
    return flaxrl.run_config(
        seed=0,
        total_steps=499_712,
        env=config_for("gymnax", game="CartPole-v1", observed=(0, 2)),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(128,), activation="relu"),
            core=config_for(core) if core == "feed_forward" else config_for(core, features=128),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("ppo", discount=0.99, lambda_=0.95, entropy_cost=0.01, minibatch="sequences"),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=5e-4,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("jax_rollout", num_envs=32, unroll_length=64, updates_per_call=4),
        learner=config_for("learner", epochs=4, minibatches=8),
        log=config_for("log", every=10_000),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )

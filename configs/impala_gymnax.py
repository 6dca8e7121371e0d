"""IMPALA (V-trace) on a gymnax env.

    python main.py --config=configs/impala_gymnax.py
    python main.py --config=configs/impala_gymnax.py:Breakout-MinAtar
"""

import flaxrl
from flaxrl import config_for


def get_config(game: str = "CartPole-v1"):
    return flaxrl.run_config(
        seed=0,
        total_steps=500_000,
        env=config_for("gymnax", game=game),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64)),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("vtrace", discount=0.99, entropy_cost=0.01),
        optimizer=config_for("optimizer", algorithm="adam", learning_rate=2e-3, schedule="linear", max_grad_norm=1.0),
        source=config_for("jax_rollout", num_envs=32, unroll_length=20, updates_per_call=10),
        log=config_for("log", every=20_000),
        eval=config_for("eval", every=100_000, episodes=20),
        checkpoint=config_for("checkpoint", every=200_000),
    )

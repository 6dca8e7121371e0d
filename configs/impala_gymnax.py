"""IMPALA (V-trace) on a gymnax env, acting and learning in one program.

    python main.py --config=configs/impala_gymnax.py                        # CartPole-v1
    python main.py --config=configs/impala_gymnax.py:Breakout-MinAtar
    python main.py --config=configs/impala_gymnax.py:Catch-bsuite
    python main.py --config=configs/impala_gymnax.py:MemoryChain-bsuite     # LSTM

On two CPU cores, greedy return at the end: CartPole 500 in 10 s, Catch 1.00 in 15 s, Breakout-MinAtar 20 to 28 in 80 s,
MemoryChain 1.00 in 20 s.
"""

from typing import Any

import flaxrl
from flaxrl import config_for


def get_config(game: str = "CartPole-v1"):
    minatar, memory = game.lower().endswith("minatar"), "memory" in game.lower()
    fields: dict[str, Any] = {
        "torso": config_for("mlp", hidden=(64, 64)),
        "core": config_for("feed_forward"),
        "loss": config_for("vtrace", discount=0.99, entropy_cost=0.01),
        "learning_rate": 1e-3,
        "source": config_for("jax_rollout", num_envs=8, unroll_length=5, updates_per_call=50),
        "learner": config_for("learner"),
        "total_steps": 500_000,
    }
    if memory:
        fields |= {
            "core": config_for("lstm", features=64),
            # A reward once an episode: a mean over all rows makes its gradient small beside an entropy bonus.
            "loss": config_for("vtrace", discount=0.99, entropy_cost=0.001),
            "learning_rate": 2e-3,
            "source": config_for("jax_rollout", num_envs=32, unroll_length=32, updates_per_call=4),
            "learner": config_for("learner", minibatches=4),
        }
    if minatar:
        fields |= {
            "torso": config_for("minatar_cnn"),
            # All envs start in step, so short unrolls see one phase of the game at a time: the entropy bonus keeps the
            # policy open until it has seen the others.
            "loss": config_for("vtrace", discount=0.99, entropy_cost=0.05, lambda_=0.9),
            "learning_rate": 2e-3,
            "source": config_for("jax_rollout", num_envs=64, unroll_length=32, updates_per_call=4),
            "learner": config_for("learner", minibatches=8),
            "total_steps": 2_000_000,
        }
    return flaxrl.run_config(
        seed=0,
        total_steps=fields["total_steps"],
        env=config_for("gymnax", game=game),
        model=config_for(
            "agent",
            torso=fields["torso"],
            core=fields["core"],
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=fields["loss"],
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=fields["learning_rate"],
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=fields["source"],
        learner=fields["learner"],
        log=config_for("log", every=20_000),
        eval=config_for("eval", every=fields["total_steps"] // 10, episodes=32),
        checkpoint=config_for("checkpoint", every=200_000),
    )

"""PPO on Jumanji's Maze, 10 x 10 cells; needs `pip install 'flaxrl[jumanji]'`.

    python main.py --config=configs/ppo_maze.py             # an empty maze, from one corner to the other
    python main.py --config=configs/ppo_maze.py:medium      # fixed walls, nine pairs of start and goal

On two CPU cores less than half a minute; return 1.0 (the goal is reached) in both.
"""

import flaxrl
from flaxrl import ConfigError, config_for

MAZES = {"empty": ("maze-empty", 81_920, {}), "medium": ("maze-fixed", 819_200, {"pairs": 9})}
"""The game, its steps, its arguments."""


def get_config(maze: str = "empty"):
    if maze not in MAZES:
        raise ConfigError(f"ppo_maze takes one of {', '.join(MAZES)}; {maze!r} is none of them")
    game, steps, kwargs = MAZES[maze]
    return flaxrl.run_config(
        seed=0,
        total_steps=steps,
        env=config_for("jumanji", game=game, observation="maze_positions", kwargs=kwargs),
        model=config_for(
            "agent",
            torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            value_torso=config_for("mlp", hidden=(64, 64), activation="tanh"),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        # Some of the fixed maze's goals are far: the policy stays open until it has found the way to each.
        loss=config_for("ppo", discount=0.99, lambda_=0.95, entropy_cost=0.1, entropy_cost_final=0.001),
        optimizer=config_for(
            "optimizer",
            algorithm="adam",
            learning_rate=2e-3,
            schedule="linear",
            max_grad_norm=0.5,
            args={"eps": 1e-5},
        ),
        source=config_for("jax_rollout", num_envs=16, unroll_length=128, updates_per_call=4),
        learner=config_for("learner", epochs=4, minibatches=8),
        log=config_for("log", every=8_192),
        eval=config_for("eval", every=None, episodes=100),
        checkpoint=config_for("checkpoint", every=None),
    )

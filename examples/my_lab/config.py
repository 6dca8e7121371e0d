"""REINFORCE in a corridor: every part but the core and the head is from this folder.

Seconds on a laptop; the return goes to 0.5, the best there is. From the folder that holds my_lab:

    python PATH/TO/main.py --config=my_lab/config.py --config.loss.discount=0.95
"""

import flaxrl
from flaxrl import config_for


def get_config():
    """The run's config."""
    return flaxrl.run_config(
        seed=0,
        total_steps=40_000,
        env=config_for("my_lab.corridor:Corridor", length=6),
        model=config_for(
            "agent",
            torso=config_for("my_lab.wide_and_deep:WideAndDeep", hidden=16),
            core=config_for("feed_forward"),
            head=config_for("policy_value"),
            policy=config_for("sampled"),
        ),
        loss=config_for("my_lab.reinforce:Reinforce", discount=0.95),
        optimizer=config_for("optimizer", algorithm="adam", learning_rate=1e-2),
        source=config_for("jax_rollout", num_envs=16, unroll_length=50, updates_per_call=5),
        log=config_for("log", every=4_000, writers=("json_lines", "my_lab.csv_writer:LongCsv")),
        eval=config_for("eval", episodes=4),
    )

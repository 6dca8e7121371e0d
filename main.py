"""Trains an agent, evaluates it, films it, or draws learning curves.

    python main.py --config=configs/FILE.py[:ARGUMENT] [--config.loss.discount=0.99 ...] [--workdir=FOLDER]
    python main.py --mode=eval --workdir=FOLDER [--config.eval.episodes=100] [--eval_seed=3] [--video=agent.gif]
    python main.py --mode=plot --workdir=FOLDER [--workdir=ANOTHER ...] [--out=curves.png]
    python main.py --config=... --coordinator=HOST:PORT --num_processes=N --process_id=I    # once for each I < N

Every field of the config can be set as --config.BLOCK.FIELD=VALUE: None switches an optional field off, tuples are
written 128,128. A training run that was interrupted goes on when the same command is given with its --workdir.
"""

import json

from absl import flags
from ml_collections import config_flags

from flaxrl import cli, modes

# The overrides are applied by flaxrl.cli, which explains a wrong one; sys_argv=[] keeps config_flags from it.
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Experiment file, FILE.py or FILE.py:ARGUMENT; not needed where --workdir has a run.", sys_argv=[]
)
_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "Folder of the run; default runs/<config>/<date-time>. Of a plot: of a run or of several; repeats."
)
_MODE = flags.DEFINE_enum("mode", "train", modes.MODES, "Train, or evaluate or plot what is in --workdir.")
_VIDEO = flags.DEFINE_string("video", None, "With --mode=eval: a .gif or .mp4 file to film the agent into.")
_OUT = flags.DEFINE_string("out", None, "With --mode=plot: the picture's file; default curves.png.")
_EVAL_SEED = flags.DEFINE_integer("eval_seed", None, "Evaluates this seed alone, of a run of several.")
_EVAL_SETTING = flags.DEFINE_string("eval_setting", None, "Evaluates this setting of a sweep: learning_rate=0.001,...")
_STOPPED = flags.DEFINE_integer(
    "stopped_exit_code", None, "Exit status, 0 to 255, of training that a signal stopped before its end; default 0."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where several processes train.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many they are.")
_PROCESS = flags.DEFINE_integer("process_id", None, "Which one this is, from 0.")


def main(argv: list[str]) -> int:
    """Wires flags to Trainer, evaluation or plot; `argv[1:]` are the overrides that `cli.parse_flags` collected.

    Returns:
        The exit status.
    """
    modes.check(_MODE.value, flags.FLAGS, overrides=argv[1:])
    if _MODE.value == "plot":
        from flaxrl import curves

        print(curves.plot(_WORKDIR.value or (), _OUT.value))
        return 0
    workdir = modes.one_workdir(_WORKDIR.value)
    config = cli.load_config(_CONFIG.value, workdir, overrides=argv[1:])
    cli.use_cores(config)
    cli.connect(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, train=_MODE.value == "train")
    workdir = cli.run_workdir(workdir, lambda: config_flags.get_config_filename(flags.FLAGS["config"]))
    seed, setting = _EVAL_SEED.value, _EVAL_SETTING.value
    chosen = seed is not None or setting is not None
    cli.check(config, workdir, train=_MODE.value == "train", video=_VIDEO.value, chosen=chosen)

    # Imported late, so that a wrong flag or config is answered before checkpointing and env suites load.
    if _MODE.value == "eval":
        from flaxrl.trainers.evaluate import evaluate_workdir

        metrics = evaluate_workdir(workdir, config, seed=seed, setting=setting, video=_VIDEO.value)
        print(cli.table(metrics))
        print(json.dumps(cli.plain_metrics(metrics)))
        return 0
    from flaxrl.trainers.trainer import Trainer

    trainer = Trainer(config, workdir)
    trainer.run()
    return 0 if trainer.finished else _STOPPED.value or 0


if __name__ == "__main__":
    cli.run(main)

"""The training loop and its parts: update, sources, sharding, evaluation, checkpoints, metrics."""

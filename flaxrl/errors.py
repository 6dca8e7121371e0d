"""The errors that end a run with one clear line."""


class ConfigError(ValueError):
    """Bad input: the message names the thing, the rule and the nearest right value. The command line exits with 2."""


class TrainingError(RuntimeError):
    """The run cannot go on (non-finite losses, a dead actor); what was saved stays. The command line exits with 1."""

"""Gradient steps that were skipped, as their loss or gradient was not finite: told at each log, and ended in time."""

from __future__ import annotations

from collections.abc import Callable

from flaxrl.configuration import LearnerSettings
from flaxrl.errors import TrainingError
from flaxrl.types import Array


def check_skipped(
    share: float, taken: int, in_row: Array, settings: LearnerSettings, step: int, tell: Callable[[str], None]
) -> None:
    """Tells of gradient steps that were skipped since the last log.

    Args:
        share: of the gradient steps since then, 0 to 1.
        taken: gradient steps since then, the skipped ones among them.
        in_row: int32 scalar, how many the newest gradient steps were in a row; read only where there are some.
        settings: how many may be skipped in a row.
        step: of the run.
        tell: prints a line.

    Raises:
        TrainingError: `max_skipped` or more in a row.
    """
    if not share:
        return
    skipped = int(in_row)
    tell(
        f"warning: loss or gradient not finite: skipped {round(share * taken)} of the {taken} gradient steps up to "
        f"step {step:,}, the last {skipped} in a row"
    )
    if skipped >= settings.max_skipped:
        raise TrainingError(
            f"loss or gradient not finite in the last {skipped} gradient steps (step {step:,}, "
            f"learner.max_skipped = {settings.max_skipped}); the last good checkpoint stays"
        )

"""The moving line that shows how a run is doing."""

from __future__ import annotations

import collections
import datetime
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_WINDOW_S = 30.0  # rates are over this long, so that a slow start or a pause is forgotten
_TICK_S = 0.2  # a moving line changes at most this often
_PLAIN_S = 5.0  # and a log file gets a line at most this often
_BAR = 12  # characters
_RETURNS = (("return", "actor/episode_return"), ("eval", "eval/return_mean"))


class Progress:
    """Percentage, steps, rates, last returns and time left: one live line on a terminal, plain lines elsewhere.

    The rates leave out the time before the first update, which is compilation.

    Args:
        total_steps: steps at which the run ends.
        frame_skip: frames of the simulator a step.
        start_step: step that the run starts or resumes from.
        file: where to write; stdout if None.
        clock: seconds; a test gives its own.
    """

    def __init__(
        self,
        total_steps: int,
        frame_skip: int = 1,
        start_step: int = 0,
        *,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._frame_skip, self._start = total_steps, frame_skip, start_step
        self._step = start_step
        self._file = file or sys.stdout
        self._clock = clock
        self._began = clock()
        self._samples: collections.deque[tuple[float, int]] = collections.deque()
        self._returns: dict[str, float] = {}
        self._shown_at = self._printed_at = -float("inf")
        self._printed = ""
        self._live = _live_line(self) if self._file.isatty() else None

    def tick(self, step: int) -> None:
        """Tells the step reached; cheap, for every iterate."""
        now = self._clock()
        self._step = step
        if step <= self._start or now - self._shown_at < _TICK_S:
            return
        self._shown_at = now
        self._samples.append((now, step))
        # One sample older than the window stays, so that the window is never shorter than it says.
        while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW_S:
            self._samples.popleft()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tells the step and the metrics of a log; without a terminal, prints a line unless the last is seconds old.

        Args:
            step: steps done.
            metrics: flat metrics; `actor/episode_return` and `eval/return_mean` are shown, the last of each.
        """
        self.tick(step)
        for name, key in _RETURNS:
            if metrics.get(key) is not None:
                self._returns[name] = float(metrics[key])
        if self._live is None and self._clock() - self._printed_at >= _PLAIN_S:
            self._print_line()

    @property
    def steps_per_second(self) -> float | None:
        """Rate over the window; None before there is one."""
        if len(self._samples) < 2:
            return None
        (t0, s0), (t1, s1) = self._samples[0], self._samples[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else None

    @property
    def frames_per_second(self) -> float | None:
        """Rate of the simulator's frames: steps x frame skip."""
        rate = self.steps_per_second
        return None if rate is None else rate * self._frame_skip

    def line(self) -> str:
        """The line as text."""
        part = min(self._step / self._total, 1.0) if self._total else 1.0
        full = int(part * _BAR)
        head = f"{part:4.0%} {'━' * full}{'─' * (_BAR - full)} {self._step:,}/{self._total:,} steps"
        if self._step <= self._start and self._step < self._total:
            return f"{head} | compiling, {_duration(self._clock() - self._began)}"
        parts = [head]
        rate = self.steps_per_second
        if rate is not None:
            parts.append(f"{_short(rate)} steps/s")
            if self._frame_skip != 1:
                parts.append(f"{_short(rate * self._frame_skip)} frames/s")
        parts += [f"{name} {value:.4g}" for name, value in self._returns.items()]
        if rate and self._step < self._total:
            parts.append(f"{_duration((self._total - self._step) / rate)} left")
        return " | ".join(parts)

    def print(self, text: str) -> None:
        """Prints a line above the moving one."""
        if self._live is None:
            print(text, file=self._file, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state of the line on the screen; may be called twice."""
        if self._live is not None:
            self._live.stop()
        elif self.line() != self._printed:
            self._print_line()

    def _print_line(self) -> None:
        self._printed_at, self._printed = self._clock(), self.line()
        self.print(self._printed)


def _live_line(progress: Progress) -> Any:
    """A started rich display of `progress.line()`; its own thread keeps it moving while the main one compiles."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    spinner = Spinner("dots")

    def render() -> Table:
        line = Table.grid(padding=(0, 1))
        line.add_row(spinner, Text(progress.line(), no_wrap=True, overflow="ellipsis"))
        return line

    console = Console(file=progress._file, force_terminal=True)
    live = Live(console=console, get_renderable=render, auto_refresh=True, refresh_per_second=1 / _TICK_S)
    live.start()
    return live


def _short(number: float) -> str:
    """Three digits: 950, 1.2k, 34.5k, 1.2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    """'4 s', '3:20' (minutes), '2:03:20' (hours), '3 days, 2:03:20'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:") if "day" not in text else text

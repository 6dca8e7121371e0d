"""What the benchmarks share: timing, a table, one JSON line at the end, a trace, reading a config."""

from __future__ import annotations

import contextlib
import json
import runpy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flaxrl.overrides import apply


class Rate(NamedTuple):
    """Units a second over several repeats.

    Attributes:
        median: of the repeats.
        low: the slowest repeat.
        high: the fastest.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)}-{short(self.high)}]"


def rate_of(rates: Sequence[float]) -> Rate:
    """The Rate of repeats measured elsewhere."""
    return Rate(statistics.median(rates), min(rates), max(rates))


def measure(fn: Callable[[], float | None], seconds: float, repeats: int = 3) -> Rate:
    """How fast `fn` works, what compiles left out: it is called once before the clock starts.

    Args:
        fn: does a piece of work to its end (blocks until the device is done) and returns how many units that was;
            None counts as 1.
        seconds: that a repeat lasts at least, in whole calls.
        repeats: of which the median counts.
    """
    fn()
    rates = []
    for _ in range(repeats):
        began, units, spent = time.perf_counter(), 0.0, 0.0
        while spent < seconds or not units:
            done = fn()
            units += 1 if done is None else done
            spent = time.perf_counter() - began
        rates.append(units / spent)
    return rate_of(rates)


def short(number: float) -> str:
    """Three digits, thousands separated: 0.0123, 1.23, 12.3, 123, 1,234."""
    if abs(number) >= 100 or number == 0:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def print_table(rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows as a Markdown table; the first row is the head. Floats are shown with three digits."""
    text = [[short(x) if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in text) for i in range(len(text[0]))]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in text]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines), flush=True)


def print_json(values: Mapping[str, Any]) -> None:
    """Prints one JSON line, which must be the last; a Rate becomes its median. `device` says what it ran on."""
    device = jax.devices()[0]
    plain = {k: v.median if isinstance(v, Rate) else v for k, v in values.items()}
    plain |= {"device": device.device_kind, "devices": jax.device_count(), "jax": jax.__version__}
    print(json.dumps(plain), flush=True)


@contextlib.contextmanager
def trace(folder: str | None) -> Iterator[None]:
    """Writes a JAX trace of what runs inside to `folder`, for TensorBoard or Perfetto; None writes nothing."""
    if folder is None:
        yield
        return
    with jax.profiler.trace(folder):
        yield


def load_config(path: str, overrides: Sequence[str] = ()) -> Any:
    """The config of FILE.py or FILE.py:ARGUMENT, with '--config.a.b=value' arguments applied.

    Raises:
        ConfigError: an override that does not fit.
        SystemExit: an argument that is none.
    """
    file, _, argument = path.partition(":")
    config = runpy.run_path(file)["get_config"](*([argument] if argument else []))
    for text in overrides:
        if not text.startswith("--config."):
            raise SystemExit(f"error: {text!r} is unknown; fields of the config are set as --config.FIELD=VALUE")
    apply(config, [text.removeprefix("--config.") for text in overrides])
    return config

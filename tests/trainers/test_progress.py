"""The progress line: rates over a window without compilation, plain lines in a log, one live line on a terminal."""

from __future__ import annotations

import io
import time

import pytest

from flaxrl.trainers.progress import Progress, _duration, _short


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(total: int = 1000, frame_skip: int = 4, start: int = 0) -> tuple[Progress, Clock, io.StringIO]:
    clock, file = Clock(), io.StringIO()
    return Progress(total, frame_skip, start, file=file, clock=clock), clock, file


def test_rates_leave_out_compilation() -> None:
    progress, clock, _ = make()
    progress.tick(0)
    clock.now += 60  # compiles
    progress.tick(100)
    assert progress.steps_per_second is None and "left" not in progress.line()
    clock.now += 2
    progress.tick(300)
    assert progress.steps_per_second == pytest.approx(100)
    assert progress.frames_per_second == pytest.approx(400)
    assert "100 steps/s | 400 frames/s" in progress.line() and progress.line().endswith("7 s left")


def test_rates_slide() -> None:
    progress, clock, _ = make(total=10**6)
    step = 0
    for seconds, rate in ((60, 10), (60, 1000)):
        for _ in range(seconds):
            clock.now += 1
            step += rate
            progress.tick(step)
    assert progress.steps_per_second == pytest.approx(1000)


def test_a_resumed_run_counts_from_where_it_starts() -> None:
    progress, clock, _ = make(total=1000, start=500)
    assert "50%" in progress.line() and "compiling" in progress.line()
    clock.now += 1
    progress.tick(510)
    clock.now += 1
    progress.tick(520)
    assert progress.steps_per_second == pytest.approx(10)


def test_a_finished_run_compiles_nothing() -> None:
    progress, clock, _ = make(total=1000, start=1000)
    clock.now += 5
    progress.update(1000, {"eval/return_mean": 7.0})
    assert progress.line().startswith("100%") and progress.line().endswith("1,000/1,000 steps | eval 7")


def test_tick_is_rate_limited_and_cheap() -> None:
    progress, clock, _ = make(total=10**6)
    for step in range(1, 1001):
        clock.now += 0.001
        progress.tick(step)
    assert len(progress._samples) <= 6
    assert f"{1000:,}/" in progress.line()  # but the step shown is the last one


def test_log_file_gets_a_line_every_few_seconds_only() -> None:
    progress, clock, file = make(total=100_000)
    for i in range(1, 101):
        clock.now += 0.5
        progress.update(i * 100, {"actor/episode_return": float(i)})
    lines = file.getvalue().splitlines()
    assert "100/100,000 steps" in lines[0] and "\x1b" not in file.getvalue()
    assert 9 <= len(lines) <= 11  # 50 s
    progress.close()
    progress.close()
    assert "10,000/100,000 steps" in file.getvalue().splitlines()[-1]
    assert file.getvalue().count("10,000/100,000") == 1


def test_last_return_and_last_evaluation_stay_on_the_line() -> None:
    progress, clock, _ = make()
    clock.now += 1
    progress.update(10, {"actor/episode_return": 12.345, "eval/return_mean": 50.0})
    clock.now += 1
    progress.update(20, {"actor/episode_return": None, "loss/total": 3.0})
    assert "return 12.35 | eval 50" in progress.line()


def test_print_goes_to_the_same_file() -> None:
    progress, _, file = make()
    progress.print("saved [step 5]")
    assert file.getvalue().splitlines()[-1] == "saved [step 5]"


def test_terminal_has_one_moving_line_with_prints_above(capsys: pytest.CaptureFixture[str]) -> None:
    file = Terminal()
    progress = Progress(1000, 1, 0, file=file)
    time.sleep(0.5)  # moves by itself while the main thread compiles
    frames = file.getvalue().count("compiling")
    progress.tick(500)
    progress.print("saved [bold]checkpoint")
    progress.close()
    progress.close()
    text = file.getvalue()
    assert frames >= 2 and "saved [bold]checkpoint\n" in text
    assert "500/1,000 steps" in text.rpartition("saved")[2]
    assert text.count("\n") <= 3  # redrawn in place, not scrolled
    del capsys


def test_words() -> None:
    assert [_short(x) for x in (3, 950, 1234, 34_500, 1.2e6, 2.5e9)] == ["3", "950", "1.23k", "34.5k", "1.2M", "2.5G"]
    assert [_duration(x) for x in (4.4, 200, 7400, 3 * 86400 + 7400)] == ["4 s", "03:20", "2:03:20", "3 days, 2:03:20"]

"""What the processes of a run agree on; threads stand for them here."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from flaxrl import ConfigError
from flaxrl.run_folder import RunFolder
from flaxrl.trainers import peers as peers_module
from flaxrl.trainers import shared_folder
from flaxrl.trainers.differences import config_difference
from flaxrl.trainers.metrics import MetricsBuffer
from flaxrl.trainers.peers import Peers


class Store:
    """What jax's client does with keys and values, for threads instead of processes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self._values
        self._values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(k, v) for k, v in list(self._values.items()) if k.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        for k in [k for k in self._values if k == key or k.startswith(key + "/")]:
            del self._values[k]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        deadline = time.monotonic() + timeout_ms / 1000
        while key not in self._values:
            if time.monotonic() > deadline:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            time.sleep(0.001)
        return self._values[key]


def together(count: int, work: Callable[[Peers], Any]) -> list[Any]:
    """What `work` gives in each of `count` processes, which are threads here."""
    store = Store()
    with ThreadPoolExecutor(count) as pool:
        peers = [Peers(store, i, count) for i in range(count)]
        found = list(pool.map(work, peers))
        for each in peers:
            each.close()
    return found


def test_all_stop_at_the_same_call_however_fast_they_are() -> None:
    asked = threading.Event()

    def work(peers: Peers) -> tuple[int, str | None]:
        peers.begin(lambda: "SIGINT" if peers.index == 1 and asked.is_set() else None, {}, "run")
        for call in itertools.count(7):
            if peers.stops_at(call):
                return call, peers.stop_asked
            time.sleep(0.002 * (1 + peers.index))
            if call == 20:
                asked.set()
        raise AssertionError

    found = together(3, work)
    assert len({call for call, _ in found}) == 1 and found[0][0] > 20
    assert found[0][1] == "SIGINT in process 1"


def test_a_second_run_is_not_stopped_by_the_first() -> None:
    def work(peers: Peers) -> list[int]:
        calls = []
        for asked in (lambda: "SIGTERM", lambda: None):
            peers.begin(asked, {}, "run")
            calls.append(next(i for i in range(400) if peers.stops_at(i) or time.sleep(0.005) or i == 399))
            peers.agree(None, lambda _: None)
        return calls

    (first, second), other = together(2, work)
    assert [first, second] == other and first < 399 and second == 399


@pytest.mark.parametrize("key", ["stop/", "at/"])
def test_a_stop_is_told_again_where_the_store_did_not_take_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    failed = set()
    set_key = Store.key_value_set

    def fails_once(self: Store, name: str, value: str, allow_overwrite: bool = False) -> None:
        if key in name and name not in failed:
            failed.add(name)
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: for a moment")
        set_key(self, name, value, allow_overwrite)

    monkeypatch.setattr(Store, "key_value_set", fails_once)

    def work(peers: Peers) -> int:
        peers.begin(lambda: "SIGTERM", {}, "run")
        return next(call for call in range(4000) if peers.stops_at(call) or time.sleep(0.005))

    assert len(set(together(2, work))) == 1 and failed


def test_a_stop_does_not_reach_a_run_that_begins_meanwhile() -> None:
    peers = Peers(Store(), 0, 2)
    peers.close()  # its thread: what it does is called here
    peers.agree = lambda value, decide: None

    def next_run() -> str:
        peers.begin(lambda: None, {}, "run")
        return "SIGTERM"

    peers.begin(next_run, {}, "run")
    peers._agree_on_stop({"stop/1": "SIGTERM", "at/1/0": "3", "at/1/1": "3"})
    assert peers.stop_asked is None and peers._stop_at is None


def test_what_process_0_decides_all_know() -> None:
    def work(peers: Peers) -> list[Any]:
        sums = [peers.agree(round_ * (peers.index + 1), sum) for round_ in range(4)]
        return [*sums, peers.from_first(lambda: {"a": peers.index, "b": 0.1})]

    assert together(3, work) == 3 * [[0, 6, 12, 18, {"a": 0, "b": 0.1}]]


def test_different_configs_are_refused_by_all() -> None:
    def work(peers: Peers) -> str:
        with pytest.raises(ConfigError) as caught:
            peers.begin(lambda: None, {"seed": peers.index, "loss": {"name": "vtrace"}}, "run")
        return str(caught.value)

    assert together(2, work) == 2 * ["process 1 was given another config than process 0; they differ in seed"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"clip": None}, {}), ({}, {"clip": None}), ({"clip": None}, {"clip": 1}), ({"clip": 1}, {"clip": True})],
)
def test_none_is_not_missing_and_true_is_not_one(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    told = config_difference([{"loss": ours}, {"loss": theirs}])
    assert told == "process 1 was given another config than process 0; they differ in loss.clip"
    assert config_difference([{"loss": ours}] * 3) is None


def test_different_workdirs_are_refused_by_all() -> None:
    def work(peers: Peers) -> list[str]:
        messages = []
        for begin in (
            lambda: peers.begin(lambda: None, {}, "/disk/b" if peers.index == 2 else "/disk/a"),
            lambda: peers.same("--workdir", None if peers.index else "runs/1"),
        ):
            with pytest.raises(ConfigError) as caught:
                begin()
            messages.append(str(caught.value))
        return messages

    assert together(3, work) == 3 * [
        [
            "workdir differs between processes: '/disk/a' in process 0, '/disk/b' in process 2; give all the same",
            "--workdir differs between processes: 'runs/1' in process 0, none in process 1; give all the same",
        ]
    ]


@pytest.mark.parametrize("owner", [0, 1])
def test_a_folder_that_one_does_not_see_is_refused_by_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: int
) -> None:
    monkeypatch.setattr(shared_folder, "_PATIENCE_S", 0.3)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")

    def work(peers: Peers) -> str:
        folder = RunFolder(tmp_path / ("a" if peers.index == owner else "b"))
        with pytest.raises(ConfigError, match="is not on a file system that all processes share") as caught:
            shared_folder.check_shared(folder, peers)
        return str(caught.value)

    messages = together(2, work)
    assert all(m.endswith(f": process {1 - owner} does not see the run in it") for m in messages)


def test_a_folder_that_others_see_late_is_waited_for(tmp_path: Path) -> None:
    def work(peers: Peers) -> bool:
        folder = RunFolder(tmp_path / str(peers.index))
        shared_folder.check_shared(folder, peers)  # no run yet: nothing to see
        assert not folder.has_run
        peers.agree(None, lambda _: None)
        if peers.index == 0:
            for late, name in ((0.0, "0"), (0.5, "1")):
                threading.Timer(late, appear, args=(tmp_path / name,)).start()
        while peers.index == 0 and not folder.has_run:
            time.sleep(0.01)
        peers.agree(None, lambda _: None)
        shared_folder.check_shared(folder, peers)
        return folder.has_run

    def appear(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    assert together(2, work) == [True, True]


def test_host_metrics_are_added_over_processes_whatever_their_names() -> None:
    def work(peers: Peers) -> dict[str, float]:
        buffer = MetricsBuffer()
        buffer.add({"time/a_seconds": (2.0 + peers.index, 1.0)})
        if peers.index == 1:  # an episode ended here alone
            buffer.add({"actor/episode_return": (9.0, 3.0)})
        return buffer.read(peers.agree)

    assert together(2, work) == 2 * [{"actor/episode_return": 3.0, "time/a_seconds": 2.5}]


class Closed:
    """A stream whose reader is gone."""

    def write(self, text: str) -> None:
        raise ValueError("I/O operation on closed file.")

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_closed_terminal_does_not_keep_a_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise BrokenPipeError

    ended: list[int] = []
    peers = Peers()
    peers.on_end = fails
    with monkeypatch.context() as patched:
        patched.setattr(peers_module, "_POLL_S", 0.0)
        patched.setattr(peers_module.os, "_exit", ended.append)
        patched.setattr(peers_module.sys, "stdout", Closed())
        patched.setattr(peers_module.sys, "stderr", Closed())
        peers._end(3, "process 1 failed")
    assert ended == [3]


@pytest.mark.parametrize("error", [None, OSError("as if killed")])
def test_what_a_run_leaves_to_be_closed_is_forgotten_when_it_ends(error: OSError | None) -> None:
    closed: list[bool] = []
    peers = Peers()
    with contextlib.suppress(OSError), peers.together():
        peers.on_end = lambda: closed.append(True)
        if error is not None:
            raise error
    peers.on_end()
    assert closed == []

"""One virtual CPU device a core where there are many seeds, and only where nobody chose otherwise."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from flaxrl import cli, config_for, cpu_devices
from tests.small_runs import small_config

SWEEP = {"loss.entropy_cost": [0.1, 0.2, 0.3]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What jax's configuration is asked for, on a machine of four cores where nothing was chosen yet."""
    found: list[tuple[str, int]] = []
    config = SimpleNamespace(jax_num_cpu_devices=-1, update=lambda *given: found.append(given))
    monkeypatch.setattr(cpu_devices, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return found


def many(num_seeds: int, **fields: Any) -> Any:
    return small_config(1, mesh=config_for("mesh"), num_seeds=num_seeds, **fields)


@pytest.mark.parametrize(("num_seeds", "devices"), [(2, 2), (4, 4), (6, 3), (8, 4), (9, 3)])
def test_as_many_as_the_seeds_split_over(asked: list, num_seeds: int, devices: int) -> None:
    cli.use_cores(many(num_seeds))
    assert asked == [("jax_num_cpu_devices", devices)]


def test_all_cores_count_where_the_system_does_not_tell_which_are_ours(
    asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cli.use_cores(many(6))
    assert asked == [("jax_num_cpu_devices", 2)]


def test_the_settings_of_a_sweep_count(asked: list) -> None:
    cli.use_cores(many(1, sweep=SWEEP))
    cli.use_cores(many(2, sweep=SWEEP))
    assert [devices for _, devices in asked] == [3, 3]


def test_nothing_is_asked_for_one_seed_or_a_number_that_does_not_split(asked: list) -> None:
    cli.use_cores(many(1))
    cli.use_cores(many(5))
    assert asked == []


def test_a_number_that_was_chosen_stays(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cpu_devices.jax.config, "jax_num_cpu_devices", 1)
        cli.use_cores(many(2))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    cli.use_cores(many(2))
    assert asked == []


def test_a_jax_that_is_in_use_keeps_its_devices(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("jax_num_cpu_devices config should be updated before backends are initialized")

    monkeypatch.setattr(cpu_devices.jax.config, "update", refuse)
    cli.use_cores(many(2))

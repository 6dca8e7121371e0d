"""Settings of all tests: several virtual CPU devices, strict ranks; warnings are errors (pyproject.toml)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as xla_cache

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own, so that nothing is written into the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    """Where programs that several tests compile are kept."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compilation_cache(cache_folder):
    """For modules that build the same programs many times: compiles each once."""
    settings = {
        "jax_compilation_cache_dir": str(cache_folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    xla_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    xla_cache.reset_cache()

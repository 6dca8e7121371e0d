"""Settings of all tests: several virtual CPU devices, strict ranks; warnings are errors (pyproject.toml)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """The compiler does without its costly passes, save in the slow tests: those learn, and prove what users run."""
    jax.config.update("jax_disable_most_optimizations", config.option.markexpr != "slow")


@pytest.fixture
def optimized():
    """All the compiler's passes, for two programs whose numbers are to be equal bit by bit."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own, so that nothing is written into the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory):
    """Programs that several tests build are compiled once a session."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

"""The package as something to install: imports, declared dependencies, tested versions, public names."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import flaxrl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = ("brax", "mujoco", "imageio")
"""Installed by extras that the tests do without."""
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(r) for r in [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]]
OUTSIDE = [r for r in REQUIREMENTS if r.name != "flaxrl"]
HEAVY = (
    *("distrax", "orbax", "gymnax", "gymnasium", "ale_py", "jumanji"),
    *("tensorflow", "tensorflow_probability", "tensorboardX"),
)

CHECKED = """
import json, sys, time, jax
began = time.process_time()
import flaxrl
imported = [m for m in {heavy} if m in sys.modules]
from flaxrl.trainers import plan
from configs import impala_atari, impala_gymnax
for module in (impala_gymnax, impala_atari):
    plan.check(module.get_config())
    config = module.get_config().unlock()
    config.optimizer.learing_rate = 1
    try:
        plan.check(config)
    except flaxrl.ConfigError as error:
        message = str(error)
seconds = time.process_time() - began
checked = [m for m in {heavy} if m in sys.modules]
print(json.dumps([imported, checked, message, seconds]))
"""


def test_every_module_imports():
    names = [m.name for m in pkgutil.walk_packages(flaxrl.__path__, "flaxrl.")]
    assert len(names) > 30
    for name in names:
        importlib.import_module(name)


def test_every_folder_of_modules_is_a_package():
    """Folders without __init__.py are not found by setuptools: they would be missing from a wheel."""
    folders = {path.parent for path in (ROOT / "flaxrl").rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").is_file()] == []


def test_import_and_config_check_are_light_and_quick():
    """Neither needs checkpointing, distributions, writers or an env suite, so a wrong field is answered at once."""
    command = [sys.executable, "-c", CHECKED.format(heavy=HEAVY)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    imported, checked, message, seconds = json.loads(answer.stdout.splitlines()[-1])
    assert (imported, checked) == ([], [])
    assert "learing_rate" in message and "learning_rate" in message and "\n" not in message
    assert seconds < 2.0, "CPU seconds from `import jax` to the answers for two configs, right and wrong"


def test_dependencies_have_both_bounds():
    for requirement in OUTSIDE:
        operators = {s.operator for s in requirement.specifier}
        assert ">=" in operators and "<" in operators, f"{requirement} needs a lower and an upper bound"


def test_no_second_framework_is_required():
    for requirement in OUTSIDE:
        assert not re.search(r"tensorflow|torch|keras", requirement.name), requirement


def test_what_is_imported_is_declared():
    """Of flaxrl's own imports, every third-party one is a declared dependency, not a dependency's dependency."""
    declared = {canonicalize_name(r.name) for r in REQUIREMENTS}
    distributions = importlib.metadata.packages_distributions()
    missing = set()
    for path in [*(ROOT / "flaxrl").rglob("*.py"), ROOT / "main.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for module in {m.partition(".")[0] for m in modules} - {"flaxrl", *sys.stdlib_module_names}:
                providers = {canonicalize_name(d) for d in distributions.get(module, [module])}
                if not providers & declared:
                    missing.add(f"{module} ({path.name})")
    assert missing == set()


def _constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "only name==version lines"
    assert lines == sorted(lines, key=lambda line: canonicalize_name(line.partition("==")[0]))
    return {canonicalize_name(name): Version(v) for name, _, v in (line.partition("==") for line in lines)}


def test_tested_versions_lie_inside_the_bounds():
    versions = _constraints()
    for requirement in OUTSIDE:
        assert canonicalize_name(requirement.name) in versions, f"{requirement.name} is not in constraints.txt"
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: tested with {version}"


def _closure(name: str, extra: str, found: set[str]) -> None:
    """Adds what an installed distribution requires, and what that requires."""
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        assert name in OPTIONAL, f"{name} is not installed"
        return
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            known = canonicalize_name(requirement.name)
            if known not in found:
                found.add(known)
                _closure(requirement.name, "", found)


def test_tested_versions_are_complete():
    """What an installation brings, at every depth, has a version; setuptools is the venv's own."""
    found: set[str] = set()
    for requirement in OUTSIDE:
        found.add(canonicalize_name(requirement.name))
        for extra in requirement.extras or {""}:
            _closure(requirement.name, extra, found)
    assert found - _constraints().keys() - {"setuptools"} == set()


def test_version_is_stated_once():
    assert PROJECT["version"] == flaxrl.__version__
    assert f"## [{flaxrl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_license_is_the_one_declared():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_configs_say_their_command(path: Path):
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python main.py --config=configs/{path.name}" in doc


@pytest.mark.parametrize("name", sorted(flaxrl.__all__))
def test_public_names_are_described(name: str):
    """A docstring of its own, fields under Attributes, parameters under Args."""
    public = getattr(flaxrl, name)
    if isinstance(public, int):
        return  # FIRST, MID, LAST, described where they are defined
    doc = inspect.getdoc(public)
    assert doc and not doc.startswith(f"{name}("), f"flaxrl.{name} has no docstring"
    if inspect.isclass(public) and issubclass(public, BaseException):
        return
    if inspect.isfunction(public):
        wanted, section = [p for p in inspect.signature(public).parameters if p != "self"], doc.partition("Args:")[2]
    else:
        wanted, section = list(getattr(public, "__dataclass_fields__", {})), doc
    for field in wanted:
        assert re.search(rf"\b{field}\b", section), f"flaxrl.{name}: the docstring does not tell what {field} is"


def test_ci_runs_what_contributors_run():
    script = (ROOT / ".ci" / "run").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, ".ci/run must be executable"
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0
    for command in ("ruff check .", "ruff format --check .", "pyright", "pytest", "pytest -m slow"):
        assert command in script
        assert command in (ROOT / "CONTRIBUTING.md").read_text()
    assert "-c constraints.txt" in script

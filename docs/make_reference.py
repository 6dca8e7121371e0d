"""Writes what the docs take from the code: docs/config.md, and the files that README.md and docs/*.md show.

    python docs/make_reference.py            # writes
    python docs/make_reference.py --check    # exit code 1 where something is stale

A code block whose preceding paragraph is only a path in backquotes and a colon shows that file.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn

from flaxrl import build
from flaxrl.configuration import TOP_LEVEL

ROOT = Path(__file__).resolve().parent.parent
WRITERS = "flaxrl.trainers.writers:"  # built by the program, with nothing to configure
SECTIONS = (
    ("env", "flaxrl.envs."),
    ("model", "flaxrl.models.agent:"),
    ("model.torso", "flaxrl.models.torsos:"),
    ("model.torso", "flaxrl.models.dict_torso:"),
    ("model.core", "flaxrl.models.cores:"),
    ("model.head", "flaxrl.models.heads:"),
    ("model.policy", "flaxrl.models.policies:"),
    ("loss", "flaxrl.losses."),
    ("optimizer", "flaxrl.trainers.optimizer:"),
    ("source", "flaxrl.trainers."),
    *((name, "flaxrl.configuration:") for name in ("learner", "mesh", "log", "eval", "checkpoint")),
)
"""Part of a config, and where the classes of its blocks live; the first section that fits a class has it."""

_TOP = {
    "seed": ("`int`", "Every key and every env's seed follow from it."),
    "num_seeds": ("`int`", "Runs of the seeds `seed`, `seed` + 1, ... in one program, see [Many seeds](seeds.md)."),
    "sweep": (
        "`dict`",
        "Float field of `loss` or `optimizer` -> its values, every combination a run of the same program: "
        "`{'optimizer.learning_rate': [1e-3, 3e-4]}`, or `--config.sweep.optimizer.learning_rate=1e-3,3e-4`.",
    ),
    "total_steps": ("`int`", "Steps of the whole run, rounded up to whole calls."),
}
_HEAD = """# Config reference

Written by `python docs/make_reference.py` from the classes; do not edit it by hand.

A config is made by `flaxrl.run_config(...)`; its blocks are made by `flaxrl.config_for(name, ...)`. Each field can be
set on the command line, as `--config.BLOCK.FIELD=VALUE`: `--config.loss.entropy_cost=0.02`,
`--config.model.torso.hidden=128,128`, `--config.loss.max_abs_reward=None`. Where the default is "-", the program gives
the value (an env's action space, the number of envs), or the config file has to give the block.

One step is one row that the source inserts: T x B an update. All budgets and cadences are in steps, rounded up to whole
calls.

## Top level

| field | type | default | meaning |
|---|---|---|---|
"""
_SHOWN = re.compile(r"^`(?P<path>[\w./-]+)`:\n\n```(?P<lang>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"\bone of ([A-Z][A-Z_]+)\b")
_ENTRY = re.compile(r"^ {4}(\w+): (.*)$")


def attributes(cls: type) -> dict[str, str]:
    """What the 'Attributes:' sections of a class and its bases say: field -> text."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("flaxrl") and base.__doc__:
            section = inspect.cleandoc(base.__doc__).partition("Attributes:\n")[2]
            field = None
            for line in section.splitlines():
                entry = _ENTRY.match(line)
                if entry:
                    field = entry[1]
                    found[field] = entry[2]
                elif field and line.startswith(" " * 8):
                    found[field] += " " + line.strip()
                elif line and not line.startswith(" "):
                    break  # the next section
    constants = vars(sys.modules[cls.__module__])
    return {field: _NAMED.sub(lambda m: _members(constants, m[1]), text) for field, text in found.items()}


def _members(constants: dict[str, Any], name: str) -> str:
    """'one of NAME' -> the names that it holds."""
    return "one of " + ", ".join(map(repr, constants[name]))


def class_lines(name: str, cls: type) -> list[str]:
    """A block's part of the reference.

    Raises:
        ValueError: a field without a description.
    """
    doc = inspect.cleandoc(cls.__doc__ or "")
    text = doc.partition("Attributes:\n")[0].partition("Raises:\n")[0].strip()
    lines = [f"### `{name}`", "", f"`{cls.__module__}:{cls.__name__}`. {text}", ""]
    described = attributes(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if not field.init or (issubclass(cls, nn.Module) and field.name in ("name", "parent")):
            continue
        if field.name not in described:
            raise ValueError(f"{cls.__module__}.{cls.__name__}.{field.name} is in no 'Attributes:' section")
        rows.append(f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {_cell(described[field.name])} |")
    if rows:
        lines += ["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return lines


def config_reference() -> str:
    """The text of docs/config.md."""
    parts = [_HEAD]
    for key in TOP_LEVEL:
        kind, text = _TOP.get(key, ("block", f"[below](#config{key})"))
        default = {"seed": "`0`", "num_seeds": "`1`", "sweep": "`{}`", "total_steps": "`1000000`"}.get(key, "-")
        if key in build.REGISTRY:
            default = f"`config_for('{key}')`"
        parts.append(f"| `{key}` | {kind} | {default} | {text} |\n")
    blocks: dict[str, list[str]] = {section: [] for section, _ in SECTIONS}
    for name, path in build.REGISTRY.items():
        if not path.startswith(WRITERS):
            blocks[_section(name, path)] += class_lines(name, build.resolve(name))
    for section, lines in blocks.items():
        parts.append(f"\n## config.{section}\n\n" + "\n".join(lines).rstrip() + "\n")
    return "".join(parts)


def _section(name: str, path: str) -> str:
    """Where a block is described; the settings blocks, which share a module, have a section each."""
    return next(s for s, where in SECTIONS if path.startswith(where) and (s == name or s not in build.REGISTRY))


def with_files_shown(text: str) -> str:
    """`text` with each code block that shows a file renewed from it."""

    def renew(match: re.Match[str]) -> str:
        code = (ROOT / match["path"]).read_text()
        return f"`{match['path']}`:\n\n```{match['lang']}\n{code}```"

    return _SHOWN.sub(renew, text)


def shown_files(text: str) -> list[str]:
    """Paths of the files that a page shows."""
    return [match["path"] for match in _SHOWN.finditer(text)]


def pages() -> dict[Path, str]:
    """All pages that hold something from the code, with what they should say."""
    found = {path: with_files_shown(path.read_text()) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    return found | {ROOT / "docs" / "config.md": config_reference()}


def stale() -> list[Path]:
    """Pages that the code has left behind."""
    return [path for path, text in pages().items() if not path.is_file() or path.read_text() != text]


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return {"nn.Module": "block", "nn.Module | None": "block or None"}.get(text, f"`{_cell(text)}`")


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "-"
    short = isinstance(field.default, float) and len(repr(field.default)) > 12
    return f"`{field.default:.6g}`" if short else f"`{_cell(repr(field.default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: list[str]) -> int:
    """Writes the pages, or checks them."""
    found = stale()
    if argv == ["--check"]:
        for path in found:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/make_reference.py", file=sys.stderr)
        return int(bool(found))
    if argv:
        print(__doc__, file=sys.stderr)
        return 2
    for path in found:
        path.write_text(pages()[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

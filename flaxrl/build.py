"""A config block -> an object.

A block is a ConfigDict with a `name` and the fields of the class that the name stands for. `config_for` makes one with
ALL the fields filled in, so each can be overridden on the command line; `build` splats it into the constructor. A name
is a short one of `REGISTRY`, or `package.module:Name` for a class of the user's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from typing import Any

from ml_collections import config_dict

from flaxrl import checks
from flaxrl.errors import ConfigError

REGISTRY: dict[str, str] = {
    # envs
    "gymnax": "flaxrl.envs.gymnax:Gymnax",
    "atari": "flaxrl.envs.atari:Atari",
    "gymnasium": "flaxrl.envs.gymnasium:Gymnasium",
    "brax": "flaxrl.envs.brax:Brax",
    "jumanji": "flaxrl.envs.jumanji:Jumanji",
    "scripted": "flaxrl.envs.fake:Scripted",
    "counting": "flaxrl.envs.fake:Counting",
    "memory": "flaxrl.envs.fake:Memory",
    "host_scripted": "flaxrl.envs.fake:HostScripted",
    # agent and its parts
    "agent": "flaxrl.models.agent:Agent",
    "mlp": "flaxrl.models.torsos:MLP",
    "nature_cnn": "flaxrl.models.torsos:NatureCNN",
    "impala_resnet": "flaxrl.models.torsos:ImpalaResNet",
    "minatar_cnn": "flaxrl.models.torsos:MinAtarCNN",
    "dict_torso": "flaxrl.models.dict_torso:DictTorso",
    "feed_forward": "flaxrl.models.cores:FeedForward",
    "lstm": "flaxrl.models.cores:LSTM",
    "gru": "flaxrl.models.cores:GRU",
    "policy_value": "flaxrl.models.heads:PolicyValue",
    "sampled": "flaxrl.models.policies:Sampled",
    # losses
    "vtrace": "flaxrl.losses.vtrace:VTrace",
    "ppo": "flaxrl.losses.ppo:PPO",
    # sources
    "jax_rollout": "flaxrl.trainers.rollout:JaxRollout",
    "actor_threads": "flaxrl.trainers.actors:ActorThreads",
    # optimizer and settings
    "optimizer": "flaxrl.trainers.optimizer:Optimizer",
    "learner": "flaxrl.configuration:LearnerSettings",
    "mesh": "flaxrl.configuration:MeshSettings",
    "log": "flaxrl.configuration:LogSettings",
    "eval": "flaxrl.configuration:EvalSettings",
    "checkpoint": "flaxrl.configuration:CheckpointSettings",
    # metrics writers
    "json_lines": "flaxrl.trainers.writers:JsonLines",
    "tensorboard": "flaxrl.trainers.writers:TensorBoard",
}
"""Short name -> 'module:Class'; modules are imported when a name is used."""

Config = Any
"""An ml_collections.ConfigDict; its fields are known at run time only, so type checkers are told nothing."""

_LINEN_FIELDS = ("name", "parent")


def resolve(name: str) -> type:
    """The class that `name` stands for: a short name or 'package.module:Name'.

    Raises:
        ConfigError: naming what exists.
    """
    path = REGISTRY.get(name, name)
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(
            f"unknown name {name!r}; {checks.nearest(name, REGISTRY)} (or give your own class as 'package.module:Name')"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"{name!r}: no module {error.name!r} on the Python path") from error
        raise
    if not hasattr(module, attribute):
        named = [k for k, v in vars(module).items() if isinstance(v, type) or inspect.isfunction(v)]
        raise ConfigError(f"{name!r}: {module_name} has no {attribute!r}; {checks.nearest(attribute, named)}")
    return getattr(module, attribute)


def fields_of(cls: type) -> dict[str, Any]:
    """Constructor fields of a class: name -> default, or `dataclasses.MISSING` where there is none."""
    if dataclasses.is_dataclass(cls):
        found = {}
        for field in dataclasses.fields(cls):
            if field.init and not (hasattr(cls, "apply") and field.name in _LINEN_FIELDS):
                made = field.default_factory is not dataclasses.MISSING
                found[field.name] = field.default_factory() if made else field.default  # type: ignore[misc]
        return found
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: dataclasses.MISSING if p.default is inspect.Parameter.empty else p.default
        for p in parameters
        if p.kind in kinds
    }


def annotations_of(cls: type) -> dict[str, Any]:
    """Type annotations of the constructor fields; empty where they cannot be resolved."""
    try:
        return typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    except (NameError, TypeError):
        return {}


def config_for(name: str, **overrides: Any) -> Config:
    """A config block for the class that `name` stands for, with all its fields.

    Fields without a default that are not given here are left out: the program supplies them (an env's action space, a
    source's number of envs).

    Args:
        name: short name or 'package.module:Name'.
        **overrides: field values that differ from the class's defaults.

    Returns:
        ConfigDict with `name` and every field; optional numbers accept None and a number later on.

    Raises:
        ConfigError: on a field that the class does not have, naming the nearest.
    """
    cls = resolve(name)
    fields, hints = fields_of(cls), annotations_of(cls)
    for key in overrides:
        if key not in fields:
            raise ConfigError(f"{name!r} has no field {key!r}; {checks.nearest(key, fields)}")
    if hasattr(cls, "complete"):  # a class may fill in fields that depend on others (an optimizer's arguments)
        overrides = cls.complete(overrides)
    block = config_dict.ConfigDict({"name": name})
    for key, default in fields.items():
        value = overrides.get(key, default)
        if value is dataclasses.MISSING:
            continue
        block[key] = _typed(value, hints.get(key))
    return block


def _typed(value: Any, annotation: Any) -> Any:
    """A config value that later overrides are checked against: optional numbers become typed references."""
    if isinstance(value, dict):
        return config_dict.ConfigDict(value)
    options = [a for a in typing.get_args(annotation) if a is not type(None)]
    if type(None) in typing.get_args(annotation) and len(options) == 1 and options[0] in (int, float, str, bool):
        return config_dict.FieldReference(value, field_type=options[0])
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def raw_fields(cls: type) -> set[str]:
    """Fields of a class that are plain dicts: what they hold is the class's own affair, even where it has a `name`."""
    return {name for name, annotation in annotations_of(cls).items() if annotation is dict}


def is_block(value: Any) -> bool:
    """Whether a config value is itself a block to build."""
    return isinstance(value, (config_dict.ConfigDict, dict)) and "name" in value


def build(block: Any, where: str = "config", **context: Any) -> Any:
    """Builds the object of a config block, and those of the blocks inside it.

    Args:
        block: ConfigDict (or dict) with `name` and fields.
        where: path of the block, for messages.
        **context: what the program knows (`spec`, `num_envs`, ...); given to each class that has a field of that name.

    Raises:
        ConfigError: unknown, missing or ill-typed field, with the nearest right name.
    """
    if not is_block(block):
        raise ConfigError(f"{where} must be a block with a name, as flaxrl.config_for(...) makes; it is {block!r}")
    try:
        cls = resolve(block["name"])
    except ConfigError as error:
        raise ConfigError(f"{where}.name: {error}") from error
    fields, hints = fields_of(cls), annotations_of(cls)
    given = {k: block[k] for k in block if k != "name"}
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(f"{where}.{key}: {block['name']!r} has no such field; {checks.nearest(key, fields)}")
        if not is_block(value) and not checks.matches(value, hints.get(key, Any)):
            expected = hints[key] if typing.get_origin(hints[key]) else getattr(hints[key], "__name__", hints[key])
            raise ConfigError(f"{where}.{key} = {value!r} must be {expected}")
    kwargs = {k: _made(v, hints.get(k), f"{where}.{k}", context) for k, v in given.items()}
    kwargs |= {k: v for k, v in context.items() if k in fields}
    missing = [k for k, v in fields.items() if v is dataclasses.MISSING and k not in kwargs]
    if missing:
        raise ConfigError(f"{where}: {block['name']!r} needs {', '.join(missing)}; set it in config_for(...)")
    try:
        return cls(**kwargs)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _made(value: Any, annotation: Any, where: str, context: dict[str, Any]) -> Any:
    """A field's value: the object of a block, a dict of them where the field is one of modules, or what it is."""
    holds_blocks = typing.get_origin(annotation) is dict and hasattr(typing.get_args(annotation)[1], "apply")
    if holds_blocks and isinstance(value, (config_dict.ConfigDict, dict)):
        return {k: build(value[k], f"{where}.{k}", **context) for k in value}
    if is_block(value) and annotation is not dict:
        return build(value, where, **context)
    return value.to_dict() if isinstance(value, config_dict.ConfigDict) else value

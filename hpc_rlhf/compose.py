"""Hydra overrides -> :class:`~hpc_rlhf.config.Config`, and the configuration file of a run.

Hydra's own compose API, so overrides, groups and ``--cfg`` behave as its users know them; without
``hydra.main``, which would make a working directory of its own for every command.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import hpc_rlhf
from hpc_rlhf import schema
from hpc_rlhf.config import Config, Stage
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_text

CONFIG_DIRECTORY = Path(hpc_rlhf.__file__).resolve().parent / "_configs"

_PATHS = (
    ("run", "root"),
    ("model", "path"),
    ("model", "reference"),
    ("critic", "path"),
    ("reward", "model"),
    ("data", "prompts"),
    ("data", "train"),
    ("data", "eval"),
    ("data", "cache"),
    ("warmup", "demonstrations"),
)


def compose(overrides: Sequence[str], *, config_directory: Path | None = None) -> Config:
    """Compose and type-check a configuration.

    Args:
        overrides: Hydra overrides: ``experiment=quickstart run.name=demo``.
        config_directory: a directory of groups of the user's own, searched before ours.

    Raises:
        UserError: an unknown key, group or option, a value of the wrong type, a missing value.
    """
    node = _compose_node(overrides, config_directory)
    try:
        config = _to_config(node)
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, overrides)) from error
    _make_paths_absolute(config)
    return config


def compose_section(
    overrides: Sequence[str], section: str, *, config_directory: Path | None = None
) -> Any:
    """One part of a configuration as plain data; the others may lack values still.

    Raises:
        UserError: see :func:`compose`.
    """
    node = _compose_node(overrides, config_directory)
    try:
        value = OmegaConf.select(node, section, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, overrides)) from error


def _compose_node(overrides: Sequence[str], config_directory: Path | None) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    ConfigStore.instance().store(name="schema", node=Config)
    searchpath = []
    if config_directory is not None:
        if not config_directory.is_dir():
            raise UserError(f"--config-dir {config_directory}: no such directory")
        searchpath = [f"hydra.searchpath=[file://{config_directory.resolve()}]"]
    checked = _checked_overrides(overrides, config_directory)
    try:
        with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
            return hydra_compose("config", overrides=[*checked, *searchpath])
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, overrides)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{mark.name}:{mark.line + 1}" if mark else "configuration"
        raise UserError(
            f"{place}: not YAML: {error.problem}" + (f" ({error.context})" if error.context else "")
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--config-dir {config_directory}: a file of it is not UTF-8: {error}"
        ) from error


def _checked_overrides(overrides: Sequence[str], config_directory: Path | None) -> list[str]:
    """The overrides as Hydra needs them; none of a key that no field and no group has.

    Hydra itself accepts any key behind a ``+``. A key of a dictionary that is the user's own
    (``cluster.extra.mail-type=END``) needs no sign here.

    Raises:
        UserError: names the key, and the one that was probably meant.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    groups = _groups(CONFIG_DIRECTORY) | (_groups(config_directory) if config_directory else set())
    free = {name for name, kind in schema.fields().items() if schema.is_free(kind)}
    sections = {name.rpartition(".")[0] for name in schema.fields()} - {""}
    parser = OverridesParser.create()
    checked = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(_explain(error, overrides)) from error
        key = str(override.key_or_group)
        is_free = any(key == name or key.startswith(f"{name}.") for name in free)
        if is_free:
            text = override.input_line or text
            checked.append(text if override.is_delete() else f"++{text.lstrip('+')}")
            continue
        if override.is_delete():
            raise UserError(f"{text}: a field cannot be deleted; give it a value, or null")
        if key not in schema.fields() and key not in groups and key not in sections:
            close = schema.closest(key, [*schema.fields(), *groups])
            hint = f"; did you mean {close}?" if close else ""
            raise UserError(
                f"{text}: there is no field and no group of configurations of the name {key!r}{hint}\n"
                "  `hpc-rlhf run --cfg job ...` prints every field"
            )
        checked.append(text)
    return checked


def with_absolute_paths(overrides: Sequence[str]) -> list[str]:
    """The same overrides for another working directory; they have been composed here.

    Example:
        >>> with_absolute_paths(["run.steps=3", "data.prompts=p.jsonl"])
        ['run.steps=3', 'data.prompts=/home/me/p.jsonl']
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    paths = {f"{section}.{name}" for section, name in _PATHS}
    moved = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        text, value = str(override.input_line), override.value()
        if override.key_or_group in paths and isinstance(value, str) and "${" not in value:
            absolute = _absolute(value)
            plain = re.fullmatch(r"[\w./-]+", absolute)
            text = f"{override.key_or_group}={absolute if plain else json.dumps(absolute)}"
        moved.append(text)
    return moved


def _absolute(path: str) -> str:
    return os.path.normpath(Path(path).expanduser().absolute())


def _groups(directory: Path) -> set[str]:
    """Names of the groups in a directory of configurations: its sub-directories of YAML files."""
    files = directory.glob("*/**/*.yaml")
    return {str(path.parent.relative_to(directory)) for path in files}


def _make_paths_absolute(config: Config) -> None:
    """A path means the same on every node and in every later command, whatever its directory."""
    for section, name in _PATHS:
        value = getattr(getattr(config, section), name)
        if value is not None:
            if not value.strip():
                raise UserError(f"{section}.{name}={value!r}: expected a path")
            setattr(getattr(config, section), name, _absolute(value))


def load(path: Path) -> Config:
    """Read back a configuration published by :func:`publish`.

    Raises:
        UserError: the file is damaged, cannot be read, or is another version's.
    """
    try:
        return _to_config(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, UserError) as error:
        text = " ".join(str(error).split("full_key:")[0].split())
        raise UserError(
            f"{path}: no configuration of a run that can be read ({type(error).__name__}: {text}). "
            "Put it back (`--cfg job` with the run's overrides prints it), or choose another run.name"
        ) from error


def publish(path: Path, config: Config) -> None:
    """Write the resolved configuration of a run."""
    publish_text(path, to_yaml(config))


def to_yaml(config: Config) -> str:
    """The configuration as YAML, choices by their values, in the order of the dataclasses."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return value.value if isinstance(value, Enum) else value


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Every leaf that differs, by dotted name: ``{"learner.optimizer.lr": (1e-6, 2e-6)}``."""
    a, b = (dict(_leaves("", _plain(asdict(config)))) for config in (old, new))
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), child)
    else:
        yield prefix, value


def _to_config(node: Any) -> Config:
    missing = sorted(OmegaConf.missing_keys(node))
    data = "data.prompts" if node.stage is Stage.ONLINE else "data.train"
    if OmegaConf.select(node, data) is None:
        missing = sorted([*missing, data])
    if missing:
        wanted = ", ".join(f"{key}=..." for key in missing)
        raise UserError(f"missing value: give {wanted} (or choose an experiment=... that does)")
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's message and those of its causes in one line, without its internals, and what to do."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        lines += [line.strip() for line in str(cause).splitlines() if line.strip()]
        cause = cause.__cause__
    noise = (
        "object_type=",
        "full_key:",
        "reference_type=",
        "Config search path:",
        "provider=",
        "See http",
    )
    kept = [line for line in dict.fromkeys(lines) if not line.startswith((*noise, "To append"))]
    text = "; ".join(kept) or type(error).__name__
    # OmegaConf names choices as Python does; they are typed, and shown, in lower case
    text = re.sub(r"expected one of \[[A-Z0-9_, ]+\]", lambda found: found[0].lower(), text)
    return (
        f"configuration: {text}\n"
        f"  overrides: {' '.join(overrides) or '(none)'}\n"
        "  `hpc-rlhf run --cfg job ...` prints every field; "
        "quote values that hold '=' or blanks: 'model.path=\"/a=b\"'"
    )

"""Hydra overrides -> :class:`~hpc_rlhf.config.Config`, and the configuration file of a run.

Hydra's own compose API, so overrides, groups and ``--cfg`` behave as its users know them; without
``hydra.main``, which would make a working directory of its own for every command.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import hpc_rlhf
from hpc_rlhf.config import Config, Stage
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_text

CONFIG_DIRECTORY = Path(hpc_rlhf.__file__).resolve().parent / "_configs"

_PATHS = (
    ("run", "root"),
    ("model", "path"),
    ("model", "reference"),
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
    try:
        with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
            node = hydra_compose("config", overrides=[*overrides, *searchpath])
        config = _to_config(node)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, overrides)) from error
    _make_paths_absolute(config)
    return config


def _make_paths_absolute(config: Config) -> None:
    """A path means the same on every node and in every later command, whatever its directory."""
    for section, name in _PATHS:
        value = getattr(getattr(config, section), name)
        if value is not None:
            setattr(getattr(config, section), name, str(Path(value).expanduser().absolute()))


def load(path: Path) -> Config:
    """Read back a configuration published by :func:`publish`."""
    return _to_config(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))


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
    return (
        f"configuration: {text}{_suggestion(overrides, text)}\n"
        f"  overrides: {' '.join(overrides) or '(none)'}\n"
        "  `hpc-rlhf run --cfg job ...` prints every field; "
        "quote values that hold '=' or blanks: 'model.path=\"/a=b\"'"
    )


def _suggestion(overrides: Sequence[str], text: str) -> str:
    """``; did you mean run.name?`` for a key that the message names and no field has."""
    known = [name for name, _ in _leaves("", asdict(Config()))]
    for key in (override.partition("=")[0].lstrip("+~") for override in overrides):
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
        if key not in known and f"'{key}'" in text and close and "Available" not in text:
            return f"; did you mean {close[0]}?"
    return ""

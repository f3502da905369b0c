"""Opening a run: a new directory, or the one that is there and holds the same configuration."""

import os
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import hpc_rlhf
from hpc_rlhf import compose
from hpc_rlhf.config import Config, Schedule
from hpc_rlhf.data import tokens
from hpc_rlhf.data.tokens import TokenDataset
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_json, read_json
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import FrozenRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What may change between attempts without changing what is learned.
RESUMABLE_CHANGES = (
    *("cluster.", "sampler.", "checkpoint.", "sync.", "learner.parallel."),
    *("learner.collective_timeout_s", "run.max_attempts_without_progress"),
    *("data.cache", "offline.max_skipped_steps"),
)


def run_directory(config: Config) -> RunDir:
    return RunDir(Path(config.run.root).absolute() / config.run.name)


def data_cache(config: Config) -> Path:
    """Where tokenised data sets and a reference's log-probs are kept, for all runs of a root."""
    return Path(config.data.cache or Path(config.run.root).absolute() / ".cache")


def open_examples(
    config: Config,
    path: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    progress: Callable[[int], None] | None = None,
) -> TokenDataset:
    """The tokenised demonstrations or pairs of a file, made if no run of this root has made them.

    Raises:
        UserError: see :func:`hpc_rlhf.data.tokens.prepare`.
    """
    return tokens.prepare(
        Path(path),
        config.data,
        tokenizer,
        Path(config.model.path),
        pairs=config.stage.learns_from_pairs,
        max_tokens=config.model.max_sequence_tokens,
        cache=data_cache(config),
        progress=progress,
    )


def check_resume(config: Config) -> None:
    """Refuse to continue a run under another configuration.

    Raises:
        UserError: the directory holds something else, or a run whose configuration differs; each
            difference is named.
    """
    run = run_directory(config)
    if not run.path.exists():
        return
    if not run.path.is_dir():
        raise UserError(f"{run.path} is not a directory; choose another run.name")
    if not run.config.exists():
        if any(run.path.iterdir()):
            raise UserError(
                f"{run.path} exists and is not a run (no {run.config.name}); choose another run.name"
            )
        return
    if not os.access(run.path, os.W_OK):
        raise UserError(
            f"{run.path} belongs to somebody else (not writable); choose another run.name"
        )
    resumable: tuple[str, ...] = RESUMABLE_CHANGES
    if config.learner.optimizer.schedule is Schedule.CONSTANT:
        resumable += ("run.steps",)  # else the learning rate of every step depends on it
    changed = {
        name: values
        for name, values in compose.differences(compose.load(run.config), config).items()
        if not name.startswith(resumable)
    }
    if changed:
        lines = [f"  {name}: was {old!r}, now {new!r}" for name, (old, new) in changed.items()]
        raise UserError(
            f"{run.path} is a run with another configuration:\n"
            + "\n".join(lines)
            + "\n  give the same overrides to resume it, or another run.name to start afresh"
        )


def open_run(config: Config) -> RunDir:
    """Create the run directory, or continue the one that is there; see :func:`check_resume`.

    The configuration file is that of the newest attempt: what may change, may change on resume.
    """
    check_resume(config)
    run = run_directory(config)
    for directory in (run.path, run.attempts, run.checkpoints, run.rollouts, run.metrics):
        directory.mkdir(parents=True, exist_ok=True)
    run.ensure_token()
    if not run.identity.exists():
        publish_json(
            run.identity,
            {
                "name": config.run.name,
                "id": uuid.uuid4().hex,
                "created": time.time(),
                "host": platform.node(),
                "version": hpc_rlhf.__version__,
                "commit": _commit(),
            },
        )
    compose.publish(run.config, config)
    return run


def pin_identity(run: RunDir, models: Sequence[FrozenRef], data: Mapping[str, str]) -> None:
    """Record the frozen models and data sets of a run; once recorded, refuse others.

    Args:
        data: path -> sha256.

    Raises:
        UserError: one of them is not what the run began with; names expected and found.
    """
    identity = read_json(run.identity)
    found = {"frozen": {model.role: asdict(model) for model in models}, "data": dict(data)}
    if "frozen" not in identity:
        publish_json(run.identity, identity | found)
        return
    for model in models:
        expected = identity["frozen"].get(model.role, {}).get("sha256")
        if expected != model.sha256:
            raise UserError(
                f"{model.role} model {model.path}: the run began with sha256 {expected}, found "
                f"{model.sha256}. Put the original back, or start a new run"
            )
    for path, sha256 in data.items():
        expected = identity["data"].get(path)
        if expected != sha256:
            raise UserError(
                f"{path}: the run began with sha256 {expected}, found {sha256}. "
                "Put the original back, or start a new run"
            )


def find_run(text: str, root: str = "runs") -> RunDir:
    """A run by its directory or by its name under ``root``.

    Raises:
        UserError: neither is a run.
    """
    for path in (Path(text), Path(root) / text):
        if (path / "config.yaml").exists():
            return RunDir(path.absolute())
    raise UserError(
        f"no run {text!r}: neither {Path(text)} nor {Path(root) / text} has a config.yaml"
    )


def _commit() -> str | None:
    """The commit of the checkout that this package is imported from, None outside of one."""
    source = Path(hpc_rlhf.__file__).resolve().parents[1]
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None

"""Opening a run: a new directory, or the one that is there and holds the same configuration."""

import os
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpc_rlhf
from hpc_rlhf import compose
from hpc_rlhf.checkpoint.frozen import pinned
from hpc_rlhf.config import Config, Schedule
from hpc_rlhf.data import tokens
from hpc_rlhf.data.tokens import TokenDataset
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_json, read_json, write_failure
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import FrozenRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What may change between attempts without changing what is learned.
RESUMABLE_CHANGES = (
    *("cluster.", "sampler.", "checkpoint.", "sync.", "learner.parallel."),
    *("learner.collective_timeout_s", "run.max_attempts_without_progress"),
    *("data.cache", "offline.max_skipped_steps", "algorithm.max_skipped_steps"),
    # memory, speed and patience; like another layout, they change no more than rounding
    *("learner.micro_batch_tokens", "learner.recompute", "learner.logprob_chunk_tokens"),
    *("reward.timeout_s", "reward.workers", "reward.max_failure_fraction"),
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
        if not _is_unbegun(run):
            raise UserError(
                f"{run.path} exists and is not a run (no {run.config.name}); choose another run.name"
            )
        return
    if not os.access(run.path, os.W_OK):
        raise UserError(
            f"{run.path} belongs to somebody else (not writable); choose another run.name"
        )
    _check_frozen_there(run)
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
        if "run.steps" in changed:
            schedule = config.learner.optimizer.schedule
            lines.append(
                f"  (with learner.optimizer.schedule={schedule} the learning rate of every step depends "
                "on run.steps, those that are done included; only with constant may it change)"
            )
        raise UserError(
            f"{run.path} is a run with another configuration:\n"
            + "\n".join(lines)
            + "\n  give the same overrides to resume it, or another run.name to start afresh"
        )


def _is_unbegun(run: RunDir) -> bool:
    """Whether a directory holds no more than a start leaves that was cut short, or is under way."""
    found = {path for path in run.path.iterdir() if not path.name.startswith(".")}  # temporary
    empty = {path for path in _directories(run) if path in found and not any(path.iterdir())}
    return found <= {*empty, run.token_file, run.identity, run.claims}


def _directories(run: RunDir) -> tuple[Path, ...]:
    return (run.attempts, run.checkpoints, run.rollouts, run.metrics)


def _check_frozen_there(run: RunDir) -> None:
    """Refuse a run whose frozen models are gone; whether they changed, the learner's ranks see."""
    models, _ = pinned(run.identity)
    for model in models:
        if not any(Path(model.path).glob("*.safetensors")):
            raise UserError(
                f"{model.role} model {model.path} is missing; the run began with sha256 "
                f"{model.sha256}: put it back, or start a new run"
            )


def open_run(config: Config) -> RunDir:
    """Create the run directory, or continue the one that is there; see :func:`check_resume`.

    The configuration file is that of the newest attempt: what may change, may change on resume.

    Raises:
        UserError: see :func:`check_resume`; or the directory cannot be written.
    """
    check_resume(config)
    run = run_directory(config)
    try:
        _make(run, config)
    except OSError as error:
        raise UserError(f"run.root={config.run.root}: {write_failure(error, run.path)}") from error
    return run


def _make(run: RunDir, config: Config) -> None:
    for directory in (run.path, *_directories(run)):
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


def pin_models(run: RunDir, models: Sequence[FrozenRef]) -> None:
    """Record the frozen models of a run; once recorded, refuse others.

    Raises:
        UserError: one of them is not what the run began with; names expected and found.
    """
    expected = _pin(run, "frozen", {model.role: asdict(model) for model in models})
    for model in models:
        was = expected.get(model.role, {}).get("sha256")
        if was != model.sha256:
            raise UserError(_changed(f"{model.role} model {model.path}", was, model.sha256))


def pin_data(run: RunDir, data: Mapping[str, str]) -> None:
    """Record the data sets of a run, path -> sha256; once recorded, refuse others.

    Raises:
        UserError: one of them is not what the run began with; names expected and found.
    """
    expected = _pin(run, "data", dict(data))
    for path, sha256 in data.items():
        if expected.get(path) != sha256:
            raise UserError(_changed(path, expected.get(path), sha256))


def _pin(run: RunDir, key: str, found: dict[str, Any]) -> dict[str, Any]:
    """What ``run.json`` has under ``key``; ``found``, the first time."""
    identity = read_json(run.identity)
    if key not in identity:
        publish_json(run.identity, identity | {key: found})
        return found
    return dict(identity[key])


def _changed(what: str, expected: str | None, found: str) -> str:
    return (
        f"{what}: the run began with sha256 {expected}, found {found}. "
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

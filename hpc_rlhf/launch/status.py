"""The state of a run, read from its directory and one question to Slurm."""

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from hpc_rlhf.cluster.world import LOCAL_JOB
from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.diagnosis import read_progress
from hpc_rlhf.launch.srun import JobLine, accounted_lines, queue_lines
from hpc_rlhf.observe.metrics import METRICS_FILE
from hpc_rlhf.run_dir import Attempt, RunDir

_SHOWN_ERROR = 60  # characters, in a table


class RunState(StrEnum):
    NEW = "new"  # nothing was started or queued yet
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # resumable: run the same command again
    FAILED = "failed"  # so is this, from the last checkpoint


@dataclass(frozen=True)
class RunStatus:
    state: RunState
    attempt: int | None = None
    step: int | None = None
    phase: str | None = None
    job_id: str | None = None
    reason: str | None = None  # why the last attempt ended
    slurm: tuple[JobLine, ...] = ()  # of the job, by component; empty where Slurm was not asked


def describe_run(run: RunDir) -> RunStatus:
    """Describe a run from its files; where they leave it open, Slurm is asked about its job.

    Raises:
        ComponentError: Slurm was asked and did not answer.
    """
    numbers = run.attempt_numbers()
    status = _describe_attempt(run.attempt(numbers[-1])) if numbers else RunStatus(RunState.NEW)
    if run.complete.exists():
        return replace(status, state=RunState.COMPLETE)
    submitted = _read_optional(run.path / "submitit" / "submitted.json", "job_id", "time")
    started = _read_started(run.attempt(numbers[-1])) if numbers else None
    if submitted and (started is None or submitted["time"] > started["time"]):
        job_id = submitted["job_id"]  # newer than the last attempt
    elif status.state is RunState.RUNNING and started and _is_alive_here(started):
        return status
    else:
        job_id = status.job_id
        if status.state is not RunState.RUNNING and numbers:
            successor = _read_optional(run.attempt(numbers[-1]).successor, "job_id")
            job_id = successor["job_id"] if successor else job_id
    is_slurm = job_id is not None and not job_id.startswith(LOCAL_JOB)
    lines = queue_lines(str(job_id)) if is_slurm else []
    if lines:
        # with a job that ended, the same id: a requeue that waits
        running = any(line.state in ("RUNNING", "COMPLETING") for line in lines)
        ended = status.state is not RunState.RUNNING or job_id != status.job_id
        return replace(
            status,
            state=RunState.RUNNING if running and not ended else RunState.QUEUED,
            job_id=job_id,
            slurm=tuple(lines),
        )
    if is_slurm:
        status = replace(status, slurm=tuple(accounted_lines(str(job_id))))
    if status.state is RunState.RUNNING:
        reason = "its supervisor ended without a word: it was killed, or its node died"
        return replace(status, state=RunState.FAILED, reason=reason)
    if status.state is RunState.NEW and job_id:
        reason = f"job {job_id} left the queue before it began an attempt"
        return replace(status, state=RunState.FAILED, job_id=job_id, reason=reason)
    return status


@dataclass(frozen=True)
class Overview:
    """One of many runs, in a line."""

    run: RunDir
    stage: str | None  # None: its configuration cannot be read
    state: str
    step: int | None
    steps: int | None  # of the whole run
    active: float  # Unix time of the newest file that it wrote


def list_runs(root: Path) -> list[Overview]:
    """All runs in ``root``, the one that was active last at the end."""
    runs = [RunDir(path.parent) for path in root.glob("[!.]*/config.yaml")]
    return sorted((_overview(run) for run in runs), key=lambda one: one.active)


def _overview(run: RunDir) -> Overview:
    stage, steps = read_goal(run)
    step = None
    try:
        status = describe_run(run)
        state, step = str(status.state), status.step
    except (ComponentError, UserError) as error:  # of this run: the others are listed all the same
        state = f"unknown: {error}"[:_SHOWN_ERROR]
    signs = [run.config, run.metrics / METRICS_FILE, run.path / "submitit" / "submitted.json"]
    if numbers := run.attempt_numbers():
        newest = run.attempt(numbers[-1])
        signs += [newest.progress, newest.started, newest.ended]
    active = max((path.stat().st_mtime for path in signs if path.exists()), default=0.0)
    return Overview(run, stage, state, step, steps, active)


def read_goal(run: RunDir) -> tuple[str | None, int | None]:
    """Stage and steps of a run by its configuration; without the checks, and so the time, of a start."""
    try:
        config = yaml.safe_load(run.config.read_text())
        return str(config["stage"]), int(config["run"]["steps"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None, None


def check_not_queued(run: RunDir) -> None:
    """Refuse to queue a second job for a run.

    Raises:
        UserError: names the job that there is.
    """
    status = describe_run(run)
    if status.state in (RunState.QUEUED, RunState.RUNNING):
        raise UserError(
            f"{run.path}: job {status.job_id} is {status.state} for it; wait for it, or cancel it first "
            f"(`scancel {status.job_id}`)"
        )


def _describe_attempt(attempt: Attempt) -> RunStatus:
    started = _read_started(attempt)
    ended = _read_optional(attempt.ended, "exit_code", "reason")
    progress = read_progress(attempt)
    return RunStatus(
        _ENDED_STATES.get(ended["exit_code"], RunState.FAILED) if ended else RunState.RUNNING,
        attempt=attempt.number,
        step=progress.step,
        phase=progress.phase,
        job_id=started["job_id"] if started else None,
        reason=ended["reason"] if ended else None,
    )


_ENDED_STATES = {
    int(ExitCode.DONE): RunState.COMPLETE,
    int(ExitCode.INTERRUPTED): RunState.INTERRUPTED,
}


def _is_alive_here(started: dict[str, Any]) -> bool:
    """Whether the supervisor runs on this machine (False also where that cannot be known)."""
    return started["host"] == os.uname().nodename and Path(f"/proc/{started['pid']}").exists()


def _read_started(attempt: Attempt) -> dict[str, Any] | None:
    return _read_optional(attempt.started, "job_id", "time", "host", "pid")


def _read_optional(path: Path, *keys: str) -> dict[str, Any] | None:
    return read_json(path, *keys) if path.exists() else None

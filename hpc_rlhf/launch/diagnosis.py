"""From what is left of an attempt to one sentence: which component, node and rank, in which phase."""

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rlhf.cluster.world import LOCAL_JOB
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import DamagedFile, publish_json, read_json
from hpc_rlhf.launch.steps import StepExit, TaskDeath
from hpc_rlhf.run_dir import Attempt

# A peer's death makes others abort (NCCL's watchdog), or ends them politely: consequences.
_WEAK_SIGNALS = {
    None,
    signal.SIGABRT,
    signal.SIGTERM,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGPIPE,
}
# Asked to stop, be it before the process could handle that: nothing is lost but the attempt.
_INTERRUPTED_CODES = {ExitCode.INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGUSR2}


@dataclass(frozen=True)
class FailureRecord:
    """What a process wrote about its own end: ``ATTEMPT/failures/<component>-<rank>.json``."""

    rank: int
    node: str
    phase: str | None
    error: str
    time: float  # Unix time of the exception


@dataclass(frozen=True)
class Progress:
    """What the coordinator was at, at last."""

    step: int | None = None
    phase: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Why a step ended, as data and as a sentence without its end."""

    reason: str
    exit_code: ExitCode
    component: str
    node: str | None = None
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    killed: bool = False  # by a SIGKILL of which nobody says why
    of_a_peer: bool = False  # all that is known is that a connection to another process broke
    final: bool = False  # the run is complete, or does not go on by itself
    lost_nodes: tuple[str, ...] = ()


def read_progress(attempt: Attempt) -> Progress:
    value = _read_optional(attempt.progress)
    return Progress(value.get("step"), value.get("phase")) if value else Progress()


def announce_stop(attempt: Attempt, reason: str) -> None:
    """Say why the learner is about to stop by itself."""
    publish_json(attempt.stop, {"reason": reason, "time": time.time()})


def read_stop(attempt: Attempt) -> str | None:
    """Why the learner stopped by itself, None if it did not."""
    value = _read_optional(attempt.stop)
    return str(value["reason"]) if value else None


def failure_path(attempt: Attempt, component: str, rank: int) -> Path:
    return attempt.failures / f"{component}-{rank}.json"


def read_failures(attempt: Attempt, component: str) -> dict[int, FailureRecord]:
    """Return the failure records of a component's processes by rank (replica, where replicated)."""
    records = {}
    for path in attempt.failures.glob(f"{component}-*.json"):
        value = _read_optional(path)
        if value:
            record = FailureRecord(
                rank=int(value["rank"]),
                node=str(value["node"]),
                phase=value.get("phase"),
                error=str(value["error"]),
                time=float(value.get("time") or path.stat().st_mtime),
            )
            records[record.rank] = record
    return records


def diagnose(
    component: str,
    ended: StepExit,
    records: dict[int, FailureRecord],
    progress: Progress,
    *,
    replica: int | None = None,
    nodes: Sequence[str] = (),
    asked_by: str | None = None,
) -> Diagnosis:
    """Name the process that ended a step, before its peers that died in consequence.

    In this order: a node that failed; a task that a signal of its own killed and that could write
    nothing; the exception that was raised first, before those about lost connections to peers (the
    clocks of nodes differ), where a peer was waited for too long and said nothing itself, that peer;
    the task that was seen to end first.

    Args:
        records: failure records of the step's processes, by the rank in its world.
        nodes: of the step's ranks, in rank order.
        asked_by: what asked the attempt to stop, if anything did.
    """
    death = _killed(ended, records)
    of_a_peer = False
    if death is None and records:
        first = min(records.values(), key=lambda record: (_is_of_a_peer(record), record.time))
        culprit = TaskDeath(first.rank, first.node)
        what, detail, phase = "failed", f": {first.error}", first.phase
        silent = _silent(ended, records, nodes)
        waited = [record for record in records.values() if _TIMED_OUT.search(record.error)]
        of_a_peer = _is_of_a_peer(first)
        if silent and waited and of_a_peer:
            culprit, *others = silent
            peer = min(waited, key=lambda record: record.time)
            also = "".join(f", rank {one.rank} on {one.node} said nothing either" for one in others)
            what, phase = "hangs", peer.phase
            detail = f"{also}: rank {peer.rank} on {peer.node} waited for it: {peer.error}"
    elif death is not None or ended.deaths:
        culprit = death or ended.deaths[0]
        what, detail, phase = _describe(culprit), "", None
    else:
        culprit = TaskDeath(None, None)
        what, detail, phase = f"ended with exit code {ended.returncode}", "", None
        if ended.detail:
            detail = f": {ended.detail}"

    subject = component
    if replica is not None:
        subject += f" replica {replica}"
    elif culprit.rank is not None:
        subject += f" rank {culprit.rank}"
    where = f" on {culprit.node}" if culprit.node else ""
    when = ""
    if replica is None:  # the phases are the learner's, a replica knows none
        phase = phase or progress.phase
        when = f" in phase {phase}" if phase else ""
        when += f" of step {progress.step}" if phase and progress.step is not None else ""
    reason = f"{subject}{where} {what}{when}{detail}"
    if replica is None and not culprit.node_failed and ended.returncode in _INTERRUPTED_CODES:
        reason = f"{component} stopped on request ({asked_by or 'a signal to its tasks'}){when}"
    return Diagnosis(
        reason=reason,
        exit_code=_exit_code(ended, culprit, recorded=bool(records)),
        component=component,
        node=culprit.node,
        rank=culprit.rank if replica is None else replica,
        phase=phase,
        step=progress.step,
        killed=culprit.signal == signal.SIGKILL and culprit.cause is None,
        of_a_peer=of_a_peer,
    )


def memory_hint(job_id: str) -> str:
    """What a SIGKILL that came from outside often is, and who knows."""
    if job_id.startswith(LOCAL_JOB):
        where = "the kernel's log (`dmesg`) has it"
    else:
        where = f"compare with the memory asked for: sacct -j {job_id} --format=JobID,State,MaxRSS"
    return f"often that is the out-of-memory killer; {where}"


def _silent(
    ended: StepExit, records: dict[int, FailureRecord], nodes: Sequence[str]
) -> list[TaskDeath]:
    """The tasks that had to be killed at the step's end, and had written nothing until then."""
    heard = {*records, *(death.rank for death in ended.deaths)}
    return [TaskDeath(rank, node) for rank, node in enumerate(nodes) if rank not in heard]


def _killed(ended: StepExit, records: dict[int, FailureRecord]) -> TaskDeath | None:
    """The first task that was killed, or lost with its node, and had no time to say why."""
    for death in ended.deaths:
        if death.node_failed:
            return death
        if death.rank not in records and death.signal not in _WEAK_SIGNALS:
            return death
    return None


# what gloo, NCCL, torch's store and sockets say when a process at their other end is gone
_LOST_PEER = re.compile(
    r"connection (was )?(reset|refused|closed|aborted)|closed by peer|remote process exited"
    r"|broken pipe|socket closed|gloo|nccl|DistBackendError|DistNetworkError",
    re.IGNORECASE,
)

# ... and where it is there and does not answer
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)


def _is_of_a_peer(record: FailureRecord) -> bool:
    """Whether an exception may well be the consequence of another process's end."""
    return _LOST_PEER.search(record.error) is not None


def _describe(death: TaskDeath) -> str:
    if death.node_failed:
        return "lost that node"
    if death.signal is not None:
        cause = f", {death.cause}" if death.cause else ""
        return f"was killed by signal {death.signal} ({signal.Signals(death.signal).name}{cause})"
    return f"exited with code {death.exit_code}"


def _exit_code(ended: StepExit, culprit: TaskDeath, *, recorded: bool) -> ExitCode:
    if culprit.node_failed or ended.returncode in _INTERRUPTED_CODES:
        return ExitCode.INTERRUPTED
    # without a record it may be the 2 of an interpreter or a shell that could not begin
    if ended.returncode == ExitCode.BAD_INPUT and recorded:
        return ExitCode.BAD_INPUT
    return ExitCode.DONE if ended.returncode == 0 else ExitCode.FAILED


def _read_optional(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where it is absent, or was written by a process that died in it."""
    try:
        return read_json(path)
    except (FileNotFoundError, DamagedFile):
        return None

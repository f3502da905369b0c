"""How a run goes on by itself after an attempt, and when it does not.

A job that saves and exits within its grace time is over for Slurm, which requeues only what it had to
kill. So the supervisor asks for the requeue itself, or has queued a successor beforehand.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hpc_rlhf.checkpoint import manifest
from hpc_rlhf.checkpoint.save_point import BEGINNING, SavePoint
from hpc_rlhf.config import Requeue
from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import publish_json, read_json
from hpc_rlhf.launch.diagnosis import Diagnosis
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.launch.srun import (
    COMMAND_TIMEOUT_S,
    CommandKilled,
    JobRecord,
    job_record,
    slurm_command,
)
from hpc_rlhf.run_dir import Attempt, RunDir

QueueAgain = Callable[[str, Sequence[str]], str]
"""Queue the same job with a ``--dependency``, on other nodes than those named; return its id.

UserError: sbatch refused it.
"""


# ------------------------------------------------------------------------------------------- progress


@dataclass(frozen=True)
class Chain:
    """The attempts that follow from one submission: requeues of its job and its successors.

    What a person submits anew begins a new one, so that attempts without progress are forgiven.
    """

    name: str  # id of its first job
    predecessor: str | None = None  # job that this one was queued to succeed
    stalled: int = 0  # its latest attempts that began with the progress that the run still has


def find_chain(run: RunDir, job_id: str) -> Chain:
    """The chain that an attempt of ``job_id`` would continue, or begin."""
    numbers = run.attempt_numbers()
    if not numbers:
        return Chain(job_id)
    last = run.attempt(numbers[-1])
    started = _started(last)
    succeeds = _successor(last) == job_id
    if not succeeds and started.get("job_id") != job_id:
        return Chain(job_id)
    name = str(started.get("chain", job_id))
    predecessor = str(started["job_id"]) if succeeds else None
    return Chain(name, predecessor, _stalled(run, numbers, name))


def progress(run: RunDir) -> list[int]:
    """What the next attempt need not do again; grows with every attempt that is of use.

    Finished steps, mini-batches of the step after them, and finished samples of that step: what the
    newest checkpoint holds, and what was left of a rollout.
    """
    newest = _newest(run)
    return [newest.step, newest.mini_batches, _samples_left(run, newest.step + 1)]


def _newest(run: RunDir) -> SavePoint:
    points = manifest.save_points(run.checkpoints)
    published = (p for p in points if (run.checkpoints / p.name / manifest.MANIFEST).exists())
    return next(published, BEGINNING)


def _samples_left(run: RunDir, step: int) -> int:
    if not run.partial_rollout.exists():
        return 0
    from hpc_rlhf.rollout import (
        store,  # HDF5 costs a third of a second that most starts do not need
    )

    try:
        rollouts, _ = store.read_step(run.partial_rollout)
    except (OSError, ValueError, KeyError):  # it does not count, and the learner will say why
        return 0
    left = [rollout for rollout in rollouts if rollout.step == step]
    return sum(rollout.completion.finish_reason != "abort" for rollout in left)


def conclude(plan: JobPlan, attempt: Attempt, ending: Diagnosis, *, by_user: bool) -> Diagnosis:
    """Decide whether the run goes on after an attempt that ends so.

    It does not after completion, bad input, a stop by hand (``by_user``: Ctrl-C), and after
    ``run.max_attempts_without_progress`` attempts in a row, which then fail whatever ended the last.
    """
    if ending.final or by_user or ending.exit_code in (ExitCode.DONE, ExitCode.BAD_INPUT):
        return replace(ending, final=True)
    if plan.requeue is Requeue.NONE:
        return ending
    started = _started(attempt)
    stalled = _stalled(plan.run, plan.run.attempt_numbers(), str(started.get("chain")))
    if stalled < plan.max_attempts_without_progress:
        return ending
    return replace(
        ending, reason=_stalled_reason(plan, stalled, ending), exit_code=ExitCode.FAILED, final=True
    )


def check_chain(plan: JobPlan, chain: Chain) -> Diagnosis | None:
    """Why a queued job is not to begin an attempt, None if it is."""
    if plan.run.complete.exists():
        return Diagnosis("the run is complete", ExitCode.DONE, "supervisor", final=True)
    if plan.requeue is not Requeue.NONE and chain.stalled >= plan.max_attempts_without_progress:
        reason = _stalled_reason(plan, chain.stalled, None)
        return Diagnosis(reason, ExitCode.FAILED, "supervisor", final=True)
    if chain.predecessor is not None and _job_or_none(chain.predecessor) == "CANCELLED":
        reason = f"job {chain.predecessor} was cancelled: its successor does not go on either"
        return Diagnosis(reason, ExitCode.INTERRUPTED, "supervisor", final=True)
    return None


def _stalled_reason(plan: JobPlan, stalled: int, ending: Diagnosis | None) -> str:
    last = f"; the last one: {ending.reason}" if ending else ""
    short = ""
    if ending is not None and ending.exit_code is ExitCode.INTERRUPTED:
        short = (
            "An allocation must hold the set-up and at least one step: raise cluster.time_min "
            f"({plan.time_min}) if it does not. "
        )
    return (
        f"{stalled} attempts in a row made no progress beyond step {_newest(plan.run)}, and "
        f"run.max_attempts_without_progress={plan.max_attempts_without_progress}{last}. {short}"
        "Submit it again when the cause is removed"
    )


def _stalled(run: RunDir, numbers: list[int], chain: str) -> int:
    now, count = progress(run), 0
    for number in reversed(numbers):
        started = _started(run.attempt(number))
        # one that died before it wrote that it started made no progress either
        if started and (started.get("chain"), started.get("progress")) != (chain, now):
            break
        count += 1
    return count


def _started(attempt: Attempt) -> dict[str, object]:
    return read_json(attempt.started) if attempt.started.exists() else {}


# ------------------------------------------------------------------------------------- ways of going on


class Continuation(Protocol):
    """What makes the next attempt of a run."""

    def begin(self, attempt: Attempt) -> str | None:
        """Prepare the next attempt when this one begins; returns what was done, for the log."""

    def go_on(self, lost: Sequence[str] = ()) -> tuple[bool, str]:
        """Make it happen, when this attempt has ended; whether it will, and how or why not.

        Args:
            lost: nodes that the attempt lost, and Slurm may not know of yet.
        """

    def stop(self) -> str | None:
        """Take back what :meth:`begin` prepared: the run is complete, or is not to go on."""


def continuation(
    plan: JobPlan, queue_again: QueueAgain, environ: Mapping[str, str]
) -> Continuation:
    """The way of going on that the plan asks for; none outside of a Slurm job."""
    job_id = environ.get("SLURM_JOB_ID")
    if job_id is None or plan.requeue is Requeue.NONE:
        return ByHand(plan)
    following = NextJob(plan.run)
    return (
        SelfRequeue(job_id, queue_again, following)
        if plan.requeue is Requeue.REQUEUE
        else Successor(job_id, queue_again, following)
    )


class NextJob:
    """The job of a chain's next run, which Slurm lets begin when a job of this run ends with exit code 0.

    Where this run goes on in a job of another id, it has to wait for that one: the end of the old job
    would cancel it.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def wait_for(self, job_id: str) -> str:
        """Let it begin after ``job_id``; returns what was done, as the end of a line of the log."""
        if not self._run.next_job.exists():
            return ""
        waiting = read_json(self._run.next_job)["job_id"]
        try:
            slurm_command(
                ["scontrol", "update", f"JobId={waiting}", f"Dependency=afterok:{job_id}"]
            )
        except ComponentError as error:
            return f"; the chain's next job {waiting} does not wait for it ({error})"
        return f"; the chain's next job {waiting} waits for it"


class ByHand:
    """Nothing happens by itself."""

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan

    def begin(self, attempt: Attempt) -> str | None:
        return None

    def go_on(self, lost: Sequence[str] = ()) -> tuple[bool, str]:
        return False, f"the same command resumes {self._plan.run_dir}"

    def stop(self) -> str | None:
        return None


class SelfRequeue:
    """The job asks for its own requeue while it still runs.

    Where that is refused (JobRequeue=0 and the like), and after the loss of a node, the same job is
    queued anew instead: a requeued one could come back to that node, and Slurm 22.05 gives it no GPUs
    any more ("node offset invalid").
    """

    def __init__(self, job_id: str, queue_again: QueueAgain, following: NextJob) -> None:
        self._job_id = job_id
        self._queue_again = queue_again
        self._following = following
        self._attempt: Attempt | None = None

    def begin(self, attempt: Attempt) -> str | None:
        self._attempt = attempt
        return None

    def go_on(self, lost: Sequence[str] = ()) -> tuple[bool, str]:
        try:
            job = job_record(self._job_id)
        except ComponentError as error:
            return False, f"submit it again to resume: Slurm does not answer ({error})"
        if not is_wanted(job):
            # A requeue would bring back what was cancelled; what Slurm itself requeues comes
            # back without us.
            return False, f"not requeued: Slurm is ending job {self._job_id} already"
        refusals: list[str] = []
        for way in (self._queue, self._requeue) if lost else (self._requeue, self._queue):
            try:
                return True, "; ".join([*refusals, way(lost)])
            except (UserError, ComponentError) as error:
                refusals.append(str(error))
        return False, f"submit it again to resume: {'; '.join(refusals)}"

    def _requeue(self, lost: Sequence[str]) -> str:
        try:
            slurm_command(["scontrol", "requeue", self._job_id])
        except CommandKilled as killed:
            # By what it asked for: a requeue ends every process of the job, this command's too.
            return f"job {self._job_id} is requeued ({killed})"
        return f"job {self._job_id} is requeued"

    def _queue(self, lost: Sequence[str]) -> str:
        assert self._attempt is not None
        queued = self._queue_again(f"afterany:{self._job_id}", lost)
        _record_successor(self._attempt, queued, self._job_id)
        without = f", without {', '.join(lost)}" if lost else ""
        how = f"job {queued} is queued in the place of job {self._job_id}{without}"
        return how + self._following.wait_for(queued)

    def stop(self) -> str | None:
        return None


def is_wanted(job: JobRecord) -> bool:
    """Whether nobody has ended the job, other than its own time limit.

    A job that is cancelled is COMPLETING before its processes get their first signal; in the grace
    time of a preemption it is RUNNING.
    """
    return job.state == "RUNNING" or (job.state == "COMPLETING" and job.reason == "TimeLimit")


class Successor:
    """The same job is queued when an attempt begins, to start when this one's job is over."""

    def __init__(self, job_id: str, queue_again: QueueAgain, following: NextJob) -> None:
        self._job_id = job_id
        self._queue_again = queue_again
        self._following = following
        self._queued: str | None = None

    def begin(self, attempt: Attempt) -> str | None:
        try:
            self._queued = self._queue_again(f"afterany:{self._job_id}", ())
        except (UserError, ComponentError) as error:
            return f"no successor was queued, the run will not go on by itself: {error}"
        _record_successor(attempt, self._queued, self._job_id)
        how = f"job {self._queued} is queued to succeed this one"
        return how + self._following.wait_for(self._queued)

    def go_on(self, lost: Sequence[str] = ()) -> tuple[bool, str]:
        if self._queued is None:
            return False, "no successor was queued: submit it again to resume"
        how = f"job {self._queued} goes on"
        if lost:
            without = f"ExcNodeList={','.join(lost)}"
            try:
                slurm_command(["scontrol", "update", f"JobId={self._queued}", without])
                how += f", without {', '.join(lost)}"
            except ComponentError as error:
                how += f", with {', '.join(lost)} if Slurm takes it for up by then ({error})"
        return True, how

    def stop(self) -> str | None:
        if self._queued is None:
            return None
        moved = self._following.wait_for(self._job_id)  # before what it waits for is cancelled
        try:
            slurm_command(["scancel", self._queued])
        except ComponentError as error:
            return f"the successor is still queued, cancel it by hand: {error}{moved}"
        return f"the successor, job {self._queued}, is cancelled{moved}"


def _record_successor(attempt: Attempt, queued: str, after: str) -> None:
    publish_json(attempt.successor, {"job_id": queued, "after": after, "time": time.time()})


def _successor(attempt: Attempt) -> str | None:
    return (
        str(read_json(attempt.successor, "job_id")["job_id"])
        if attempt.successor.exists()
        else None
    )


def _job_or_none(job_id: str) -> str | None:
    try:
        return job_record(job_id).state
    except ComponentError:
        return None


def queue_script_again(dependency: str, without: Sequence[str]) -> str:
    """Queue the batch script of this very job once more.

    Options given to sbatch on its command line are not in the script, and are lost.

    Args:
        without: nodes that it is not to get.

    Raises:
        ComponentError: Slurm does not give the script (this is no batch job).
        UserError: sbatch refused it.
    """
    script = slurm_command(["scontrol", "write", "batch_script", os.environ["SLURM_JOB_ID"], "-"])
    script = exclude_nodes(script, without)
    command = [*outside_of_job(os.environ), "sbatch", "--parsable", f"--dependency={dependency}"]
    done = subprocess.run(
        command,
        check=False,
        input=script,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def exclude_nodes(script: str, nodes: Sequence[str]) -> str:
    """A job script with nodes excluded from each of its components, beside those that it excludes."""
    if not nodes:
        return script
    lines: list[str] = []
    for line in script.splitlines():
        own = re.match(r"#SBATCH\s+(?:--exclude[= ]|-x\s*)(\S+)\s*$", line)
        lines.append(f"#SBATCH --exclude={own[1]},{','.join(nodes)}" if own else line)
        if line.startswith("#!") or re.match(r"#SBATCH\s+(het|pack)job\b", line):
            lines.append(f"#SBATCH --exclude={','.join(nodes)}")  # one below it takes its place
    return "\n".join(lines) + "\n"


def outside_of_job(environ: Mapping[str, str]) -> list[str]:
    """A command prefix that hides this process's job, if it is in one, from sbatch.

    sbatch passes its environment on: a job submitted from a job would find the variables of that
    one among its own.
    """
    if "SLURM_JOB_ID" not in environ:
        return []
    stale = [n for n in environ if n.startswith("SLURM_") and n not in _USER_VARIABLES]
    return ["env", *(f"--unset={name}" for name in sorted(stale))]


_USER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")

"""Submission to Slurm through Submitit, which knows no heterogeneous jobs by itself.

The batch script of the leader runs Submitit's pickled callable, :class:`SupervisedAttempt`, as its
own process: the supervisor. A hand-written script runs ``hpc-rlhf run`` in its place.
"""

import contextlib
import io
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths
from submitit.slurm import slurm as submitit_slurm

from hpc_rlhf.cluster.signals import StopFlag
from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import publish_json
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.launch.requeue import exclude_nodes, outside_of_job
from hpc_rlhf.launch.sbatch import render_script
from hpc_rlhf.launch.srun import SlurmStepLauncher, queue_states, slurm_command
from hpc_rlhf.launch.supervisor import work_on
from hpc_rlhf.run_dir import RunDir


@dataclass
class SupervisedAttempt:
    """What a queued job runs: Submitit pickles it, and the batch script calls it.

    It runs again in every requeue of the job; what there is to resume is in the run directory.
    """

    plan: JobPlan

    def __call__(self) -> int:
        """Supervise the run's next attempt.

        Returns:
            0: the run is complete.

        Raises:
            ComponentError: the run failed for good; Submitit's job result has the reason.
            SystemExit: the attempt ended otherwise (75 interrupted, 1 failed and tried again, 2 bad
                input, or another attempt holds the run): the job ends with that code and has no
                result.
        """
        flag = StopFlag()
        # In the place of Submitit's handlers for good: its own would requeue the job beside us,
        # and end the run after a few timeouts. USR2 is its signal, whatever ours is.
        flag.install(("TERM", "INT", "USR2", self.plan.signal))
        paths = JobEnvironment().paths
        _remove_leftovers(paths)
        try:
            ending = work_on(
                self.plan,
                SlurmStepLauncher,
                flag,
                lambda dependency, without: str(
                    _queue(self.plan, (f"--dependency={dependency}",), without).job_id
                ),
            )
        except UserError as error:
            print(f"hpc-rlhf: {error}", file=sys.stderr)
            raise SystemExit(int(ExitCode.BAD_INPUT)) from None
        if ending.exit_code == ExitCode.FAILED and ending.final:
            raise ComponentError(ending.reason)
        if ending.exit_code != ExitCode.DONE:
            raise SystemExit(int(ending.exit_code))
        return int(ending.exit_code)

    def checkpoint(self) -> DelayedSubmission:
        """What Submitit would requeue: the same again, for the state is in the run directory."""
        return DelayedSubmission(self)


def _remove_leftovers(paths: JobPaths) -> None:
    """Remove what an earlier run of this job left: a requeued job keeps its id and its files."""
    paths.result_pickle.unlink(missing_ok=True)  # Job.result() would return it as this run's
    for path in (paths.result_pickle, paths.submitted_pickle):
        # of a save that was cut short; Submitit refuses to save while it is there
        path.with_name(f"{path.name}.save_tmp").unlink(missing_ok=True)


class HetInfoWatcher(submitit_slurm.SlurmInfoWatcher):
    """Submitit's watcher of sacct, for jobs that sacct knows as ``12+0``, ``12+1``."""

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        return merge_components(super().read_info(string), _is_queued)


class HetSlurmJob(submitit_slurm.SlurmJob[int]):
    watcher = HetInfoWatcher(delay_s=30)


class HetSlurmExecutor(submitit_slurm.SlurmExecutor):
    """Submitit's executor with the job script of a :class:`JobPlan`.

    The pickled callable runs once, in the batch script of the leader, and not under srun.
    """

    job_class = HetSlurmJob

    def __init__(
        self,
        folder: Path,
        plan: JobPlan,
        options: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> None:
        """Args:
        options: of this submission alone, for sbatch's command line.
        without: nodes that the job is not to get.
        """
        # the countdown of timeouts would end a run that needs many walltimes
        super().__init__(folder, max_num_timeout=2**31, python=shlex.quote(plan.python))
        self.plan = plan
        self._options = options
        self._without = without
        self.parameters["time"] = plan.time_min

    @classmethod
    def name(cls) -> str:
        return "slurm"  # as whose environment the job is recognised

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return exclude_nodes(job_script(self.plan, self.folder), self._without)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*outside_of_job(os.environ), "sbatch", *self._options, str(submission_file_path)]


_LIVE_STATES = {
    "RUNNING": "RUNNING",
    "COMPLETING": "COMPLETING",
    "SUSPENDED": "RUNNING",
    "STOPPED": "RUNNING",
    "SIGNALING": "RUNNING",
    "STAGE_OUT": "RUNNING",
    "RESIZING": "RUNNING",
    "PENDING": "PENDING",
    "CONFIGURING": "PENDING",
    "REQUEUED": "REQUEUED",
    "REQUEUE_FED": "REQUEUED",
    "REQUEUE_HOLD": "REQUEUED",
    "SPECIAL_EXIT": "REQUEUED",
}
"""Slurm's states of a job that is not over, as those that Submitit waits on."""


def merge_components(
    stats: Mapping[str, dict[str, str]], is_queued: Callable[[str], bool]
) -> dict[str, dict[str, str]]:
    """Merge the lines of a heterogeneous job's components into one of the job.

    Args:
        stats: sacct's lines by job id, as Submitit reads them.
        is_queued: whether squeue still knows the job; asked where sacct says it failed, for it
            says NODE_FAIL or PREEMPTED for seconds while the job is being requeued.
    """
    components: dict[str, list[dict[str, str]]] = {}
    for job_id, line in stats.items():
        components.setdefault(job_id.partition("+")[0], []).append(line)
    merged = dict(stats)
    for job_id, lines in components.items():
        states = [line["State"].split()[0] for line in lines]
        live = [_LIVE_STATES[state] for state in states if state in _LIVE_STATES]
        bad = [state for state in states if state not in _LIVE_STATES and state != "COMPLETED"]
        if bad and not live and is_queued(job_id):
            live = ["REQUEUED"]
        state = [*live, *bad, "COMPLETED"][0]
        merged[job_id] = {
            "JobID": job_id,
            # Submitit would wait for ever on a job that is PREEMPTED and was not requeued
            "State": "CANCELLED by preemption" if state == "PREEMPTED" else state,
            "NodeList": ",".join(line["NodeList"] for line in lines),
        }
    return merged


def _is_queued(job_id: str) -> bool:
    try:
        return bool(queue_states(job_id))
    except ComponentError:
        return True  # Slurm does not answer: whoever waits goes on waiting


def job_script(plan: JobPlan, folder: Path | None = None) -> str:
    """The text of the job script that :func:`submit` queues."""
    folder = (folder or submission_folder(plan.run)).absolute()
    paths = JobPaths(folder)
    return render_script(
        plan,
        [plan.python, "-u", "-m", "submitit.core._submit", str(folder)],
        output=Path(str(paths.stdout).replace("%t", "0")),
        error=Path(str(paths.stderr).replace("%t", "0")),
        environment=(("SUBMITIT_EXECUTOR", HetSlurmExecutor.name()),),
    )


def job_scripts(plans: Sequence[JobPlan], links: Sequence[str]) -> str:
    """The texts of a chain's job scripts, each below the name of its link and how it is queued."""
    headings = [f"# {links[0]}\n"]
    for name, before in zip(links[1:], links, strict=False):
        headings.append(f"\n# {name}: sbatch {shlex.join(after_ok(f'JOB_OF_{before}'))}\n")
    return "".join(h + job_script(plan) for h, plan in zip(headings, plans, strict=True))


def submission_folder(run: RunDir) -> Path:
    """Submitit's files of all jobs of a run, and ``submitted.json``: the last one queued."""
    return run.path / "submitit"


def submit(plan: JobPlan) -> submitit.Job[int]:
    """Queue the run's job and return at once; ``.result()`` waits for it.

    Raises:
        UserError: there is no Slurm here, or sbatch refused the job, with its message.
    """
    job = _queue(plan)
    _record_submission(plan, job)
    return job


def submit_chain(plans: Sequence[JobPlan]) -> list[submitit.Job[int]]:
    """Queue the jobs of dependent runs, each to begin when the one before has completed its run.

    All of them or none: the first of several is held until the last is queued.

    Raises:
        UserError: see :func:`submit`; those that were queued by then are cancelled.
        ComponentError: the first one could not be released, which the user has to do then.
    """
    jobs: list[submitit.Job[int]] = []
    try:
        for plan in plans:
            options = after_ok(jobs[-1].job_id) if jobs else ("--hold",) if len(plans) > 1 else ()
            jobs.append(_queue(plan, options))
            _record_submission(plan, jobs[-1])
    except UserError:
        if jobs:
            slurm_command(["scancel", *(job.job_id for job in jobs)])
        raise
    for plan, following in zip(plans, jobs[1:], strict=False):
        publish_json(plan.run.next_job, {"job_id": following.job_id, "time": time.time()})
    if len(jobs) > 1:
        slurm_command(["scontrol", "release", jobs[0].job_id])
    return jobs


def after_ok(job: str) -> tuple[str, ...]:
    """Options of a job that needs what ``job`` makes: it is cancelled when that fails."""
    return (f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes")


def _record_submission(plan: JobPlan, job: submitit.Job[int]) -> None:
    folder = submission_folder(plan.run)
    publish_json(folder / "submitted.json", {"job_id": job.job_id, "time": time.time()})


def _queue(
    plan: JobPlan, options: Sequence[str] = (), without: Sequence[str] = ()
) -> submitit.Job[int]:
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on the PATH: submit from a login node of a Slurm cluster, or use "
            "cluster.launcher=local"
        )
    executor = HetSlurmExecutor(submission_folder(plan.run), plan, options, without)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):  # Submitit prints what is in its error as well
            return executor.submit(SupervisedAttempt(plan))
    except FailedJobError as error:
        printed.truncate(0)
        raise UserError(f"sbatch refused the job: {str(error).strip()}") from error
    finally:
        sys.stderr.write(printed.getvalue())

"""Runs that go on by themselves in real Slurm jobs: preemption, walltime, deaths, cancellation."""

import os
import subprocess
import time

import pytest
from submitit.core.utils import FailedJobError

from hpc_rlhf.config import Het, Requeue
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.slurm import submit
from hpc_rlhf.launch.srun import job_record, queue_states
from hpc_rlhf.launch.status import RunState, describe_run
from hpc_rlhf.run_dir import RunDir
from tests.launch_driver import Driver, wait_until
from tests.slurm.jobs import accounting, ended, make_plan, wait_all_started

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

CYCLES = int(os.environ.get("WALLTIME_CYCLES", "1"))


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wait_again(driver: Driver, incarnation: int, timeout_s: float = 120) -> None:
    wait_until(
        lambda: driver.started("learner-0", incarnation) is not None,
        f"incarnation {incarnation} of the learner",
        timeout_s,
    )


def log(driver: Driver, attempt: int = 1) -> str:
    return (driver.run / f"attempts/{attempt}/logs/supervisor.log").read_text()


@pytest.mark.parametrize(("het", "taken"), [(Het.JOB, "sampler-0"), (Het.STEPS, "learner-0")])
def test_preempted_run_saves_within_the_grace_and_is_requeued(
    driver: Driver, het: Het, taken: str
) -> None:
    job = submit(make_plan(driver, het, Requeue.REQUEUE, partition="low"))
    wait_all_started(driver)
    node = driver.wait_started(taken)["world"]["node"]
    high = run(
        *("sbatch", "--parsable", "--partition=high", f"--nodelist={node}", "--exclusive"),
        *("--job-name=launch-test", "--output=/dev/null", "--wrap=sleep 3"),
    ).strip()
    began = time.monotonic()
    wait_until(lambda: RunDir(driver.run).attempt(1).ended.exists(), "the attempt to end", 60)
    assert time.monotonic() - began < 30  # the partition's GraceTime
    assert ended(driver)["exit_code"] == ExitCode.INTERRUPTED
    assert (driver.run / "checkpoints/step_8/manifest.json").exists()
    wait_again(driver, 1)
    assert job_record(job.job_id).restarts == 1
    assert job_record(high).state != "PENDING"
    assert f"job {job.job_id} is requeued" in log(driver)
    again = driver.started("learner-0", 1)
    assert again is not None
    assert (again["world"]["job_id"], again["world"]["attempt"]) == (job.job_id, 2)
    driver.do("finish")
    assert job.result() == ExitCode.DONE


@pytest.mark.parametrize("requeue", [Requeue.REQUEUE, Requeue.SUCCESSOR])
def test_walltimes(driver: Driver, requeue: Requeue) -> None:
    """The signal comes 50 s before the end of a minute; any number of walltimes is gone through."""
    submit(make_plan(driver, Het.STEPS, requeue, time_min=1, signal_delay_s=50))
    for cycle in range(CYCLES):
        wait_again(driver, cycle + 1)
        assert ended(driver, cycle + 1)["exit_code"] == ExitCode.INTERRUPTED
    last = RunDir(driver.run).attempt(CYCLES + 1)
    if requeue is Requeue.SUCCESSOR:
        wait_until(last.successor.exists, "the last attempt's successor")
    driver.do("finish")
    wait_until(lambda: last.ended.exists(), "the end")
    assert ended(driver, CYCLES + 1)["exit_code"] == ExitCode.DONE
    jobs = {read_json(RunDir(driver.run).attempt(n + 1).started)["job_id"] for n in range(CYCLES)}
    if requeue is Requeue.SUCCESSOR:
        assert len(jobs) == CYCLES
        left = read_json(last.successor)["job_id"]
        wait_until(lambda: not queue_states(left), "the successor to be cancelled")
    else:
        assert len(jobs) == 1


def test_a_site_that_forbids_requeueing(driver: Driver) -> None:
    """The same job is queued anew, and Slurm's refusal is in the log."""
    job = submit(make_plan(driver, Het.STEPS, Requeue.REQUEUE))
    wait_all_started(driver)
    run("scontrol", "update", f"JobId={job.job_id}", "Requeue=0")
    run("scancel", "--batch", "--signal=USR2", job.job_id)
    wait_again(driver, 1)
    assert ended(driver)["exit_code"] == ExitCode.INTERRUPTED
    again = read_json(RunDir(driver.run).attempt(2).started)
    assert again["job_id"] != job.job_id
    refused = f"scontrol requeue {job.job_id}: Requested operation is presently disabled"
    assert refused in log(driver)
    assert f"job {again['job_id']} is queued in the place of job {job.job_id}" in log(driver)
    driver.do("finish")
    wait_until(RunDir(driver.run).attempt(2).ended.exists, "the end")
    assert ended(driver, 2)["exit_code"] == ExitCode.DONE


@pytest.mark.parametrize("requeue", [Requeue.REQUEUE, Requeue.SUCCESSOR])
def test_cancelled_run_does_not_come_back(driver: Driver, requeue: Requeue) -> None:
    job = submit(make_plan(driver, Het.JOB, requeue))
    wait_all_started(driver)
    run("scancel", job.job_id)
    wait_until(lambda: RunDir(driver.run).attempt(1).ended.exists(), "the attempt to end")
    wait_until(lambda: not driver.processes(), "every process to be gone")
    assert accounting(job.job_id, Het.JOB)[0][0] == "CANCELLED"
    if requeue is Requeue.SUCCESSOR:
        successor = read_json(RunDir(driver.run).attempt(1).successor)["job_id"]
        assert accounting(successor, Het.JOB)[0] == ("FAILED", "75:0")
    assert RunDir(driver.run).attempt_numbers() == [1]
    wait_until(
        lambda: describe_run(RunDir(driver.run)).state is RunState.INTERRUPTED,
        "Slurm to let the job go",
    )


def test_deaths_without_progress_end_the_run(driver: Driver) -> None:
    plan = make_plan(driver, Het.STEPS, Requeue.REQUEUE, max_attempts_without_progress=2)
    driver.do("learner-0", "always kill")
    job = submit(plan)
    wait_again(driver, 1)
    with pytest.raises(FailedJobError, match="2 attempts in a row made no progress beyond step 0"):
        job.result()
    assert accounting(job.job_id, Het.STEPS) == [("FAILED", "1:0")]
    assert RunDir(driver.run).attempt_numbers() == [1, 2]
    assert "was killed by signal 9" in ended(driver, 2)["reason"]
    assert describe_run(RunDir(driver.run)).state is RunState.FAILED


def test_two_jobs_on_one_run(driver: Driver) -> None:
    plan = make_plan(driver, Het.STEPS, Requeue.REQUEUE)
    first = submit(plan)
    wait_all_started(driver)
    holder = read_json(next(RunDir(driver.run).claims.iterdir()))
    # to the one node that is left
    small = make_plan(driver, Het.STEPS, Requeue.REQUEUE, extra=(("nodes", "1"),))
    second = submit(small)
    assert accounting(second.job_id, Het.STEPS) == [("FAILED", "2:0")]
    said = second.paths.stderr.read_text()
    assert f"attempt 1, job {first.job_id}, pid {holder['pid']} on {holder['host']}, since" in said
    assert RunDir(driver.run).attempt_numbers() == [1]
    driver.do("finish")
    assert first.result() == ExitCode.DONE

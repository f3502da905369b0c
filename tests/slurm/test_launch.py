"""The supervisor in real Slurm jobs, with components of a few milliseconds."""

import json
import subprocess
import sys
import time

import pytest
from submitit.core.utils import FailedJobError, UncompletedJobError

from hpc_rlhf.config import Het, Requeue
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.launch.sbatch import render_script
from hpc_rlhf.launch.slurm import submit
from hpc_rlhf.launch.status import RunState, describe_run
from hpc_rlhf.run_dir import RunDir
from tests.launch_driver import Driver, wait_until
from tests.slurm.jobs import accounting, ended, make_plan, wait_all_started

pytestmark = pytest.mark.slurm


def test_heterogeneous_job_with_a_sampler_that_dies(driver: Driver) -> None:
    job = submit(make_plan(driver, Het.JOB))
    wait_all_started(driver)
    queue = subprocess.run(
        ["squeue", "-h", "-j", job.job_id, "-o", "%i %T"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert queue.stdout.split() == [f"{job.job_id}+0", "RUNNING", f"{job.job_id}+1", "RUNNING"]
    assert describe_run(RunDir(driver.run)).state is RunState.RUNNING

    ranks = [driver.wait_started(f"learner-{rank}") for rank in (0, 1)]
    samplers = [driver.wait_started(f"sampler-{replica}") for replica in (0, 1)]
    assert [rank["world"]["rank"] for rank in ranks] == [0, 1]
    assert {rank["world"]["size"] for rank in ranks} == {2}
    assert {process["world"]["job_id"] for process in (*ranks, *samplers)} == {job.job_id}
    nodes = [process["world"]["node"] for process in (*ranks, *samplers)]
    assert len(set(nodes)) == 3
    assert nodes[2] == nodes[3]
    assert [rank["gpus"] for rank in ranks] == ["0,1", "0,1"]
    assert sorted(sampler["gpus"] for sampler in samplers) == ["0", "1"]
    assert ranks[0]["omp"] == "1"

    driver.do("sampler-1", "kill")
    again = driver.wait_started("sampler-1", 1)
    assert again["world"]["node"] == nodes[3]
    assert driver.started("learner-0", 1) is None
    assert driver.started("sampler-0", 1) is None

    driver.do("finish")
    assert job.result() == ExitCode.DONE
    assert accounting(job.job_id, Het.JOB) == [("COMPLETED", "0:0")] * 2
    assert job.watcher.get_state(job.job_id, mode="force") == "COMPLETED"
    wait_until(lambda: not driver.processes(), "every process to be gone")
    logs = driver.run / "attempts/1/logs"
    assert (logs / "learner-1.log").read_text() == "learner-1 is up\n"
    assert (logs / "sampler-1.log").read_text() == 2 * "sampler-1 is up\n"
    log = (logs / "supervisor.log").read_text()
    assert f"sampler replica 1 on {nodes[3]} was killed by signal 9 (SIGKILL)" in log


@pytest.mark.parametrize("het", list(Het))
def test_killed_learner_task_ends_the_job(driver: Driver, het: Het) -> None:
    job = submit(make_plan(driver, het))
    wait_all_started(driver)
    node = driver.wait_started("learner-1")["world"]["node"]
    driver.do("learner-0", "deaf")  # as a rank that is blocked in a collective
    wait_until(lambda: (driver.run / "do/learner-0.deaf").exists(), "rank 0 to be deaf")
    began = time.monotonic()
    driver.do("learner-1", "kill")
    with pytest.raises(FailedJobError, match="ComponentError: learner rank 1 on"):
        job.result()
    assert accounting(job.job_id, het)[0] == ("FAILED", "1:0")
    assert time.monotonic() - began < 30
    reason = ended(driver)["reason"]
    assert reason.startswith(
        f"learner rank 1 on {node} was killed by signal 9 (SIGKILL) in phase train of step 7"
    )
    status = describe_run(RunDir(driver.run))
    assert (status.state, status.reason) == (RunState.FAILED, reason)
    assert (status.step, status.phase, status.job_id) == (7, "train", job.job_id)


def test_sampler_that_dies_three_times_in_a_row_ends_the_job(driver: Driver) -> None:
    job = submit(make_plan(driver, Het.STEPS))
    wait_all_started(driver)
    driver.do("sampler-0", "always kill")
    with pytest.raises(FailedJobError, match="death 3 in a row, 2 restarts are allowed"):
        job.result()
    assert accounting(job.job_id, Het.STEPS) == [("FAILED", "1:0")]
    assert driver.started("sampler-0", 2) is not None
    assert driver.started("sampler-0", 3) is None


def test_walltime_signal_interrupts_the_run(driver: Driver) -> None:
    job = submit(make_plan(driver, Het.JOB))
    wait_all_started(driver)
    # what `--signal=B:USR2@60` sends
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], check=True)
    assert accounting(job.job_id, Het.JOB)[0] == ("FAILED", "75:0")
    assert (driver.run / "do/learner-1.stopped").exists()
    assert ended(driver)["exit_code"] == ExitCode.INTERRUPTED
    assert describe_run(RunDir(driver.run)).state is RunState.INTERRUPTED
    job._results_timeout_s = 0
    with pytest.raises(UncompletedJobError, match="has not produced any output"):
        job.result()


def test_requeued_job_makes_the_next_attempt(driver: Driver) -> None:
    job = submit(make_plan(driver, Het.JOB, Requeue.REQUEUE))
    wait_all_started(driver)
    job.paths.result_pickle.touch()  # of an earlier run, and of a save that was cut short
    job.paths.result_pickle.with_suffix(".pkl.save_tmp").touch()
    subprocess.run(["scontrol", "requeue", job.job_id], check=True)
    again = driver.wait_started("learner-1", 1)
    assert again["world"]["attempt"] == 2
    assert again["world"]["job_id"] == job.job_id
    assert not job.paths.result_pickle.exists()
    driver.do("finish")
    assert job.result() == ExitCode.DONE
    assert accounting(job.job_id, Het.JOB) == [("COMPLETED", "0:0")] * 2
    assert ended(driver, 2)["reason"] == "learner completed"


SUPERVISE = """
import json, sys
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.launch.srun import SlurmStepLauncher
from hpc_rlhf.launch.supervisor import run_attempt
sys.exit(run_attempt(JobPlan.from_json(json.load(open(sys.argv[1]))), SlurmStepLauncher))
"""


def test_script_by_hand(driver: Driver) -> None:
    """A script without Submitit: the same supervisor; a job of another shape is refused."""
    plan = make_plan(driver, Het.STEPS)
    codes = []
    for shape in (plan, make_plan(driver, Het.JOB)):
        path = driver.run / "plan.json"
        path.write_text(json.dumps(shape.to_json()))
        script = render_script(plan, [sys.executable, "-c", SUPERVISE, str(path)])
        driver.do("finish")
        done = subprocess.run(  # --wait passes the job's exit code on
            ["sbatch", "--parsable", "--wait", f"--output={driver.run}/batch-%j.out"],
            check=False,
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
        )
        codes += accounting(done.stdout.strip(), Het.STEPS)
    assert codes == [("COMPLETED", "0:0"), ("FAILED", "1:0")]

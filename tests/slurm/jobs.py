"""Jobs of milliseconds: the plan of tests/launch_program.py on three nodes, and what Slurm says of them."""

import subprocess
import time
from typing import Any

from hpc_rlhf.config import Het, Requeue
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources
from hpc_rlhf.run_dir import RunDir
from tests.launch_driver import Driver


def make_plan(driver: Driver, het: Het, requeue: Requeue = Requeue.NONE, **options: Any) -> JobPlan:
    """Two learner nodes, one sampler node with two replicas, each with a GPU."""
    learner = Resources(nodes=2, gpus_per_node=2, mem_per_node_mb=400)
    sampler = Resources(tasks_per_node=2, gpus_per_node=2, mem_per_node_mb=400)
    plan = driver.plan()
    return JobPlan(
        name="launch-test",
        run_dir=plan.run_dir,
        components=(
            ComponentPlan("learner", learner),
            ComponentPlan("sampler", sampler, replicas=2, max_restarts=2),
        ),
        het=het,
        requeue=requeue,
        prefix=plan.prefix,
        environment=(("OMP_NUM_THREADS", "1"),),
        **{"time_min": 5, "signal_delay_s": 60, **options},
    )


def wait_all_started(driver: Driver) -> None:
    for name in ("learner-0", "learner-1", "sampler-0", "sampler-1"):
        driver.wait_started(name)


def accounting(job_id: str, het: Het) -> list[tuple[str, str]]:
    """State and exit code of the job, of every component by its number, once Slurm has closed it."""
    command = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "JobID,State,ExitCode"]
    names = [f"{job_id}+0", f"{job_id}+1"] if het is Het.JOB else [job_id]
    until = time.monotonic() + 30
    while True:
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows = sorted(line.split("|") for line in out.splitlines())
        live = {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"} & {state for _, state, _ in rows}
        # at first the leader can be there alone, and as a plain job
        if [job for job, _, _ in rows] == names and not live:
            return [(state.split()[0], code) for _, state, code in rows]
        assert time.monotonic() < until, f"sacct does not show the end of {names} but {rows}"
        time.sleep(0.2)


def ended(driver: Driver, attempt: int = 1) -> dict:
    return read_json(RunDir(driver.run).attempt(attempt).ended)

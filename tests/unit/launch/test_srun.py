import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf.config import Het
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch import srun
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources
from hpc_rlhf.launch.srun import (
    CommandKilled,
    JobRecord,
    SrunStep,
    allocation_end,
    choose_node,
    component_nodes,
    parse_job,
    parse_srun,
    slurm_command,
    srun_options,
    step_environment,
)
from hpc_rlhf.launch.steps import StepExit, TaskDeath
from tests.launch_driver import wait_until

PLAN = JobPlan(
    name="demo",
    run_dir=Path("/runs/demo"),
    components=(
        ComponentPlan("learner", Resources(2, 4, 6, 4, 64000)),
        ComponentPlan("sampler", Resources(2, 2, 8, 4, 50000), replicas=4),
    ),
)


def test_options_in_a_heterogeneous_job() -> None:
    learner = srun_options(PLAN, "learner", None, ["n1", "n2"])
    assert learner[:8] == [
        "--job-name=learner",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=6",
        "--exact",
        "--mem=64000M",
        "--gpus-per-node=4",
    ]
    assert learner[-1] == "--het-group=0"
    assert {"--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--input=none"} < set(learner)
    replica = srun_options(PLAN, "sampler", 3, ["n4"])
    assert replica[:8] == [
        "--job-name=sampler-3",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--exact",
        "--mem=25000M",
        "--gpus-per-node=2",
    ]
    assert replica[-2:] == ["--het-group=1", "--nodelist=n4"]


def test_options_in_one_allocation() -> None:
    plan = replace(PLAN, het=Het.STEPS)
    relative = [
        srun_options(plan, name, replica, ["n"])[-1]
        for name, replica in [("learner", None), *(("sampler", k) for k in range(4))]
    ]
    assert relative == ["--relative=0", *["--nodelist=n"] * 4]
    assert not any("het-group" in option for option in srun_options(plan, "learner", None, []))


def test_node_of_a_replica() -> None:
    nodes = ["n1", "n2", "n3"]
    assert choose_node(nodes, 1, set()) == "n2"
    assert choose_node(nodes, 1, {"n1", "n3"}) == "n2"
    assert choose_node(nodes, 1, {"n2"}) == "n3"
    assert choose_node(nodes, 1, {"n2", "n3"}) == "n1"
    assert choose_node(nodes, 1, set(nodes)) is None


def test_options_of_a_component_without_sizes() -> None:
    bare = ComponentPlan("learner", Resources())
    plan = replace(PLAN, components=(bare, PLAN.components[1]), het=Het.STEPS)
    options = srun_options(plan, "learner", None, ["n1"])
    assert "--mem=0" in options  # no share of its own that others would wait for
    assert "--gres=none" in options  # and none of the GPUs that its node has for the others
    assert "--gres=none" not in srun_options(replace(plan, het=Het.JOB), "learner", None, ["n1"])
    own = replace(bare, resources=Resources(extra=(("gres", "gpu:2"),)))
    options = srun_options(replace(plan, components=(own, plan.components[1])), "learner", None, [])
    assert not any(option.startswith("--g") for option in options)


def test_step_environment() -> None:
    environ = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "12",
        "SLURM_HET_SIZE": "2",
        "SLURM_NTASKS_HET_GROUP_0": "4",
        "SLURM_CONF": "/etc/slurm.conf",
    }
    stale = {
        "SLURM_MEM_PER_NODE": "500",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TRES_PER_TASK": "cpu:1",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_EXPORT_ENV": "NONE",
        "HPC_RLHF_RANK": "0",
    }
    assert step_environment({**environ, **stale}) == environ


def test_nodes_of_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun, "_expand", lambda text: text.split(","))
    het = {
        "SLURM_JOB_ID": "12",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "n1,n2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1,n2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n7,n8",
    }
    assert component_nodes(PLAN, het) == {"learner": ["n1", "n2"], "sampler": ["n7", "n8"]}
    plain = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1,n2,n3,n4,n5"}
    steps = replace(PLAN, het=Het.STEPS)
    assert component_nodes(steps, plain) == {"learner": ["n1", "n2"], "sampler": ["n3", "n4"]}
    with pytest.raises(UserError, match=r"job 12 has 1 het component\(s\), the plan needs 2"):
        component_nodes(PLAN, plain)
    with pytest.raises(UserError, match=r"cluster.sampler.nodes=2: job 12 has only 1 node"):
        component_nodes(steps, {**plain, "SLURM_JOB_NODELIST": "n1,n2,n3"})


# What srun 22.05 printed, with lines of the tasks in between
KILLED = """\
srun: Job 1 step creation temporarily disabled, retrying (Requested nodes are busy)
srun: Step created for job 1
got srun: error: something
srun: error: node[2-3]: tasks 2,4: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.1
slurmstepd-node1: error: *** STEP 1.1 ON node1 CANCELLED AT 2026-11-29T16:45:07 ***
srun: error: node1: task 0: Killed
srun: Force Terminated StepId=1.1
"""
SEVERAL = """\
srun: error: node1: task 0: Exited with exit code 75
srun: error: node2: tasks 2-3: Segmentation fault (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=1.3
srun: error: node1: task 1: Terminated
"""


@pytest.mark.parametrize(
    ("text", "returncode", "expected"),
    [
        ("anything", 0, StepExit(0)),
        (KILLED, 137, StepExit(137, (TaskDeath(2, "node2", signal=9),))),
        (
            SEVERAL,
            139,
            StepExit(75, (TaskDeath(0, "node1", exit_code=75), TaskDeath(2, "node2", signal=11))),
        ),
        (
            "srun: error: gpu07: task 5: Out Of Memory\n",
            1,
            StepExit(137, (TaskDeath(5, "gpu07", signal=9, cause="out of memory"),)),
        ),
        (
            "srun: error: Node failure on node[3,5]\nsrun: error: Nodes node3 are still not ready\n",
            1,
            StepExit(1, (TaskDeath(None, "node3", node_failed=True),)),
        ),
        (
            "srun: error: Unable to create step for job 3: Requested nodes are busy\n",
            1,
            StepExit(1, detail="srun: Unable to create step for job 3: Requested nodes are busy"),
        ),
        (
            "srun: forcing job termination\nsrun: error: node1: tasks 0-1: Killed\n",
            137,
            StepExit(143, detail="its srun was told to end"),
        ),
        ("", -9, StepExit(137, detail="its srun was killed by SIGKILL")),
        ("", 4, StepExit(4)),
    ],
)
def test_who_died(text: str, returncode: int, expected: StepExit) -> None:
    assert parse_srun(text, returncode) == expected


def test_srun_that_hangs_after_a_death_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srun, "peer_grace_s", lambda _death: 0.2)
    monkeypatch.setattr(srun, "KILL_GRACE_S", 0.2)
    log = tmp_path / "learner-srun.log"
    log.write_text("srun: error: node9: task 9: Killed\n")  # of an earlier incarnation
    hang = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('srun: error: node2: task 1: Killed', flush=True); time.sleep(60)"
    )
    with log.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen([sys.executable, "-c", hang], stdout=output)
    step = SrunStep("learner", "node2", process, log, offset)
    wait_until(lambda: step.poll() is not None, "the step to end", 10)
    assert step.poll() == StepExit(137, (TaskDeath(1, "node2", signal=9),))


def test_job_record_is_of_the_leader() -> None:
    text = (
        "JobId=12 HetJobId=12 JobName=a=b JobState=COMPLETING Reason=TimeLimit Dependency=(null) "
        "Requeue=1 Restarts=3 BatchFlag=1 StartTime=2026-11-29T18:08:41 EndTime=2026-11-29T18:18:41 "
        "Deadline=N/A\n"
        "JobId=13 HetJobId=12 JobState=RUNNING Reason=None Restarts=0 EndTime=Unknown\n"
    )
    expected = JobRecord("COMPLETING", "TimeLimit", 3, "2026-11-29T18:08:41", "2026-11-29T18:18:41")
    assert parse_job(text) == expected
    assert [JobRecord(s).holds_nodes for s in ("COMPLETING", "PENDING")] == [True, False]


def test_end_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "1795976285"}
    assert allocation_end({}, 0.0) is None
    assert allocation_end(environ, 0.0) == 1795976285
    started = {**environ, "SLURM_JOB_START_TIME": "1795976000"}
    assert allocation_end(started, 1795976090.5) == 1795976285  # nodes were booted first
    assert allocation_end(started, 1795975940.0) == 1795976225  # this clock is a minute behind
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    answers = [
        JobRecord("RUNNING", start_time="2026-11-29T18:08:05", end_time="2026-11-29T18:18:05"),
        JobRecord("RUNNING", start_time="2026-11-29T18:08:05", end_time="Unknown"),
        JobRecord("RUNNING", end_time="2026-11-29T18:18:05"),
    ]
    monkeypatch.setattr(srun, "job_record", lambda _job: answers.pop(0))
    before_23_02 = {"SLURM_JOB_ID": "12"}
    assert allocation_end(before_23_02, 1795972085.0) == 1795972685  # 17:18:05 UTC
    assert allocation_end(before_23_02, 0.0) is None
    assert allocation_end(before_23_02, 0.0) == 1795972685
    monkeypatch.undo()
    time.tzset()


def test_a_command_that_was_killed_may_have_done_its_work() -> None:
    with pytest.raises(CommandKilled, match="was killed by SIGTERM"):
        slurm_command(["sh", "-c", "kill -TERM $$"])

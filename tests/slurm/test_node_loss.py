"""Nodes that lose their power or their network under a run, in real Slurm."""

import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf.config import Het, Requeue
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Options, Resources
from hpc_rlhf.launch.slurm import submit
from hpc_rlhf.launch.srun import job_record
from hpc_rlhf.run_dir import RunDir
from tests.conftest import SlurmSandbox
from tests.e2e_compare import assert_same
from tests.e2e_driver import START_TIMEOUT_S, Command
from tests.launch_driver import Driver, processes_of, wait_until
from tests.slurm.jobs import accounting, ended, make_plan, wait_all_started
from tests.slurm.preempt import nodes_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture
def sandbox(slurm_cluster: SlurmSandbox) -> Iterator[SlurmSandbox]:
    """The cluster, with all nodes up, connected and free again afterwards."""
    yield slurm_cluster
    slurm_cluster.restore()


@pytest.fixture
def patient_slurm(sandbox: SlurmSandbox) -> Iterator[SlurmSandbox]:
    """One that takes a silent node for down after a minute, not after seconds (5 min by default)."""
    conf = sandbox.slurm_conf.read_text()
    sandbox.slurm_conf.write_text(re.sub(r"(?m)^SlurmdTimeout=.*", "SlurmdTimeout=60", conf))
    subprocess.run(["scontrol", "reconfigure"], check=True)
    yield sandbox
    sandbox.slurm_conf.write_text(conf)
    subprocess.run(["scontrol", "reconfigure"], check=True)


def node_of(driver: Driver, name: str, incarnation: int = 0) -> str:
    return str(driver.wait_started(name, incarnation)["world"]["node"])


def log(driver: Driver) -> str:
    return (driver.run / "attempts/1/logs/supervisor.log").read_text()


@pytest.mark.parametrize(
    ("het", "how"),
    [
        (Het.JOB, "kill-node"),
        pytest.param(Het.STEPS, "cut-node", marks=pytest.mark.soak),
    ],
)
def test_lost_node_of_the_learner_ends_the_attempt_and_the_run_goes_on(
    driver: Driver, sandbox: SlurmSandbox, het: Het, how: str
) -> None:
    submit(make_plan(driver, het, Requeue.REQUEUE))
    wait_all_started(driver)
    node = node_of(driver, "learner-1")
    sandbox(how, node.removeprefix("node"))
    began = time.monotonic()
    wait_until(lambda: RunDir(driver.run).attempt(1).ended.exists(), "the attempt to end", 30)
    assert time.monotonic() - began < 15
    ending = ended(driver)
    assert ending["exit_code"] == ExitCode.INTERRUPTED
    assert (ending["component"], ending["rank"], ending["node"]) == ("learner", 1, node)
    assert ending["reason"] == f"learner rank 1 on {node} lost that node in phase train of step 7"
    wait_until(lambda: driver.started("learner-1", 1) is not None, "the next attempt", 120)
    assert node not in {node_of(driver, name, 1) for name in ("learner-0", "learner-1")}
    # by a new job, or by Slurm's own requeue where that was faster
    last = read_json(RunDir(driver.run).attempt(2).started)["job_id"]
    driver.do("finish")
    assert accounting(last, het)[0] == ("COMPLETED", "0:0")


def two_sampler_nodes(driver: Driver, het: Het, extra: Options) -> JobPlan:
    learner = ComponentPlan("learner", Resources(nodes=1, mem_per_node_mb=400))
    resources = Resources(nodes=2, mem_per_node_mb=400, extra=extra)
    sampler = ComponentPlan("sampler", resources, replicas=2, max_restarts=2)
    return replace(make_plan(driver, het, Requeue.REQUEUE), components=(learner, sampler))


@pytest.mark.parametrize(
    ("het", "has_room"),
    [
        (Het.JOB, True),
        pytest.param(Het.JOB, False, marks=pytest.mark.soak),
        pytest.param(Het.STEPS, True, marks=pytest.mark.soak),
        pytest.param(Het.STEPS, False, marks=pytest.mark.soak),
    ],
)
def test_samplers_go_on_without_one_of_their_nodes(
    driver: Driver, patient_slurm: SlurmSandbox, het: Het, has_room: bool
) -> None:
    """In the live job: the replica moves to the other node, or is given up where that is full."""
    extra = (("exclusive", ""), ("mem", "1000M")) if has_room else ()
    job = submit(two_sampler_nodes(driver, het, extra))
    left, lost = node_of(driver, "sampler-0"), node_of(driver, "sampler-1")
    driver.wait_started("learner-0")
    patient_slurm("kill-node", lost.removeprefix("node"))
    wait_until(lambda: f"sampler replica 1 on {lost} lost that node" in log(driver), "the loss", 15)
    if has_room:
        assert node_of(driver, "sampler-1", 1) == left
    else:
        wait_until(lambda: "sampler-1: given up" in log(driver), "it to be given up")
        assert "the attempt goes on with 1 sampler(s)" in log(driver)
    assert job_record(job.job_id).state == "RUNNING"
    assert driver.started("learner-0", 1) is None
    assert driver.started("sampler-0", 1) is None
    driver.do("finish")
    assert job.result() == ExitCode.DONE


@pytest.mark.soak
@pytest.mark.parametrize("component", ["learner-0", "sampler-1"])
def test_slurm_requeues_a_job_whose_node_it_takes_for_down(
    driver: Driver, sandbox: SlurmSandbox, component: str
) -> None:
    """With the supervisor's node, of which nobody is left to say so, and with a sampler's."""
    job = submit(two_sampler_nodes(driver, Het.JOB, ()))
    node = node_of(driver, component)
    driver.wait_started("sampler-0")
    sandbox("kill-node", node.removeprefix("node"))
    wait_until(lambda: driver.started("learner-0", 1) is not None, "the next attempt", 120)
    assert job_record(job.job_id).restarts == 1
    assert RunDir(driver.run).attempt(1).ended.exists() == (component != "learner-0")
    if component != "learner-0":
        assert ended(driver)["exit_code"] == ExitCode.INTERRUPTED
        assert (driver.run / "checkpoints/step_8/manifest.json").exists(), "asked to save before"
    driver.do("finish")
    assert job.result() == ExitCode.DONE


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_main_job_without_a_node_of_its_learner(tmp_path: Path, sandbox: SlurmSandbox) -> None:
    """Real components: queued anew on the nodes that are left, and in the end the same run."""
    steps = 8
    overrides = (
        "learner.parallel={tensor: 2, pipeline: 1}",
        "learner.optimizer.lr=1e-4",
        "run.deterministic=true",
        "run.prompts_per_step=4",
        f"run.steps={steps}",
        "checkpoint.every_steps=1",
        "model.max_sequence_tokens=60",
        "sampling.max_new_tokens=50",
        "warmup.steps=5",
    )
    straight = Command(tmp_path, "straight", overrides)
    local = ("cluster=local", "cluster.learner={nodes: 1, tasks_per_node: 2}")
    done = straight("run", *local, timeout_s=300)
    assert done.returncode == 0, done.stderr

    command = Command(tmp_path, "loses-a-node", overrides)
    run = command.run_dir
    resources = ("cluster.learner={nodes: 2, tasks_per_node: 1}", "cluster.sampler.nodes=1")
    done = command("submit", "cluster=slurm", *resources)
    assert done.returncode == 0, done.stderr
    try:
        wait_until(lambda: len(command.steps()) >= 2, "two steps", START_TIMEOUT_S)
        lost = nodes_of(run, 1, "learner")[1]
        sandbox("kill-node", lost.removeprefix("node"))
        began = time.monotonic()
        wait_until(run.attempt(1).ended.exists, "the attempt to end", 30)
        assert time.monotonic() - began < 15
        assert (
            f"learner rank 1 on {lost} lost that node" in read_json(run.attempt(1).ended)["reason"]
        )
        wait_until(run.complete.exists, "the end of the run", 300)
        assert run.attempt_numbers() == [1, 2]
        assert lost not in nodes_of(run, 2, "learner") + nodes_of(run, 2, "sampler-0")
        assert_same(command, straight)
    finally:
        subprocess.run(["scancel", "--me", "--name=loses-a-node"], check=True)
        wait_until(lambda: not processes_of(run.path), "no process to be left", 60)

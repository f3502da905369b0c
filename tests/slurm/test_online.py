"""The main job under real Slurm: heterogeneous, by hand, and as steps of one allocation."""

import subprocess
import time
from pathlib import Path

import pytest

from hpc_rlhf.launch.status import RunState, describe_run
from hpc_rlhf.run_dir import RunDir
from tests.e2e_driver import COMMAND, Command
from tests.launch_driver import processes_of, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]

STEPS = ("run.steps=2", "checkpoint.every_steps=2")
ENDED_TIMEOUT_S = 240


def wait_completed(job: str, run: RunDir) -> None:
    """Wait for every component to be COMPLETED, and for nothing to be left."""

    def states() -> set[str]:
        done = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State"],
            check=True,
            capture_output=True,
            text=True,
        )
        return set(done.stdout.split())

    unfinished = {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"}
    wait_until(lambda: states() and not states() & unfinished, f"job {job}", ENDED_TIMEOUT_S)
    assert states() == {"COMPLETED"}, describe_run(run)
    assert describe_run(run).state is RunState.COMPLETE
    wait_until(lambda: not processes_of(run.path), "no process to be left", 15)


def components(job: str) -> list[str]:
    done = subprocess.run(
        ["squeue", "-h", "-j", job, "-o", "%i"], check=True, capture_output=True, text=True
    )
    return sorted(done.stdout.split())


def nodes_by_component(run: RunDir) -> dict[str, str]:
    text = (run.attempt(1).path / "logs/supervisor.log").read_text()
    lines = [line.split() for line in text.splitlines() if ": started on " in line]
    return {line[2].rstrip(":"): line[5] for line in lines}


@pytest.mark.parametrize("cluster", ["slurm", "slurm_steps"])
def test_submitted_run_completes(cluster: str, tmp_path: Path, slurm_cluster: object) -> None:
    command = Command(tmp_path, overrides=STEPS)
    done = command("submit", f"cluster={cluster}")
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[2].rstrip(";")
    wait_until(lambda: command.run_dir.attempt_numbers(), "the job to start", 60)
    ids = [f"{job}+0", f"{job}+1"] if cluster == "slurm" else [job]
    assert components(job) == ids
    time.sleep(1)
    nodes = nodes_by_component(command.run_dir)
    assert len(nodes["learner"].split(",")) == 2
    assert len({*nodes["learner"].split(","), nodes["sampler-0"], nodes["sampler-1"]}) == 4
    wait_completed(job, command.run_dir)
    assert command.steps() == [1, 2]
    assert {record["sync/replicas"] for record in command.metrics()} == {2}


def test_hand_written_script_completes(tmp_path: Path, slurm_cluster: object) -> None:
    """slurm/online_het.sbatch, with the overrides of the tests."""
    command = Command(tmp_path, overrides=STEPS)
    script = Path("slurm/online_het.sbatch").read_text()
    prefix, _, overrides = script.rpartition("exec hpc-rlhf run ")
    assert overrides.split() == ["experiment=quickstart", "cluster=slurm", "run.name=online_het"]
    arguments = " ".join(command.arguments("cluster=slurm"))
    (tmp_path / "job.sbatch").write_text(f"{prefix}exec {COMMAND} run {arguments}\n")
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={tmp_path}/job.out", str(tmp_path / "job.sbatch")],
        check=True,
        capture_output=True,
        text=True,
    )
    wait_completed(done.stdout.strip(), command.run_dir)
    assert command.steps() == [1, 2]
    assert "reward" in (tmp_path / "job.out").read_text()

"""A chain of dependent jobs under real Slurm: each waits for the one before, whatever its job's id."""

import re
import subprocess
from pathlib import Path

import pytest

from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.status import RunState, describe_run
from hpc_rlhf.observe.metrics import read_metrics
from hpc_rlhf.run_dir import RunDir
from tests.e2e_driver import Command
from tests.launch_driver import processes_of, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]

SMALL = (
    "cluster=slurm",
    "cluster.learner.nodes=1",
    "cluster.sampler.nodes=1",
    "chain.sft.run.steps=2",
    "chain.reward_model.run.steps=2",
    "chain.ppo.run.steps=3",
)


def _submit(command: Command, *more: str) -> dict[str, str]:
    """Job ids by link."""
    done = command("submit", *more)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^(\w+): submitted job (\d+)", done.stdout, re.MULTILINE))


def _runs(root: Path) -> list[RunDir]:
    return [RunDir(root / f"chain-{name}") for name in ("sft", "reward_model", "ppo")]


def _dependency(job: str) -> str:
    done = subprocess.run(
        ["scontrol", "show", "job", job], check=True, capture_output=True, text=True
    )
    found = re.search(r"Dependency=(\S+)", done.stdout)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("requeue", ["requeue", pytest.param("successor", marks=pytest.mark.soak)])
def test_each_job_begins_when_the_one_before_has_completed_its_run(
    requeue: str, tmp_path: Path, slurm_cluster: object
) -> None:
    """The first one is asked to save and go on: in a requeue of its job, or in another job."""
    overrides = (*SMALL, f"cluster.requeue={requeue}", "chain.sft.run.steps=100000")
    command = Command(tmp_path, "chain", overrides, base=("experiment=quickstart_ppo",))
    sft, reward, ppo = _runs(tmp_path)
    jobs = _submit(command)
    assert list(jobs) == ["sft", "reward_model", "ppo"]
    assert f"afterok:{jobs['reward_model']}" in _dependency(jobs["ppo"])
    assert describe_run(ppo).state is RunState.QUEUED
    twice = command("submit")
    assert twice.returncode == 2

    wait_until(lambda: len(read_metrics(sft)) >= 2, "two steps of the first link", 120)
    assert read_json(sft.next_job)["job_id"] == jobs["reward_model"]
    subprocess.run(["scancel", "--signal=USR2", "--batch", jobs["sft"]], check=True)
    wait_until(sft.attempt(2).started.exists, "the first link to go on", 120)
    assert not reward.attempt_numbers()
    second = str(read_json(sft.attempt(2).started)["job_id"])
    assert (second == jobs["sft"]) == (requeue == "requeue")
    assert describe_run(reward).state is RunState.QUEUED

    subprocess.run(["scancel", second], check=True)  # for good: what depends on it goes, too
    wait_until(lambda: describe_run(ppo).state is RunState.FAILED, "the last job to go", 90)
    wait_until(lambda: not processes_of(sft.path), "no process to be left", 30)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("requeue", ["requeue", "successor"])
def test_a_chain_goes_on_from_the_link_that_failed(
    requeue: str, tmp_path: Path, slurm_cluster: object
) -> None:
    """Its data are lost when the second link begins: the third leaves the queue, the first stays."""
    overrides = (*SMALL, f"cluster.requeue={requeue}")
    command = Command(tmp_path, "chain", overrides, base=("experiment=quickstart_ppo",))
    sft, reward, ppo = _runs(tmp_path)
    jobs = _submit(command)
    (pairs,) = tmp_path.glob(".assets/*/pairs.jsonl")
    away = pairs.rename(tmp_path / "away.jsonl")
    wait_until(
        lambda: describe_run(reward).state is RunState.FAILED, "the second link to fail", 180
    )
    assert sft.complete.exists()
    assert "pairs.jsonl" in str(describe_run(reward).reason)
    wait_until(lambda: describe_run(ppo).state is RunState.FAILED, "the last job to go", 90)
    assert describe_run(ppo).job_id == jobs["ppo"]

    away.rename(pairs)
    assert list(_submit(command)) == ["reward_model", "ppo"]
    wait_until(ppo.complete.exists, "the chain to complete", 240)
    wait_until(lambda: not processes_of(tmp_path), "no process to be left", 30)
    assert [run.attempt_numbers() for run in (sft, reward, ppo)] == [[1], [1, 2], [1]]
    done = command("submit")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is complete; nothing was queued") == 3
    assert "held-out accuracy" in done.stdout

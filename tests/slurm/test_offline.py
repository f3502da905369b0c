"""An offline stage under real Slurm: one component, one plain allocation; it goes on by itself."""

import re
import subprocess
from pathlib import Path

import pytest

from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.launch.status import RunState, describe_run
from hpc_rlhf.run_dir import RunDir
from tests.e2e_driver import Command
from tests.launch_driver import processes_of, wait_until
from tests.sums import write_pairs

STEPS = 150

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def _preempt(run: RunDir) -> None:
    """A job of a higher partition takes a node of the learner's."""
    log = (run.attempt(1).path / "logs/supervisor.log").read_text()
    node = re.search(r"learner: started on (\w+)", log)
    assert node is not None
    subprocess.run(
        [
            *("sbatch", "--partition=high", f"--nodelist={node[1]}", "--exclusive"),
            *("--output=/dev/null", "--wrap=sleep 1"),
        ],
        check=True,
        capture_output=True,
    )


def test_submitted_preempted_and_gone_on_with(tmp_path: Path, slurm_cluster: object) -> None:
    """DPO on two nodes: a plain job that saves, is requeued, and goes on from there to its end."""
    model = make_tiny_model(tmp_path / "model", init_std=0.1, max_positions=64)
    write_pairs(tmp_path / "pairs.jsonl", tmp_path / "held.jsonl", count=200, held_out_count=50)
    command = Command(
        tmp_path,
        "dpo",
        (
            "experiment=dpo",
            "cluster=slurm",
            "cluster.partition=low",
            f"model.path={model}",
            f"data.train={tmp_path / 'pairs.jsonl'}",
            f"data.eval={tmp_path / 'held.jsonl'}",
            "model.max_sequence_tokens=32",
            "learner.parallel.tensor=2",
            "offline.batch_size=16",
            f"run.steps={STEPS}",
            "checkpoint.every_steps=1000",
        ),
        base=(),
    )
    script = command("submit", "--dry-run").stdout
    assert "hetjob" not in script
    assert "#SBATCH --nodes=2" in script
    done = command("submit")
    assert done.returncode == 0, done.stderr
    run = command.run_dir
    wait_until(lambda: len(command.steps()) >= 5, "five steps", 120)
    _preempt(run)
    wait_until(run.complete.exists, "the run to complete", 200)
    assert command.steps() == list(range(1, STEPS + 1))
    attempts = {record["attempt"] for record in command.metrics()}
    assert attempts == {1, 2}
    wait_until(lambda: describe_run(run).state is RunState.COMPLETE, "the job to end", 30)
    wait_until(lambda: not processes_of(run.path), "no process to be left", 15)
    log = (run.attempt(1).path / "logs/supervisor.log").read_text()
    assert log.count("learner: started on ") == 1
    assert "sampler" not in log

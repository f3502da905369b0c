"""The main job is preempted by Slurm in each phase, and goes on as if nothing had happened.

``KILL_SEED`` chooses another case for the short test.
"""

import itertools
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rlhf.launch.srun import job_record
from hpc_rlhf.rollout import store
from hpc_rlhf.types import Phase
from tests.e2e_compare import assert_same
from tests.e2e_driver import Command
from tests.launch_driver import processes_of, wait_until
from tests.slurm.preempt import GRACE_S, PHASES, Preemption, accounted, preempt

pytestmark = pytest.mark.slurm

OVERRIDES = (
    "cluster.partition=low",
    "cluster.learner={nodes: 2, tasks_per_node: 1}",
    "cluster.sampler.nodes=1",
    "learner.parallel={tensor: 2, pipeline: 1}",
    "learner.micro_batch_tokens=512",
    "learner.optimizer.lr=1e-4",
    "algorithm.epochs=2",
    "algorithm.mini_batches=2",
    "run.deterministic=true",
    "run.prompts_per_step=4",
    "checkpoint.every_steps=1",
    "model.max_sequence_tokens=60",
    "sampling.max_new_tokens=50",
    "sampling.temperature=2.0",
    "warmup.steps=5",
)
CASES = list(itertools.product(("learner", "sampler-0"), PHASES))
SEED = int(os.environ.get("KILL_SEED", "0"))


@pytest.fixture
def command(tmp_path: Path, slurm_cluster: object) -> Iterator[Command]:
    command = Command(tmp_path, "preempted", OVERRIDES)
    yield command
    for name in ("preempted", "preempts"):
        subprocess.run(["scancel", "--me", f"--name={name}"], check=True)
    wait_until(lambda: not processes_of(command.run_dir.path), "no process to be left", 30)


@pytest.mark.timeout(420)
def test_preempted_once(command: Command) -> None:
    preempt_in_turn(command, [random.Random(SEED).choice(CASES)], steps=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_preempted_in_every_phase_from_either_component(command: Command, tmp_path: Path) -> None:
    """Ten times in one run, which equals one that was left alone, bit by bit."""
    cases = random.Random(SEED).sample(CASES, len(CASES))
    steps = 2 * len(cases)
    preempt_in_turn(command, cases, steps)
    straight = Command(tmp_path, "straight", OVERRIDES)
    local = ("cluster=local", "cluster.learner={nodes: 1, tasks_per_node: 2}", f"run.steps={steps}")
    done = straight("run", *local, timeout_s=900)
    assert done.returncode == 0, done.stderr
    assert_same(command, straight)


def preempt_in_turn(command: Command, cases: list[tuple[str, Phase]], steps: int) -> None:
    run = command.run_dir
    done = command("submit", "cluster=slurm", f"run.steps={steps}")
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[2].rstrip(";")
    results: list[Preemption] = []
    for number, (taken, phase) in enumerate(cases, 1):
        result = preempt(run, job, number, taken, phase)
        results.append(result)
        assert job_record(job).restarts == number
        assert max(result.durable_s, result.ended_s) < GRACE_S
    wait_until(run.complete.exists, "the end of the run", 300)
    wait_until(lambda: set(accounted(job)[-2:]) == {"COMPLETED"}, "the end of the job", 60)
    print(f"\n{table(results)}")

    assert command.steps() == list(range(1, steps + 1))
    attempts = {int(record["step"]): record["attempt"] for record in command.metrics()}
    for number, result in enumerate(results, 1):
        done = [step for step, attempt in attempts.items() if attempt == number + 1]
        assert min(done, default=result.saved.step + 1) == result.saved.step + 1
    for step in command.steps():  # of random weights before the first sync
        rollouts, _ = store.read_step(run.rollouts / f"step_{step}.h5")
        versions = {span.version for r in rollouts for span in r.completion.versions}
        assert versions == {step - 1}


def table(results: list[Preemption]) -> str:
    head = f"{'node of':10} {'phase':10} {'step':>4} {'saved':>7} {'samples':>7} {'durable':>8} {'ended':>8} {'again':>8}"
    rows = [
        f"{r.taken:10} {r.phase:10} {r.step:>4} {r.saved!s:>7} {r.samples_left:>7} "
        f"{r.durable_s:>6.1f} s {r.ended_s:>6.1f} s {r.again_s:>6.1f} s"
        for r in results
    ]
    return "\n".join([head, *rows])

"""The main job in walltimes of two minutes, a good part of which is set-up: it ends by itself.

``WALLTIME_STEPS`` chooses another length of the run: about 20 steps fit a walltime on two busy cores,
60 on two idle ones.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import read_json
from tests.e2e_compare import assert_same
from tests.e2e_driver import Command
from tests.launch_driver import processes_of, wait_until
from tests.slurm.preempt import accounted

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(3600)]

CYCLES = 5  # at least
STEPS = int(os.environ.get("WALLTIME_STEPS", "400"))
WALLTIME_MIN = 2
SETUP_S = 30
OVERRIDES = (
    "learner.parallel={tensor: 2, pipeline: 1}",
    "learner.optimizer.lr=1e-4",
    "run.deterministic=true",
    f"run.steps={STEPS}",
    "run.prompts_per_step=4",
    "checkpoint.every_steps=1000",  # what is kept is what the walltime made it keep
    "model.max_sequence_tokens=60",
    "sampling.max_new_tokens=50",
    "sampling.temperature=2.0",
    "warmup.steps=5",
)
ON_SLURM = (
    "cluster.learner={nodes: 2, tasks_per_node: 1}",
    "cluster.sampler.nodes=1",
    f"cluster.time_min={WALLTIME_MIN}",
    "cluster.signal_delay_s=20",
    f"cluster.setup=[sleep {SETUP_S}]",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The same run without any walltime."""
    command = Command(tmp_path_factory.mktemp("straight"), "straight", OVERRIDES)
    local = ("cluster=local", "cluster.learner={nodes: 1, tasks_per_node: 2}")
    done = command("run", *local, timeout_s=1200)
    assert done.returncode == 0, done.stderr
    return command


@pytest.fixture
def command(tmp_path: Path, slurm_cluster: object) -> Iterator[Command]:
    command = Command(tmp_path, "walltimes", (*OVERRIDES, *ON_SLURM))
    yield command
    subprocess.run(["scancel", "--me", "--name=walltimes"], check=True)
    wait_until(lambda: not processes_of(command.run_dir.path), "no process to be left", 30)


@pytest.mark.parametrize("style", ["requeue", "successor"])
def test_many_walltimes(command: Command, straight: Command, style: str) -> None:
    run = command.run_dir
    done = command("submit", "cluster=slurm", f"cluster.requeue={style}")
    assert done.returncode == 0, done.stderr
    wait_until(run.complete.exists, "the end of the run", 3000)
    last = run.attempt(run.attempt_numbers()[-1])
    wait_until(last.ended.exists, "the end of the last attempt", 60)

    print(f"\n{style}\n{table(command)}")
    endings = [read_json(run.attempt(n).ended) for n in run.attempt_numbers()]
    codes = [ending["exit_code"] for ending in endings]
    assert codes == [ExitCode.INTERRUPTED] * (len(codes) - 1) + [ExitCode.DONE], endings
    jobs = [read_json(run.attempt(n).started)["job_id"] for n in run.attempt_numbers()]
    assert len(set(jobs)) == (1 if style == "requeue" else len(jobs))
    for job in set(jobs):
        assert "TIMEOUT" not in accounted(job)
    wait_until(lambda: not queued(), "nothing of the run to be queued", 60)
    assert_same(command, straight)
    assert len(codes) > CYCLES, f"only {len(codes)} attempts: WALLTIME_STEPS is too small"


def queued() -> str:
    """Jobs of the run that Slurm still has, a successor that nobody needs among them."""
    command = ["squeue", "--me", "--noheader", "--name=walltimes"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def table(command: Command) -> str:
    """What each attempt made of its walltime, in seconds from the start of its allocation."""
    head = f"{'attempt':>7} {'begun':>7} {'first token':>11} {'steps':>5} {'a step':>7} {'ended':>7} {'left':>7}"
    rows = []
    for number in command.run_dir.attempt_numbers():
        attempt = command.run_dir.attempt(number)
        began, ended = read_json(attempt.started), read_json(attempt.ended)
        allocated = began["end_time"] - 60 * WALLTIME_MIN
        steps = [record for record in command.metrics() if record["attempt"] == number]
        seconds = [record["time/step"] for record in steps]
        startup = read_json(attempt.startup)["seconds"]
        rows.append(
            f"{number:>7} {began['time'] - allocated:>5.0f} s {startup:>9.0f} s {len(steps):>5} "
            f"{median(seconds) if seconds else 0:>5.1f} s {ended['time'] - allocated:>5.0f} s "
            f"{began['end_time'] - ended['time']:>5.0f} s"
        )
    return "\n".join([head, *rows])

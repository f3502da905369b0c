"""SIGKILL of random processes at random moments, each followed by a resume: still the same run.

``KILLS`` and ``KILL_SEED`` choose others: ``KILLS=50 python -m pytest -m soak tests/e2e``.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from hpc_rlhf.fs import read_json
from tests.e2e_compare import assert_same
from tests.e2e_driver import START_TIMEOUT_S, Command
from tests.launch_driver import wait_until

pytestmark = pytest.mark.engine

STEPS = 6
OVERRIDES = (
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "checkpoint.every_steps=1",
    "warmup.steps=5",
    "sampling.max_new_tokens=16",
    "sampling.temperature=2.0",
    # two models and two optimizers, an update of several steps, and first only the critic
    "algorithm=ppo",
    "critic.kind=separate",
    "critic.warmup_steps=2",
    "critic.parallel.tensor=1",  # two data-parallel ranks of it, beside two tensor-parallel ones
)


@pytest.mark.timeout(600)
def test_a_few_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, int(os.environ.get("KILLS", "2")), STEPS)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_many_kills(tmp_path: Path) -> None:
    kills = int(os.environ.get("KILLS", "50"))
    kill_at_random(tmp_path, kills, 2 * kills)


def kill_at_random(tmp_path: Path, kills: int, steps: int) -> None:
    """Compare a run that is killed ``kills`` times with one that is not."""
    rng = random.Random(int(os.environ.get("KILL_SEED", "0")))
    overrides = (*OVERRIDES, f"run.steps={steps}")
    straight = Command(tmp_path, "straight", overrides)
    done = straight("run", timeout_s=600)
    assert done.returncode == 0, done.stderr

    killed = Command(tmp_path, "killed", overrides)
    phases: Counter[tuple[str, str]] = Counter()
    while phases.total() < kills and not killed.run_dir.complete.exists():
        with killed.started() as process:
            while phases.total() < kills and process.poll() is None:
                wait_until(
                    lambda: process.poll() is not None or _sampling(killed),
                    "a step",
                    START_TIMEOUT_S,
                )
                time.sleep(rng.uniform(0, 3))
                if process.poll() is None:
                    victim = rng.choice(["learner", "learner", "sampler-0"])
                    phase = _phase(killed)
                    phases[victim, phase] += _kill(killed, victim, rng, process)
    assert phases.total() == kills, f"the run of {steps} steps was over before the last kill"
    if not killed.run_dir.complete.exists():
        done = killed("run", timeout_s=600)
        assert done.returncode == 0, done.stderr
    print("\nkilled        in phase      times")
    for (victim, phase), count in sorted((+phases).items()):
        print(f"{victim:13} {phase:13} {count}")
    assert_same(killed, straight)


def _kill(
    command: Command, victim: str, rng: random.Random, process: "subprocess.Popen[str]"
) -> bool:
    """SIGKILL one process of ``victim``, and wait for what the supervisor makes of it.

    False if there was nothing to kill: after the kill before, the attempt was about to end.
    """
    pids = command.pids(victim)
    try:
        os.kill(rng.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        process.communicate(timeout=60)
        return False
    if victim == "learner":
        process.communicate(timeout=60)
        assert process.returncode == 1
    else:
        wait_until(
            lambda: process.poll() is not None or command.pids(victim) != pids,
            "the sampler to be started again or the attempt to end",
            30,
        )
    return True


def _phase(command: Command) -> str:
    attempt = command.run_dir.attempt(command.run_dir.attempt_numbers()[-1])
    return str(read_json(attempt.progress)["phase"])


def _sampling(command: Command) -> bool:
    """Whether the newest attempt has begun its first step."""
    numbers = command.run_dir.attempt_numbers()
    if not numbers or command.run_dir.attempt(numbers[-1]).ended.exists():
        return False
    progress = command.run_dir.attempt(numbers[-1]).progress
    return progress.exists() and read_json(progress)["step"] > 0
